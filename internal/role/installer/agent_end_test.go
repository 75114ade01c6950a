package installer_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// TestAgentLeaves: one agent that ends for good, one that may not and one that must not. All situations that decide are in
// package teardown.
func TestAgentLeaves(t *testing.T) {
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

// ends terminates the agent and wants exit code 0.
func ends(t *testing.T, a *nodetest.Agent) bool {
	t.Helper()
	began := time.Now()
	a.Terminate()
	code := a.Wait()
	t.Logf("ended %s after SIGTERM", time.Since(began).Round(time.Millisecond))
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	return code == 0
}

// restored wants the node as it was before, except for a lock and the plugin's log in the run directory.
func restored(t *testing.T, n *nodetest.Node, before map[string]string) {
	t.Helper()
	if diff := cmp.Diff(before, n.Tree(nodetest.NetDir)); diff != "" {
		t.Errorf("the configuration is not what it was: -before +after:\n%s", diff)
	}
	if left := n.Tree(nodetest.BinDir); len(left) != 0 {
		t.Errorf("%d programs are left", len(left))
	}
	for name := range n.Tree(nodetest.RunDir) {
		if name != "install.lock" && name != "istio-cni.log" {
			t.Errorf("file %q is left in the run directory", name)
		}
	}
}

// TestUninstallLeavesTheProgramToLivingSandboxes: a pod that was made with the stanza is removed after the agent has left,
// by the runtime with the configuration of its cache.
func TestUninstallLeavesTheProgramToLivingSandboxes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.Tree(nodetest.NetDir)
	a := n.Start()
	a.AwaitReady()
	living, ended := n.NewPod("apps", "living", chaintest.Sidecar), n.NewPod("apps", "ended", chaintest.Sidecar)
	for _, p := range []nodetest.Pod{living, ended} {
		if _, err := n.Add(p); err != nil || !p.Captured(n) {
			t.Fatalf("ADD of pod %s: captured %v, %v", p.Name, p.Captured(n), err)
		}
	}
	if err := n.Del(ended, "pods"); err != nil {
		t.Fatal(err)
	}
	n.End(ended)
	n.API.Delete(nodetest.DaemonSetPath)
	if !ends(t, a) {
		return
	}
	if diff := cmp.Diff(before, n.Tree(nodetest.NetDir)); diff != "" {
		t.Errorf("the configuration is not what it was: -before +after:\n%s", diff)
	}
	if n.Has(kubeconfig) {
		t.Error("the kubeconfig is left")
	}
	if !n.Has(nodetest.BinDir + "/istio-cni") {
		t.Fatal("the program is gone, and the living pod cannot be removed")
	}
	if !strings.Contains(a.Log(), "the program stays") {
		t.Error("the log does not say why the program stays")
	}
	// Pods without us while the program is still there: nothing of ours runs.
	later := n.NewPod("apps", "later", chaintest.Sidecar)
	if _, err := n.Add(later); err != nil || later.Captured(n) {
		t.Errorf("ADD after the end: captured %v, %v", later.Captured(n), err)
	}
	if err := n.Del(living, "pods"); err != nil {
		t.Errorf("DEL after the end: %v", err)
	}
	n.End(living)
	// What stayed goes by hand.
	if code, u := n.Run("--uninstall"); code != 0 {
		t.Fatalf("exit code %d: %s", code, u.Log())
	}
	restored(t, n, before)
}

// TestOnceWaitsForAConfiguration: that it installs, and writes nothing the second time, is in install-once.txtar.
func TestOnceWaitsForAConfiguration(t *testing.T) {
	t.Parallel()
	n := nodetest.New(t, program(t))
	n.StartAPI()
	n.GrantAccess()
	a := n.Start("--once")
	a.AwaitLog("waiting for a valid CNI configuration")
	n.Put(listFile, nodetest.BridgeList)
	if code := a.Wait(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	pod := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(pod); err != nil || !pod.Captured(n) {
		t.Errorf("ADD: captured %v, %v", pod.Captured(n), err)
	}
}

// TestAgentRefusesAmbientMode: it ends with 2 before it touches anything.
func TestAgentRefusesAmbientMode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.Tree(".")
	code, a := n.Run("AMBIENT_ENABLED=true")
	if code != 2 || !strings.Contains(a.Log(), "ambient mode is not supported") {
		t.Errorf("ends with %d: %s", code, a.Log())
	}
	if diff := cmp.Diff(before, n.Tree(".")); diff != "" {
		t.Errorf("the node was changed: -before +after:\n%s", diff)
	}
}

func TestUninstallByHand(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.Tree(nodetest.NetDir)
	a := n.Start()
	a.AwaitReady()
	if code, u := n.Run("--uninstall"); code != 1 || !strings.Contains(u.Log(), "a node agent is at work here and would install again") {
		t.Errorf("beside an agent: exit code %d, %s", code, u.Log())
	}
	if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
		t.Errorf("the refused uninstallation did something: -want +got:\n%s", diff)
	}
	if !ends(t, a) {
		return
	}
	// By hand there is neither API server nor service account nor environment.
	n.API.Stop()
	if code, u := n.Run("KUBERNETES_SERVICE_HOST=", "KUBERNETES_SERVICE_PORT=", "POD_NAMESPACE=", "--uninstall"); code != 0 {
		t.Errorf("exit code %d: %s", code, u.Log())
	}
	restored(t, n, before)
	if left := n.Tree(nodetest.RunDir); len(left) != 0 {
		t.Errorf("left in the run directory: %v", left)
	}
}
