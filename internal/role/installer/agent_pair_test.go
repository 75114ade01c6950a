package installer_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// TestAgent_SecondWaits: it takes the node over when the first one has ended, or ends without having done anything.
func TestAgent_SecondWaits(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, first, second *nodetest.Agent){
		"SIGTERM":         func(t *testing.T, first, _ *nodetest.Agent) { t.Helper(); ends(t, first) },
		"SIGKILL":         func(_ *testing.T, first, _ *nodetest.Agent) { first.Kill() },
		"the second ends": func(t *testing.T, _, second *nodetest.Agent) { t.Helper(); ends(t, second) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			first := n.Start()
			first.AwaitReady()
			second := n.Start("EXCLUDE_NAMESPACES=namespace-of-the-second", "UNINSTALL_ON_EXIT=always", "--health-port=8001",
				"--monitoring-port=15015", "--ctrlz_port=9877")
			second.AwaitLog("waiting for another node agent to end")
			// The node is served, and a rollout that starts it first waits for nothing else.
			second.AwaitReady()
			if strings.Contains(n.Read(listFile), "namespace-of-the-second") {
				t.Error("both are at work")
			}
			end(t, first, second)
			if second.Running() == nil {
				second.AwaitReady()
				awaitExcluded(t, n, "namespace-of-the-second")
				return
			}
			if err := first.Ready(); err != nil {
				t.Errorf("the first one: %v", err)
			}
			if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
				t.Errorf("it took the first one's work away: -want +got:\n%s", diff)
			}
		})
	}
}

// TestAgent_PortInUse: an agent that never becomes ready without a reason is worse than an agent
// that does not start.
func TestAgent_PortInUse(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.Tree(".")
	ports := map[string]string{"--health-port": nodetest.HealthPort, "--monitoring-port": nodetest.MonitoringPort, "--ctrlz_port": "9876"}
	for _, port := range ports {
		n.Listen(port)
	}
	code, a := n.Run()
	for flag, port := range ports {
		if code != 1 || !strings.Contains(a.Log(), flag+" "+port+": address already in use") {
			t.Errorf("%s: exit code %d, log %s", flag, code, a.Log())
		}
	}
	if diff := cmp.Diff(before, n.Tree(".")); diff != "" {
		t.Errorf("it touched: -before +after:\n%s", diff)
	}
}
