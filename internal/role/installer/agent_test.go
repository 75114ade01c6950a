package installer_test

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestMain(m *testing.M) { chaintest.Main(m) }

const listFile = nodetest.NetDir + "/10-bridge.conflist"

// kubeconfig is the file with the plugin's credentials.
const kubeconfig = nodetest.RunDir + "/istio-cni-kubeconfig"

// connected returns a node with an API server and credentials.
func connected(tb testing.TB) *nodetest.Node {
	tb.Helper()
	n := nodetest.New(tb, chaintest.Program(tb))
	n.StartAPI()
	n.GrantAccess()
	return n
}

// newNode returns a connected node with a list of a primary CNI.
func newNode(tb testing.TB) *nodetest.Node {
	tb.Helper()
	n := connected(tb)
	n.Put(listFile, nodetest.BridgeList)
	return n
}

// running returns a node with a ready agent.
func running(tb testing.TB, args ...string) (*nodetest.Node, *nodetest.Agent) {
	tb.Helper()
	n := newNode(tb)
	a := n.Start(args...)
	a.AwaitReady()
	return n, a
}

// types returns the plugins that the runtime would run.
func types(tb testing.TB, n *nodetest.Node) []string {
	tb.Helper()
	list, err := n.Load()
	check.OK(tb, err, "loading the configuration")
	return list.Types()
}

func withUs() []string { return []string{"bridge", "tuning", "istio-cni"} }

// TestAgent_FromNothing goes from an empty node to pods inside and outside the mesh, and on to another API server.
func TestAgent_FromNothing(t *testing.T) {
	t.Parallel()
	n := nodetest.New(t, chaintest.Program(t))
	a := n.Start("--log_as_json")
	a.AwaitLog("waiting for the service account")
	check.Equal(t, len(n.Tree(nodetest.NetDir)), 0, "files in the configuration")
	n.StartAPI()
	n.GrantAccess()
	a.AwaitLog("waiting for a valid CNI configuration")
	n.Put(listFile, nodetest.BridgeList)
	a.AwaitReady()
	a.AwaitLog(`"msg":"agent is ready"`)
	check.Diff(t, "the runtime loads", withUs(), types(t, n))
	mesh, plain := n.NewPod("apps", "mesh", chaintest.Sidecar), n.NewPod("apps", "plain", chaintest.PlainPod)
	for _, p := range []chaintest.Pod{mesh, plain} {
		check.OK(t, check.Err(n.Add(p)), "ADD of pod", p.Name)
	}
	if !mesh.Captured(t) || plain.Captured(t) {
		t.Errorf("captured: mesh pod %v, plain pod %v", mesh.Captured(t), plain.Captured(t))
	}
	// Another API server, with another authority and token.
	n.API.Stop()
	n.StartAPI()
	n.API.SetToken("the-token-of-today")
	n.GrantAccess()
	authority := base64.StdEncoding.EncodeToString(n.API.CA())
	a.Await("the new credentials in the kubeconfig", func() bool {
		text := n.Read(kubeconfig)
		return strings.Contains(text, "the-token-of-today") && strings.Contains(text, authority) && a.Ready() == nil
	})
	later := n.NewPod("apps", "later", chaintest.Sidecar)
	if _, err := n.Add(later); err != nil || !later.Captured(t) {
		t.Errorf("ADD with the new credentials: %v", err)
	}
	check.Equal(t, a.Metric(`istio_cni_rewrites_total{artifact="kubeconfig"}`), "0", "a rotation counts as tampering")
	for _, p := range []chaintest.Pod{mesh, plain} {
		check.OK(t, n.Del(p, "pods"), "DEL of pod", p.Name)
	}
}

// notYet is the error of a condition that is not met.
func notYet(format string, args ...any) error { return fmt.Errorf(format, args...) }

// TestAgent_ImmutableNode: the agent needs no program of the node, and writes only to directories that such a node lets a pod write.
func TestAgent_ImmutableNode(t *testing.T) {
	t.Parallel()
	n := nodetest.NewImmutable(t, chaintest.Program(t))
	n.StartAPI()
	n.GrantAccess()
	n.Put(listFile, nodetest.BridgeList)
	a := n.Start("REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true")
	a.AwaitReady()
	early, mesh := newUnredirected(t, n), n.NewPod("apps", "mesh", chaintest.Sidecar)
	early.register(n)
	list, err := n.Add(mesh)
	check.OK(t, err)
	if !mesh.Captured(t) {
		t.Error("the pod is not captured")
	}
	a.Await("the repair in place", func() bool { return early.Captured(t) })
	check.OK(t, n.Del(mesh, list.Name))
	n.API.Delete(nodetest.DaemonSetPath)
	ends(t, a)
	if got := types(t, n); len(got) != 2 {
		t.Errorf("the uninstallation leaves %q", got)
	}
}

func configMap(data map[string]string) []byte {
	return kubetest.ConfigMap(nodetest.Namespace, "istio-cni-config", data)
}
