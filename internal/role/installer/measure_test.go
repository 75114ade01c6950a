//go:build measure

// A measurement that only make bench runs.

package installer_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAgent_ManyPods measures the agent of a node with 250 of 10,000 pods, and the agent of a node without pods: its memory after the
// start, and its work in a minute without changes.
func TestAgent_ManyPods(t *testing.T) {
	for name, pods := range map[string]int{"idle": 0, "many pods": 10_000} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			registerPods(t, n, pods)
			a := n.Start()
			a.AwaitReady()
			a.Await("the watches", func() bool { return n.API.Watches() >= 2 })
			time.Sleep(20 * time.Second) //nolint:forbidigo // a measurement of quiet
			requests := len(n.API.Requests())
			t.Logf("after the start: %s", usage(t, a.PID()))
			time.Sleep(time.Minute) //nolint:forbidigo // a measurement of quiet
			t.Logf("a minute later: %s, %d requests to the API server", usage(t, a.PID()), len(n.API.Requests())-requests)
		})
	}
}

// registerPods gives pods to the API server, one of 40 on this node.
func registerPods(t *testing.T, n *nodetest.Node, pods int) {
	t.Helper()
	const nodes = 40
	env := []kubetest.EnvVar{}
	for e := range 40 {
		env = append(env, kubetest.EnvVar{Name: fmt.Sprintf("ISTIO_META_VARIABLE_%d", e), Value: strings.Repeat("v", 40)})
	}
	for i := range pods {
		node := nodetest.NodeName
		if i%nodes != 0 {
			node = fmt.Sprintf("other-%d", i%nodes)
		}
		pod := kubetest.Pod{
			Namespace: "shop", Name: fmt.Sprintf("web-%d", i),
			Annotations: map[string]string{"sidecar.istio.io/status": strings.Repeat("x", 500), "last-applied": strings.Repeat("y", 1500)},
			Containers:  []kubetest.Container{{Name: "app", Env: env}, {Name: "istio-proxy", Env: env}},
		}.JSON(t)
		n.API.Set([]byte(strings.Replace(string(pod), `"nodeName":"node-1"`, fmt.Sprintf(`"nodeName":%q`, node), 1)))
	}
	n.API.Compact()
}

// usage returns a process's figures of proc(5): memory, threads, and CPU times in clock ticks.
func usage(t *testing.T, pid int) string {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check.OK(t, err)
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	check.OK(t, err)
	figures := regexp.MustCompile(`(?m)^(VmHWM|VmRSS|RssAnon|RssFile|Threads):.*`).FindAllString(string(status), -1)
	_, numbers, _ := strings.Cut(string(stat), ") ")
	ticks := strings.Fields(numbers)[11:13]
	return fmt.Sprintf("%q, utime and stime %q", figures, ticks)
}
