package repair

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestMemoryAndTraffic measures the cost of a node with 250 of the 10,000 pods in the cluster: 27 MiB, 9 of them
// anonymous, and 111 MiB without --node-name. The test asserts the traffic; the bound of the memory is far above these.
func TestMemoryAndTraffic(t *testing.T) {
	const pods, nodes = 10_000, 40
	l := newFixture(t)
	began := time.Now()
	size := l.createPods(pods, nodes)
	t.Logf("%d cores: %d pods of %d bytes of JSON made in %s", runtime.NumCPU(), pods, size, time.Since(began).Round(time.Second))
	kubeconfig := l.grant(mayWatch, mayReport, mayLabel)

	args := []string{"--label-pods", "--node-name=" + nodeOf(7)}
	through := l.tap(kubeconfig)
	d := l.daemon(through.kubeconfig, args...)
	l.Until("the broken pod", func() bool { return l.labelled("many-00007") == "true" })
	first := through.received()
	if len(first.pods) != pods/nodes {
		t.Errorf("%d pods were sent", len(first.pods))
	}
	t.Logf("with a node's name: %s", first)
	l.resident(d)

	// Only changes of pods on the node are sent.
	lab.InParallel(pods/10, func(i int) { l.annotate(fmt.Sprintf("many-%05d", i), "again") })
	l.pod("late", broken(), on(nodeOf(7)))
	l.Until("the late pod", func() bool { return l.labelled("late") == "true" })
	after := through.received()
	changes := 0
	for name, n := range after.pods {
		changes += n - first.pods[name]
	}
	t.Logf("after %d changes: %s; %d bytes and %d pods more", pods/10, after, after.wire-first.wire, changes)
	// 25 changes of the node's pods, the label of the first broken pod, and the late pod: created, status reported,
	// labelled.
	if most := pods/10/nodes + 1 + 3 + 1; changes > most {
		t.Errorf("%d changes were sent, want at most %d", changes, most)
	}
	rss := l.resident(d)
	d.stop()
	const bound = 64 << 20
	if rss > bound {
		t.Errorf("%d bytes are resident", rss)
	}

	// The same without --node-name, for all nodes.
	through = l.tap(kubeconfig)
	d = l.daemon(through.kubeconfig, "--label-pods")
	l.pod("later", broken(), on(nodeOf(8)))
	l.Until("the last pod", func() bool { return l.labelled("later") == "true" })
	t.Logf("without: %s", through.received())
	l.resident(d)
	d.stop()
	l.noForbiddenRequests()
}

func (s received) String() string {
	return fmt.Sprintf("%d pods in %d bytes, %d on the wire", len(s.pods), s.plain, s.wire)
}

func nodeOf(i int) string { return fmt.Sprintf("node-%02d", i) }

// resident logs and returns the resident set size of the process in bytes.
func (l *fixture) resident(d *repairer) int {
	l.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	l.Must(err)
	got := map[string]int{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if strings.HasPrefix(name, "VmRSS") || strings.HasPrefix(name, "VmHWM") || strings.HasPrefix(name, "Rss") {
			got[name], err = strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			l.Must(err)
		}
	}
	l.Logf("resident: %.1f MiB, of which %.1f MiB are anonymous; peak %.1f MiB",
		mib(got["VmRSS"]), mib(got["RssAnon"]), mib(got["VmHWM"]))
	return got["VmRSS"] << 10
}

func mib(kib int) float64 { const unit = 1024; return float64(kib) / unit }

// createPods creates injected pods, spread evenly over the nodes. Only those on node 7 have a status, and one of them
// is broken. It returns the size of a pod in JSON.
func (l *fixture) createPods(pods, nodes int) (size int) {
	l.Helper()
	lab.InParallel(pods, func(i int) {
		pod := injected(fmt.Sprintf("many-%05d", i), nodeOf(i%nodes))
		made, err := l.client.CoreV1().Pods(l.app).Create(l.Context(), pod, meta.CreateOptions{})
		if err == nil && i%nodes == 7 {
			status(ended(0), core.ContainerState{})(pod)
			if i == 7 {
				broken()(pod)
			}
			text := []byte(`{"status":` + encode(pod.Status) + `}`)
			made, err = l.client.CoreV1().Pods(l.app).Patch(l.Context(), pod.Name, types.MergePatchType, text, meta.PatchOptions{}, "status")
		}
		if err != nil {
			l.Error(err)
			return
		}
		if i == 7 {
			size = len(encode(made))
		}
	})
	if l.Failed() {
		l.FailNow()
	}
	return size
}

// injected returns a pod with the size of a real injected pod.
func injected(name, node string) *core.Pod {
	no, grace := false, int64(0)
	var env []core.EnvVar
	for i := range 40 {
		env = append(env, core.EnvVar{Name: fmt.Sprintf("ISTIO_META_%d", i), Value: strings.Repeat("value ", 6)})
	}
	container := func(name string, args ...string) core.Container {
		return core.Container{Name: name, Image: "registry.example.com/istio/proxyv2:1.30.0", Args: args}
	}
	proxy := container(proxy, "proxy", "sidecar", "--domain", "$(POD_NAMESPACE).svc.cluster.local", "--log_output_level=default:info")
	proxy.Env = env
	return &core.Pod{
		ObjectMeta: meta.ObjectMeta{
			Name: name, Labels: map[string]string{"app": name, "security.istio.io/tlsMode": "istio"},
			Annotations: map[string]string{
				statusKey: `{"initContainers":["istio-validation"],"containers":["istio-proxy"],"revision":"default"}`,
				"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("configuration ", 80),
			},
		},
		Spec: core.PodSpec{
			NodeName: node, AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &grace,
			InitContainers: []core.Container{container(validation, slices.Repeat([]string{"--flag=value"}, 12)...)},
			Containers:     []core.Container{proxy, container("app")},
		},
		Status: core.PodStatus{Phase: core.PodRunning, PodIP: "10.1.1.1", PodIPs: []core.PodIP{{IP: "10.1.1.1"}}},
	}
}
