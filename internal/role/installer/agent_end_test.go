package installer_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAgent_Ends: one agent that ends for good, one that may not and one that must not. All situations that decide are in
// package teardown.
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

// ends terminates the agent and wants exit code 0.
func ends(t *testing.T, a *nodetest.Agent) bool {
	t.Helper()
	a.Terminate()
	code := a.Wait()
	check.Equal(t, code, 0, "exit code")
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

// TestOnce_WaitsForConfiguration: that it installs, and writes nothing the second time, is in install-once.txtar.
func TestOnce_WaitsForConfiguration(t *testing.T) {
	t.Parallel()
	n := connected(t)
	a := n.Start("--once")
	a.AwaitLog("waiting for a valid CNI configuration")
	n.Put(listFile, nodetest.BridgeList)
	if code := a.Wait(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
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
	nodetest.Await(t, "the run directory", func() error {
		if now, _ := filepath.Glob(n.Path(nodetest.RunDir + "/*")); len(files) < 5 || !slices.Equal(now, files) {
			return notYet("there are %q, want %q", now, files)
		}
		return nil
	})
	if code, u := n.Run("--uninstall"); code != 1 || !strings.Contains(u.Log(), "a node agent is at work here and would install again") {
		t.Errorf("beside an agent: exit code %d, %s", code, u.Log())
	}
	check.Diff(t, "the refused uninstallation did something", withUs(), types(t, n))
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
