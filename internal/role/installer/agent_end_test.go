package installer_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// leaving is a DaemonSet that is being deleted.
const leaving = `{"kind":"DaemonSet","apiVersion":"apps/v1","metadata":{"namespace":"istio-system","name":"istio-cni-node",
	"deletionTimestamp":"2026-01-02T03:04:05Z","deletionGracePeriodSeconds":0,"finalizers":["foregroundDeletion"]},
	"spec":{"template":{"spec":{}}}}`

// TestAgentLeaves tells agents to end in all situations that decide whether they leave for good.
func TestAgentLeaves(t *testing.T) {
	t.Parallel()
	const set = nodetest.DaemonSetPath
	for name, tc := range map[string]struct {
		env    string
		happen func(*nodetest.Node)
		gone   bool
	}{
		"DaemonSet there":                     {"", func(*nodetest.Node) {}, false},
		"DaemonSet gone":                      {"", func(n *nodetest.Node) { n.API.Delete(set) }, true},
		"DaemonSet being deleted":             {"", func(n *nodetest.Node) { n.API.Set([]byte(leaving)) }, true},
		"DaemonSet meant for others":          {"", selectsOthers, true},
		"403 for everything":                  {"", func(n *nodetest.Node) { n.API.Fail(kubetest.Forbidden, kubetest.Forever) }, true},
		"401 for everything":                  {"", func(n *nodetest.Node) { n.API.Fail(kubetest.Unauthorized, kubetest.Forever) }, true},
		"403 for the DaemonSet only":          {"", func(n *nodetest.Node) { n.API.FailOn(set, kubetest.Forbidden, kubetest.Forever) }, false},
		"API server hangs":                    {"", func(n *nodetest.Node) { n.API.Fail(kubetest.Hang, kubetest.Forever) }, false},
		"API server away":                     {"", func(n *nodetest.Node) { n.API.Stop() }, false},
		"API server with another certificate": {"", func(n *nodetest.Node) { n.API.Stop(); n.StartAPI(); n.API.Delete(set) }, false},
		"always, DaemonSet there":             {"UNINSTALL_ON_EXIT=always", func(*nodetest.Node) {}, true},
		"always, API server away":             {"UNINSTALL_ON_EXIT=always", func(n *nodetest.Node) { n.API.Stop() }, true},
		"never, DaemonSet gone":               {"UNINSTALL_ON_EXIT=never", func(n *nodetest.Node) { n.API.Delete(set) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			before := n.Tree(nodetest.NetDir)
			var args []string
			if tc.env != "" {
				args = append(args, tc.env)
			}
			a := n.Start(args...)
			a.AwaitReady()
			conf, programs, credentials := n.Tree(nodetest.NetDir), n.Tree(nodetest.BinDir), n.Read(kubeconfig)
			tc.happen(n)
			if !ends(t, a) {
				return
			}
			if tc.gone {
				givenBack(t, n, before)
				return
			}
			if diff := cmp.Diff(conf, n.Tree(nodetest.NetDir)); diff != "" {
				t.Errorf("the configuration was not kept: -before +after:\n%s", diff)
			}
			if diff := cmp.Diff(programs, n.Tree(nodetest.BinDir)); diff != "" {
				t.Error("the programs were not kept")
			}
			if n.Read(kubeconfig) != credentials {
				t.Error("the kubeconfig was not kept")
			}
		})
	}
}

// selectsOthers makes the DaemonSet want other nodes.
func selectsOthers(n *nodetest.Node) {
	n.API.Set(kubetest.DaemonSet(nodetest.Namespace, nodetest.DaemonSet, `{"affinity":{"nodeAffinity":{
		"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[
			{"key":"mesh","operator":"In","values":["yes"]}]}]}}}}`))
}

// ends tells the agent to end and holds it to exit code 0.
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

// givenBack holds the node to what it was before, except for a lock and the plugin's log in the run directory.
func givenBack(t *testing.T, n *nodetest.Node, before map[string]string) {
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

func TestAgentGivesBackASinglePluginsFile(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"inline", "owned"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			n := nodetest.New(t, program(t))
			n.StartAPI()
			n.GrantAccess()
			n.Put(singleFile, nodetest.BridgeSingle)
			before := n.Tree(nodetest.NetDir)
			a := n.Start("UNINSTALL_ON_EXIT=always", "CNI_CONF_MODE="+mode)
			a.AwaitReady()
			if diff := cmp.Diff([]string{"bridge", "istio-cni"}, types(t, n)); diff != "" {
				t.Errorf("the runtime loads: -want +got:\n%s", diff)
			}
			if ends(t, a) {
				givenBack(t, n, before)
			}
		})
	}
}

