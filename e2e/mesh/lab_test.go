package mesh

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

const (
	meshNamespace = "istio-system"
	appNamespace  = "app"
	statusKey     = "sidecar.istio.io/status"
)

// lab is what the test has.
type lab struct {
	*testing.T
	client kubernetes.Interface
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{T: t, client: shared.Client()}
	for _, namespace := range []string{meshNamespace, appNamespace} {
		l.must(shared.Namespace(t.Context(), namespace))
	}
	l.until("the node", func() bool {
		node, err := l.client.CoreV1().Nodes().Get(t.Context(), cluster.NodeName, meta.GetOptions{})
		return err == nil && slices.ContainsFunc(node.Status.Conditions, func(c core.NodeCondition) bool {
			return c.Type == core.NodeReady && c.Status == core.ConditionTrue
		})
	})
	return l
}

func (l *lab) must(err error) {
	l.Helper()
	if err != nil {
		l.explain()
		l.Fatal(err)
	}
}

// until waits for a condition. A validation that failed is tried again by the kubelet after up to 80 seconds, and machines are
// slow at times.
func (l *lab) until(what string, holds func() bool) {
	l.Helper()
	deadline := time.NewTimer(3 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			l.explain()
			l.Fatalf("gave up waiting: %s", what)
		}
	}
}

// explain logs events, states and the agent's log.
func (l *lab) explain() {
	l.Helper()
	ctx := context.Background()
	if events, err := l.client.CoreV1().Events("").List(ctx, meta.ListOptions{}); err == nil {
		for _, e := range events.Items {
			l.Logf("%s/%s: %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
	pods, err := l.client.CoreV1().Pods("").List(ctx, meta.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	for _, p := range pods.Items {
		l.Logf("%s/%s: %s, ready: %t, %s", p.Namespace, p.Name, p.Status.Phase, ready(&p), p.Status.PodIP)
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			if text := l.logs(p.Namespace, p.Name, c.Name); p.Namespace == meshNamespace || c.Name == validation {
				l.Logf("log of %s:\n%s", c.Name, text)
			}
		}
	}
}

// logs gives "" for a container that has not run.
func (l *lab) logs(namespace, pod, container string) string {
	stream, err := l.client.CoreV1().Pods(namespace).GetLogs(pod, &core.PodLogOptions{Container: container}).Stream(context.Background())
	if err != nil {
		return ""
	}
	defer stream.Close() //nolint:errcheck // only read from
	text, _ := io.ReadAll(stream)
	return string(text)
}

// get gives nil for a pod that is not there.
func (l *lab) get(namespace, name string) *core.Pod {
	l.Helper()
	pod, err := l.client.CoreV1().Pods(namespace).Get(l.Context(), name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	l.must(err)
	return pod
}

func (l *lab) isReady(name string) bool { l.Helper(); return ready(l.get(appNamespace, name)) }

func ready(pod *core.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.Conditions, func(c core.PodCondition) bool {
		return c.Type == core.PodReady && c.Status == core.ConditionTrue
	})
}

// failed tells whether the validation of a pod has ended because traffic is not redirected.
func (l *lab) failed(name string) bool {
	l.Helper()
	pod := l.get(appNamespace, name)
	return pod != nil && slices.ContainsFunc(pod.Status.InitContainerStatuses, func(s core.ContainerStatus) bool {
		is := func(s core.ContainerState) bool { return s.Terminated != nil && s.Terminated.ExitCode == 126 }
		return s.Name == validation && (is(s.State) || is(s.LastTerminationState))
	})
}

// event tells whether there is one on a pod with this reason and these words.
func (l *lab) event(name, reason, words string) bool {
	l.Helper()
	events, err := l.client.CoreV1().Events(appNamespace).List(l.Context(), meta.ListOptions{})
	l.must(err)
	return slices.ContainsFunc(events.Items, func(e core.Event) bool {
		return e.InvolvedObject.Name == name && e.Reason == reason && e.Source.Component == "cni-repair" && strings.Contains(e.Message, words)
	})
}

// inside runs a program in a container, as kubectl exec does, and gives what it says.
func (l *lab) inside(namespace, pod, container string, args ...string) (string, error) {
	l.Helper()
	id := ""
	for _, s := range l.get(namespace, pod).Status.ContainerStatuses {
		if s.Name == container {
			id = strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	return l.ctr(append([]string{"task", "exec", "--exec-id", "e2e", id}, args...)...)
}

// ctr asks containerd.
func (l *lab) ctr(args ...string) (string, error) {
	l.Helper()
	all := append([]string{"--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io"}, args...)
	text, err := shared.Command(l.Context(), "ctr", all...).CombinedOutput()
	return string(text), err
}

// ask asks for a URL from the node.
func (l *lab) ask(url string) (string, error) {
	l.Helper()
	text, err := shared.Command(l.Context(), shared.Box, "get", url).CombinedOutput()
	return string(text), err
}

// redirected tells whether the traffic of a pod goes through its proxy, in both directions: nothing but the proxy could
// answer, as nobody listens at either address.
func (l *lab) redirected(name string) (in, out bool) {
	l.Helper()
	text, err := l.ask("http://" + l.get(appNamespace, name).Status.PodIP + ":9999")
	in = err == nil && strings.Contains(text, "hello from "+name)
	text, err = l.inside(appNamespace, name, "app", "/box", "get", "http://192.0.2.1:9999")
	out = err == nil && strings.Contains(text, "hello from "+name)
	return in, out
}

// conflist is the primary network as it is on the node.
func (l *lab) conflist() string {
	l.Helper()
	text, err := os.ReadFile(filepath.Clean(shared.NodeFile("/etc/cni/net.d/10-e2e.conflist")))
	l.must(err)
	return string(text)
}
