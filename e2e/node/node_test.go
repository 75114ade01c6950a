// Package node tests istio-cni on a real node: containerd, kubelet and the scheduler, with images of the built program.
//
// All tests share one cluster, and each has a namespace of its own. Start reading at TestTheNodeAndAPodAreReady.
package node

import (
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// startupKey is the key of the taint with which the kubelet registers the node.
const startupKey = "cni.istio.io/not-ready"

var shared struct {
	*cluster.Cluster
	artifacts.Artifacts
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(lab.Shared(m, "node", func(ctx context.Context, found artifacts.Artifacts) (*cluster.Cluster, error) {
		if place := os.Getenv(hold); place != "" {
			return nil, holdNode(place, found)
		}
		c, err := start(ctx, "", found)
		shared.Cluster, shared.Artifacts = c, found
		return c, err
	}))
}

// start starts the cluster.
func start(ctx context.Context, place string, found artifacts.Artifacts) (*cluster.Cluster, error) {
	return cluster.Start(ctx, cluster.Options{
		Kube: found.Kube, Tier: cluster.Node, Dir: place, Images: []string{found.BoxImage, found.Image}, Pause: lab.BoxImage, Log: os.Stderr,
		RegisterWithTaints: []core.Taint{{Key: startupKey, Value: "true", Effect: core.TaintEffectNoSchedule}},
	})
}

// fixture holds a client of the shared cluster and the namespace of one test.
type fixture struct {
	lab.Test
	client    kubernetes.Interface
	namespace string
}

func newFixture(t *testing.T, namespace string) *fixture {
	t.Helper()
	l := &fixture{Test: lab.Test{T: t}, client: shared.Client(), namespace: namespace}
	l.OnTimeout = l.state
	object := &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: namespace}}
	_, err := l.client.CoreV1().Namespaces().Create(t.Context(), object, meta.CreateOptions{})
	l.Must(err)
	t.Cleanup(func() {
		err := l.client.CoreV1().Namespaces().Delete(context.Background(), namespace, meta.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	// Pods are admitted only after the namespace's default ServiceAccount exists.
	l.Until("the default account", func() bool {
		_, err := l.client.CoreV1().ServiceAccounts(namespace).Get(t.Context(), "default", meta.GetOptions{})
		return err == nil
	})
	return l
}

// state logs the events, which explain why a pod does not start.
func (l *fixture) state() {
	l.Helper()
	events, err := l.client.CoreV1().Events("").List(l.Context(), meta.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	for _, e := range events.Items {
		l.Logf("%s/%s: %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message)
	}
}

// container returns a container of a test image.
func container(name, image string, args ...string) core.Container {
	return core.Container{Name: name, Image: image, ImagePullPolicy: core.PullNever, Args: args}
}

// pod creates a pod.
func (l *fixture) pod(name string, tolerations []core.Toleration, containers ...core.Container) {
	l.Helper()
	grace := int64(1)
	pod := &core.Pod{
		ObjectMeta: meta.ObjectMeta{Name: name}, Spec: core.PodSpec{
			Containers: containers, Tolerations: tolerations, TerminationGracePeriodSeconds: &grace, RestartPolicy: core.RestartPolicyNever,
		},
	}
	_, err := l.client.CoreV1().Pods(l.namespace).Create(l.Context(), pod, meta.CreateOptions{})
	l.Must(err)
}

func (l *fixture) get(name string) *core.Pod {
	l.Helper()
	pod, err := l.client.CoreV1().Pods(l.namespace).Get(l.Context(), name, meta.GetOptions{})
	l.Must(err)
	return pod
}

func ready(pod *core.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c core.PodCondition) bool {
		return c.Type == core.PodReady && c.Status == core.ConditionTrue
	})
}

func (l *fixture) logs(name, container string) string {
	l.Helper()
	stream, err := l.client.CoreV1().Pods(l.namespace).GetLogs(name, &core.PodLogOptions{Container: container}).Stream(l.Context())
	l.Must(err)
	defer stream.Close() //nolint:errcheck // only read from
	text, err := io.ReadAll(stream)
	l.Must(err)
	return string(text)
}

func (l *fixture) node() *core.Node {
	l.Helper()
	node, err := l.client.CoreV1().Nodes().Get(l.Context(), cluster.NodeName, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return &core.Node{}
	}
	l.Must(err)
	return node
}

func anyTaint() []core.Toleration { return []core.Toleration{{Operator: core.TolerationOpExists}} }

// links returns the interfaces of the node's network namespace.
func (l *fixture) links() string {
	l.Helper()
	text, err := shared.Command(l.Context(), "ip", "-oneline", "link").CombinedOutput()
	l.Must(err)
	return string(text)
}

func TestTheNodeAndAPodAreReady(t *testing.T) {
	l := newFixture(t, "first")
	l.Until("the node", func() bool {
		return slices.ContainsFunc(l.node().Status.Conditions, func(c core.NodeCondition) bool {
			return c.Type == core.NodeReady && c.Status == core.ConditionTrue
		})
	})
	veths := strings.Count(l.links(), "veth")
	web := container("web", lab.BoxImage, "serve", ":8080")
	web.Ports = []core.ContainerPort{{ContainerPort: 8080, HostPort: 18080}}
	l.pod("two", anyTaint(), web, container("idle", lab.BoxImage))
	l.Until("the pod", func() bool { return ready(l.get("two")) })
	pod := l.get("two")
	if n := len(pod.Status.ContainerStatuses); n != 2 {
		t.Errorf("%d containers", n)
	}
	if text := l.logs("two", "web"); !strings.Contains(text, "serving on") {
		t.Errorf("its log: %q", text)
	}
	// Requests from the node to the pod's address, and from the test to the node's host port.
	text, err := shared.Command(t.Context(), shared.Box, "get", "http://"+pod.Status.PodIP+":8080").CombinedOutput()
	if err != nil || !strings.Contains(string(text), "hello from two") {
		t.Errorf("response of the pod: %q, %v", text, err)
	}
	node := l.node().Status.Addresses[0].Address
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+node+":18080", http.NoBody)
	l.Must(err)
	response, err := (&http.Client{Timeout: 5 * time.Second}).Do(request)
	l.Must(err)
	l.Must(response.Body.Close())
	// The binary in the image is the one under test.
	version, err := exec.CommandContext(t.Context(), shared.IstioCNI, "version").Output()
	l.Must(err)
	l.pod("version", anyTaint(), container("c", lab.Image, "istio-cni", "version"))
	l.Until("istio-cni version", func() bool { return l.get("version").Status.Phase == core.PodSucceeded })
	if text := l.logs("version", "c"); text != string(version) || !strings.Contains(text, "istio-cni") {
		t.Errorf("version of the image: %q, of the program: %q", text, version)
	}
	// Deleted pods leave no veth interface behind.
	l.Must(l.client.CoreV1().Pods(l.namespace).DeleteCollection(t.Context(), meta.DeleteOptions{}, meta.ListOptions{}))
	l.Until("the end of the pods", func() bool {
		pods, err := l.client.CoreV1().Pods(l.namespace).List(t.Context(), meta.ListOptions{})
		return err == nil && len(pods.Items) == 0 && strings.Count(l.links(), "veth") == veths
	})
}