// The primary changed its file while the agent was there: what comes back is the changed one.
func TestAgentGivesBackWhatThePrimaryChangedMeanwhile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("UNINSTALL_ON_EXIT=always")
	a.AwaitReady()
	n.Put(listFile, generation(7))
	nodetest.Await(t, "our stanza in the new file", func() error {
		if text := n.Read(listFile); !strings.Contains(text, `"x-note":  7.10`) || !strings.Contains(text, `"istio-cni"`) {
			return notYet("it is not there")
		}
		return nil
	})
	if ends(t, a) && n.Read(listFile) != generation(7) {
		t.Errorf("what came back is %s", n.Read(listFile))
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
	givenBack(t, n, before)
}

func TestOnceInstallsAndEnds(t *testing.T) {
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
	if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
		t.Errorf("the runtime loads: -want +got:\n%s", diff)
	}
	pod := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(pod); err != nil || !pod.Captured(n) {
		t.Errorf("ADD: captured %v, %v", pod.Captured(n), err)
	}
	dirs := []string{nodetest.NetDir, nodetest.BinDir, nodetest.RunDir}
	before := stamps(t, n, dirs...)
	if code, again := n.Run("--once"); code != 0 {
		t.Fatalf("exit code %d: %s", code, again.Log())
	}
	after := stamps(t, n, dirs...)
	delete(before, n.Path(nodetest.RunDir)+"/install.lock") // has the process's number
	delete(after, n.Path(nodetest.RunDir)+"/install.lock")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the second time something was written: -before +after:\n%s", diff)
	}
}

// stamps are the files below directories, the directories included, with the time of their last change.
func stamps(t *testing.T, n *nodetest.Node, dirs ...string) map[string]time.Time {
	t.Helper()
	out := map[string]time.Time{}
	for _, dir := range dirs {
		err := filepath.WalkDir(n.Path(dir), func(file string, entry os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err == nil {
				out[file] = info.ModTime()
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
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

func TestDryRunSaysWhatItWouldDo(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := stamps(t, n, "/etc", "/opt", "/run", "/var/lib")
	code, a := n.Run("--dry-run")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, a.Log())
	}
	for _, part := range []string{`copy "/usr/local/bin/istio-cni" to "/host/opt/cni/bin/istio-cni"`, `write "10-bridge.conflist"`} {
		if !strings.Contains(a.Output(), part) {
			t.Errorf("the plan has no %q:\n%s", part, a.Output())
		}
	}
	if diff := cmp.Diff(before, stamps(t, n, "/etc", "/opt", "/run", "/var/lib")); diff != "" {
		t.Errorf("a dry run touched: -before +after:\n%s", diff)
	}
	if code, a = n.Run("--once"); code != 0 {
		t.Fatalf("exit code %d: %s", code, a.Log())
	}
	if code, a = n.Run("--dry-run"); code != 0 || a.Output() != "nothing to do\n" {
		t.Errorf("after an installation: exit code %d, %q", code, a.Output())
	}
	before = stamps(t, n, "/etc", "/opt", "/run", "/var/lib")
	code, a = n.Run("--dry-run", "--uninstall")
	for _, part := range []string{`write "10-bridge.conflist": the stanza goes`, `remove "/host/opt/cni/bin/istio-cni"`} {
		if code != 0 || !strings.Contains(a.Output(), part) {
			t.Errorf("exit code %d, and the plan of an uninstallation has no %q:\n%s", code, part, a.Output())
		}
	}
	if diff := cmp.Diff(before, stamps(t, n, "/etc", "/opt", "/run", "/var/lib")); diff != "" {
		t.Errorf("a dry run touched: -before +after:\n%s", diff)
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
	givenBack(t, n, before)
	if left := n.Tree(nodetest.RunDir); len(left) != 0 {
		t.Errorf("left in the run directory: %v", left)
	}
}
