package taint

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/program"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// once runs the program interactively: text output, one run. It returns the exit status and the output.
func (l *fixture) once(kubeconfig string, args ...string) (status int, out string) {
	l.Helper()
	p, err := program.Start(nil, shared.IstioCNI, append([]string{"taint", "--kubeconfig=" + kubeconfig}, args...)...)
	l.Must(err)
	l.Cleanup(func() { p.Signal(os.Kill) })
	l.Until("the end of "+strings.Join(args, " "), func() bool {
		select {
		case <-p.Ended():
			return true
		default:
			return false
		}
	})
	return p.Status(), strings.Join(p.Lines(), "\n")
}

// TestOneShot, T-1: a single run reads all nodes and pods first (the reference decided on an empty cache), takes no
// Lease, and does not wait for hysteresis.
func TestOneShot(t *testing.T) {
	for _, test := range []struct {
		name  string
		key   string
		args  []string
		wants map[string][]string
	}{
		{
			"legacy", legacy,
			[]string{"--configmap-name=" + configMapName, "--configmap-namespace=MESH"},
			map[string][]string{"served": {}, "clean": {}, "waiting": {legacy}, "bare": {legacy}, "down": {legacy}},
		},
		{
			"untaint", untaint,
			[]string{"--namespace=MESH"},
			map[string][]string{"served": {}, "clean": {}, "waiting": {untaint}, "bare": {}, "down": {}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newFixture(t)
			l.configMap(l.requires("k8s-app=istio-cni-node"))
			l.node("served", nodeState{ready: "True", taints: []string{test.key}})
			l.pod("served", podState{ready: true})
			l.node("clean", nodeState{ready: "True"})
			l.pod("clean", podState{ready: true})
			l.node("waiting", nodeState{ready: "True", taints: []string{test.key}})
			l.node("bare", nodeState{ready: "True"})
			l.node("down", nodeState{ready: "False"})
			l.pod("down", podState{ready: true})
			kubeconfig := l.grant(permissions{Taint: rights.Taint{ConfigMap: configMapName}})
			args := []string{"--run-as-daemon=false"}
			for _, arg := range test.args {
				args = append(args, strings.ReplaceAll(arg, "MESH", l.mesh))
			}
			if status, out := l.once(kubeconfig, args...); status != 0 {
				t.Fatalf("exit %d: %s", status, out)
			}
			changed := 0
			for node, want := range test.wants {
				if got := l.taints(node); !slices.Equal(got, want) {
					t.Errorf("node %s: %q, want %q", node, got, want)
				}
			}
			c := &controller{fixture: l, account: account}
			for _, r := range c.requests() {
				if r.Resource == "leases" {
					t.Errorf("it asked for a lease: %s %s", r.Verb, r.URI)
				}
				if r.Verb == "patch" && r.Resource == "nodes" {
					changed++
				}
			}
			// The second run finds no node to change.
			if status, out := l.once(kubeconfig, args...); status != 0 || c.patches("") != changed {
				t.Errorf("the second time: exit %d, %d patches after %d: %s", status, c.patches(""), changed, out)
			}
			c.checkRequests()
		})
	}
}

func TestDryRunPrintsDecisionsAndChangesNothing(t *testing.T) {
	l := newFixture(t)
	l.node("a", nodeState{taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	l.node("b", nodeState{taints: []string{untaint}})
	l.node("c", nodeState{})
	kubeconfig := l.grant(permissions{})
	status, out := l.once(kubeconfig, "--dry-run", "--add", "--namespace="+l.mesh, "--log_output_level=none")
	want := `node a: remove: the CNI agent is ready
node b: keep: there is no CNI agent on the node (requirement "k8s-app=istio-cni-node") (in place)
node c: add: there is no CNI agent on the node (requirement "k8s-app=istio-cni-node")`
	if status != 0 || out != want {
		t.Errorf("exit %d:\n%s\nwant\n%s", status, out, want)
	}
	if c := (&controller{fixture: l, account: account}); c.patches("") != 0 || len(l.taints("a")) != 1 || len(l.taints("c")) != 0 {
		t.Error("it changed something")
	}
}

func TestOneShotFailsWhenItCannot(t *testing.T) {
	l := newFixture(t)
	l.node("a", nodeState{taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	for _, test := range []struct {
		name        string
		permissions permissions
		args        []string
		want        string
	}{
		{"no right to list nodes", permissions{account: "no-nodes", without: "nodes"}, []string{"--namespace=" + l.mesh}, "forbidden"},
		{"no right to list pods", permissions{account: "no-pods", without: "pods"}, []string{"--namespace=" + l.mesh}, "forbidden"},
		{
			"no ConfigMap",
			permissions{Taint: rights.Taint{ConfigMap: configMapName}, account: "no-map"},
			[]string{"--configmap-namespace=" + l.mesh, "--configmap-name=" + configMapName},
			"there is no ConfigMap",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			status, out := l.once(l.grant(test.permissions), append(test.args, "--run-as-daemon=false")...)
			if status != 1 || !strings.Contains(out, test.want) {
				t.Errorf("exit %d: %s", status, out)
			}
		})
	}
	if len(l.taints("a")) != 1 {
		t.Error("a node was changed")
	}
}
