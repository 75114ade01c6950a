package installer_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAgent_Ends has one agent that ends for good, one that may stay and one that must stay. Package teardown tests all other
// situations.
func TestAgent_Ends(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args        []string
		happen      func(*nodetest.Node)
		uninstalled bool
	}{
		"DaemonSet gone":        {nil, func(n *nodetest.Node) { n.API.Delete(nodetest.DaemonSetPath) }, true},
		"API server hangs":      {nil, func(n *nodetest.Node) { n.API.Fail(kubetest.Hang, kubetest.Forever) }, false},
		"never, DaemonSet gone": {[]string{"UNINSTALL_ON_EXIT=never"}, func(n *nodetest.Node) { n.API.Delete(nodetest.DaemonSetPath) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			before := n.Tree(nodetest.NetDir)
			a := n.Start(tc.args...)
			a.AwaitReady()
			installed := []any{n.Tree(nodetest.NetDir), n.Tree(nodetest.BinDir), n.Read(kubeconfig)}
			tc.happen(n)
			if !ends(t, a) {
				return
			}
			if tc.uninstalled {
				restored(t, n, before)
			} else if diff := cmp.Diff(installed, []any{n.Tree(nodetest.NetDir), n.Tree(nodetest.BinDir), n.Read(kubeconfig)}); diff != "" {
				t.Errorf("the installation was not kept: -before +after:\n%s", diff)
			}
		})
	}
}

// ends terminates the agent and expects exit code 0.
func ends(t *testing.T, a *nodetest.Agent) bool {
	t.Helper()
	a.Terminate()
	code := a.Wait()
	check.Equal(t, code, 0, "exit code")
	return code == 0
}

// restored expects the node's earlier state, except for a lock and the plugin's log in the run directory.
func restored(t *testing.T, n *nodetest.Node, before map[string]string) {
	t.Helper()
	check.Diff(t, "the configuration is not what it was", before, n.Tree(nodetest.NetDir))
	check.Equal(t, len(n.Tree(nodetest.BinDir)), 0, "programs that are left")
	for name := range n.Tree(nodetest.RunDir) {
		if name != "install.lock" && name != "istio-cni.log" {
			t.Errorf("file %q is left in the run directory", name)
		}
	}
}

// TestOnce_WaitsForConfiguration: install-once.txtar shows that it installs, and writes nothing the second time.
func TestOnce_WaitsForConfiguration(t *testing.T) {
	t.Parallel()
	n := connected(t)
	a := n.Start("--once")
	a.AwaitLog("waiting for a valid CNI configuration")
	n.Put(listFile, nodetest.BridgeList)
	check.Equal(t, a.Wait(), 0, "exit code")
	check.Diff(t, "the runtime loads", withUs(), types(t, n))
}

func TestUninstall_ByHand(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.Tree(nodetest.NetDir)
	a := n.Start()
	a.AwaitReady()
	// Sockets, lock, verdict and kubeconfig come back after their removal: the agent still holds the node.
	files, _ := filepath.Glob(n.Path(nodetest.RunDir + "/*"))
	for _, file := range files {
		check.OK(t, os.Remove(file))
	}
	a.Await(fmt.Sprintf("%q again", files), func() bool {
		now, _ := filepath.Glob(n.Path(nodetest.RunDir + "/*"))
		return len(files) >= 5 && slices.Equal(now, files)
	})
	if code, u := n.Run("--uninstall"); code != 1 || !strings.Contains(u.Log(), "a node agent is at work here and would install again") {
		t.Errorf("beside an agent: exit code %d, %s", code, u.Log())
	}
	check.Diff(t, "the refused uninstallation did something", withUs(), types(t, n))
	if !ends(t, a) {
		return
	}
	// By hand there is no API server, service account or environment.
	n.API.Stop()
	if code, u := n.Run("KUBERNETES_SERVICE_HOST=", "KUBERNETES_SERVICE_PORT=", "POD_NAMESPACE=", "--uninstall"); code != 0 {
		t.Errorf("exit code %d: %s", code, u.Log())
	}
	restored(t, n, before)
	check.Equal(t, len(n.Tree(nodetest.RunDir)), 0, "files left in the run directory")
}

// TestAgent_SecondWaits: the second agent takes the node over after the first agent, or ends without any change.
func TestAgent_SecondWaits(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, first, second *nodetest.Agent){
		"SIGTERM":         func(t *testing.T, first, _ *nodetest.Agent) { t.Helper(); ends(t, first) },
		"SIGKILL":         func(_ *testing.T, first, _ *nodetest.Agent) { first.Kill() },
		"the second ends": func(t *testing.T, _, second *nodetest.Agent) { t.Helper(); ends(t, second) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, first := running(t)
			second := n.Start("EXCLUDE_NAMESPACES=namespace-of-the-second", "UNINSTALL_ON_EXIT=always", "--health-port=8001",
				"--monitoring-port=15015", "--ctrlz_port=9877")
			second.AwaitLog("waiting for another node agent to end")
			// The first agent serves the node, and a rollout that starts the second agent first waits for nothing else.
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
			check.OK(t, first.Ready(), "the first one")
			check.Diff(t, "it took the first one's work away", withUs(), types(t, n))
		})
	}
}

// TestAgent_PortInUse: an agent that does not start is better than an agent that is never ready
// without a reason.
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
	check.Diff(t, "it touched", before, n.Tree("."))
}

// TestAgent_NoRightToConfigMap: Istio's chart grants no such right. The agent logs it once, not as a warning.
func TestAgent_NoRightToConfigMap(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.API.FailOn("/configmaps", kubetest.Forbidden, 1000)
	a := n.Start("EXCLUDE_NAMESPACES=kube-system")
	a.AwaitReady()
	a.AwaitLog(`level=INFO msg="live configuration is off: the agent has no right to list and watch its ConfigMap`)
	check.OK(t, check.Err(n.Add(n.NewPod("apps", "mesh", chaintest.Sidecar))))
	ends(t, a)
	refused := 0
	for _, request := range n.API.Requests() {
		if strings.Contains(request, "/configmaps") {
			refused++
		}
	}
	if log := a.Log(); refused != 1 || strings.Count(log, "ConfigMap") != 1 || strings.Contains(log, "level=WARN") {
		t.Errorf("%d requests; log:\n%s", refused, log)
	}
}

// TestAgent_WithoutNodesProcesses: a chart that repairs only by deletion mounts no /proc, and the audit is off without a warning.
func TestAgent_WithoutNodesProcesses(t *testing.T) {
	t.Parallel()
	_, a := running(t, "REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=false", "REPAIR_DELETE_PODS=true", "--host-roots=/nothing", "--host-proc=/nothing")
	for _, line := range []string{`level=INFO msg="the audit is off`, `level=INFO msg="the processes of the node are not seen`} {
		a.AwaitLog(line)
	}
	ends(t, a)
	for text, times := range map[string]int{"the audit is off": 1, "the processes of the node are not seen": 1, "level=WARN": 0} {
		check.Equal(t, strings.Count(a.Log(), text), times, text, "in", a.Log())
	}
}
