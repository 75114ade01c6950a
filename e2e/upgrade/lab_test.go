package upgrade

import (
	"context"
	"encoding/json"
	"io"
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
	validation    = "istio-validation"
	proxyUser     = 1337
	containerd    = "/run/containerd/containerd.sock"
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
		if p.Namespace == meshNamespace {
			l.Logf("its log:\n%s", l.logs(p.Namespace, p.Name, p.Spec.Containers[0].Name))
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

// agent is its pod.
func (l *lab) agent() *core.Pod {
	l.Helper()
	pods, err := l.client.CoreV1().Pods(meshNamespace).List(l.Context(), meta.ListOptions{LabelSelector: "k8s-app=istio-cni-node"})
	l.must(err)
	if len(pods.Items) != 1 {
		l.Fatalf("there are %d agents", len(pods.Items))
	}
	return &pods.Items[0]
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
	all := []string{"--address", containerd, "--namespace", "k8s.io", "task", "exec", "--exec-id", "e2e", id}
	text, err := shared.Command(l.Context(), "ctr", append(all, args...)...).CombinedOutput()
	return string(text), err
}

// flows: the traffic of a pod goes through its proxy, in both directions: nothing but the proxy could answer, as nobody
// listens at either address.
func (l *lab) flows(name string) {
	l.Helper()
	in := func() (string, error) {
		text, err := shared.Command(l.Context(), shared.Box, "get", "http://"+l.get(appNamespace, name).Status.PodIP+":9999").CombinedOutput()
		return string(text), err
	}
	out := func() (string, error) {
		return l.inside(appNamespace, name, "app", "/box", "get", "http://192.0.2.1:9999")
	}
	for direction, ask := range map[string]func() (string, error){"in": in, "out": out} {
		// The proxy's containers are ready when they run, which is before they listen; and ctr loses what a program says
		// that ends at once, on a busy machine.
		const tries = 10
		for try := 1; ; try++ {
			text, err := ask()
			if err == nil && strings.Contains(text, "hello from "+name) {
				break
			}
			if try == tries {
				l.Errorf("%s: no traffic %s by the proxy: %v: %s\n%s", name, direction, err, text, l.rules(name))
				break
			}
			l.Logf("%s: no traffic %s by the proxy yet: %v: %s", name, direction, err, strings.TrimSpace(text))
			time.Sleep(beat)
		}
	}
}

// decision is what "istio-cni decisions" says of a pod.
type decision struct {
	Pod, Reason, Source string
	Captured            bool
	Requests            int
}

// decision asks in the agent's container. The zero value is for a pod that is not known there.
func (l *lab) decision(pod string) decision {
	l.Helper()
	text, err := l.inside(meshNamespace, l.agent().Name, "install-cni", "/usr/local/bin/istio-cni", "decisions", "--json", "--pod="+appNamespace+"/"+pod)
	if err != nil {
		l.Fatalf("%v: %s", err, text)
	}
	var all []decision
	l.must(json.Unmarshal([]byte(text), &all))
	if len(all) == 0 {
		return decision{}
	}
	return all[0]
}

// say runs a program on the node that must end well, and gives what it says.
func (l *lab) say(name string, args ...string) string {
	l.Helper()
	text, err := shared.Command(l.Context(), name, args...).CombinedOutput()
	if err != nil {
		l.explain()
		l.Fatalf("%s %q: %v: %s", name, args, err, text)
	}
	return string(text)
}

// files are the names in a directory of the node.
func (l *lab) files(dir string) []string { l.Helper(); return strings.Fields(l.say("ls", "-A", dir)) }

// rules are those of a pod, without counters.
func (l *lab) rules(name string) (all string) {
	l.Helper()
	id := strings.TrimPrefix(l.get(appNamespace, name).Status.ContainerStatuses[0].ContainerID, "containerd://")
	for line := range strings.Lines(l.say("ctr", "--address", containerd, "--namespace", "k8s.io", "task", "ls")) {
		task := strings.Fields(line)
		if task[0] != id {
			continue
		}
		for line := range strings.Lines(l.say("nsenter", "--net=/proc/"+task[1]+"/ns/net", "--", "iptables-save")) {
			if line[0] != '#' {
				all += strings.TrimSpace(strings.Split(line, " [")[0]) + "\n"
			}
		}
	}
	return all
}

func container(name, image string, user int64, args ...string) core.Container {
	return core.Container{
		Name: name, Image: image, ImagePullPolicy: core.PullNever, Args: args,
		SecurityContext: &core.SecurityContext{RunAsUser: &user, RunAsGroup: &user},
	}
}

// pods makes pods as injection does, and waits for them.
func (l *lab) pods(names ...string) {
	l.Helper()
	for _, name := range names {
		_, err := l.client.CoreV1().Pods(appNamespace).Create(l.Context(), injected(name), meta.CreateOptions{})
		l.must(err)
	}
	for _, name := range names {
		l.until(name, func() bool { return l.isReady(name) })
	}
}

// injected is what injection makes of a pod with an application that listens nowhere. The proxy's two ports are two
// containers.
func injected(name string) *core.Pod {
	pod := plain(name)
	pod.Annotations = map[string]string{statusKey: `{"containers":["istio-proxy"]}`}
	pod.Spec.InitContainers = []core.Container{
		container(validation, oursImage, proxyUser, "iptables", "--run-validation", "--skip-rule-apply", "--probe-timeout=2s"),
	}
	pod.Spec.Containers = append(pod.Spec.Containers,
		container("istio-proxy", boxImage, proxyUser, "serve", ":15001"),
		container("istio-proxy-inbound", boxImage, proxyUser, "serve", ":15006"))
	return pod
}

// plain is a pod outside of the mesh.
func plain(name string) *core.Pod {
	grace, no := int64(1), false
	return &core.Pod{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: core.PodSpec{
		AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &grace,
		Containers: []core.Container{container("app", boxImage, 1000)},
	}}
}

// remove deletes pods, waits until they are gone, and looks for what they had.
func (l *lab) remove(names ...string) {
	l.Helper()
	began := time.Now()
	var addresses []string
	for _, name := range names {
		addresses = append(addresses, l.get(appNamespace, name).Status.PodIP)
		l.must(l.client.CoreV1().Pods(appNamespace).Delete(l.Context(), name, meta.DeleteOptions{}))
	}
	l.awaitEnd(names...)
	l.until("their addresses to be free", func() bool {
		taken := l.files("/run/cni-ipam/e2e")
		return !slices.ContainsFunc(addresses, func(a string) bool { return slices.Contains(taken, a) })
	})
	l.Logf("%q are gone after %s", names, time.Since(began).Round(100*time.Millisecond))
}

func (l *lab) awaitEnd(names ...string) {
	l.Helper()
	for _, name := range names {
		l.until("the end of "+name, func() bool { return l.get(appNamespace, name) == nil })
	}
}

// restarts is how often the validation of a pod was tried again.
func (l *lab) restarts(name string) int32 {
	l.Helper()
	return l.get(appNamespace, name).Status.InitContainerStatuses[0].RestartCount
}
