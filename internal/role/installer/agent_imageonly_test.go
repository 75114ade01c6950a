package installer_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// TestAgent_NoRightToConfigMap: the chart of the reference gives none. That is no warning, and is said once.
func TestAgent_NoRightToConfigMap(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.API.FailOn("/configmaps", kubetest.Forbidden, 1000)
	a := n.Start("EXCLUDE_NAMESPACES=kube-system")
	a.AwaitReady()
	const said = `level=INFO msg="live configuration is off: the agent has no right to list and watch its ConfigMap`
	nodetest.Await(t, "the line", func() error {
		if !strings.Contains(a.Log(), said) {
			return notYet("log:\n%s", a.Log())
		}
		return a.Running()
	})
	if _, err := n.Add(n.NewPod("apps", "mesh", chaintest.Sidecar)); err != nil {
		t.Fatal(err)
	}
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

// TestAgent_WithoutNodesProcesses: a chart that repairs by deletion alone mounts no /proc, and the audit is off without a warning.
func TestAgent_WithoutNodesProcesses(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=false", "REPAIR_DELETE_PODS=true", "--host-roots=/nothing", "--host-proc=/nothing")
	a.AwaitReady()
	nodetest.Await(t, "the lines", func() error {
		for _, line := range []string{`level=INFO msg="the audit is off`, `level=INFO msg="the processes of the node are not seen`} {
			if strings.Count(a.Log(), line) != 1 {
				return notYet("%s; log:\n%s", line, a.Log())
			}
		}
		return a.Running()
	})
	ends(t, a)
	if strings.Contains(a.Log(), "level=WARN") {
		t.Errorf("log:\n%s", a.Log())
	}
}

// TestAmbient_LeavesNodeAsItIs: the agent does not start. A plugin of before it gets credentials that are valid, once its own are
// not: the token of the previous agent ended with its pod, and pods of the node would fail.
func TestAmbient_LeavesNodeAsItIs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	refused := func(want string) {
		t.Helper()
		before := n.Tree(nodetest.NetDir)
		code, a := n.Run("AMBIENT_ENABLED=true")
		if code != applet.ExitUsage || !strings.Contains(a.Log(), "ambient mode is not supported") || strings.Contains(a.Log(), `level=INFO msg="wrote kubeconfig"`) != (want != "") {
			t.Errorf("exit %d; log:\n%s", code, a.Log())
		}
		if diff := cmp.Diff(before, n.Tree(nodetest.NetDir)); diff != "" {
			t.Errorf("configuration: -before +after\n%s", diff)
		}
		if want != "" && !strings.Contains(n.Read(kubeconfig), want) {
			t.Errorf("kubeconfig:\n%s", n.Read(kubeconfig))
		}
	}
	refused("")
	if files := n.Tree(nodetest.RunDir); len(files) != 0 {
		t.Errorf("a node that had nothing has %v", files)
	}
	a := n.Start()
	a.AwaitReady()
	ends(t, a)
	refused("")
	n.API.SetToken("the-token-of-the-next-pod")
	n.GrantAccess()
	refused("the-token-of-the-next-pod")
	if _, err := n.Add(n.NewPod("apps", "mesh", chaintest.Sidecar)); err != nil {
		t.Errorf("a pod of the mesh: %v", err)
	}
}
