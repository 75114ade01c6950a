package installer_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// program is the program under test, built once for all tests of the package.
func program(tb testing.TB) string {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("a node of its own needs root")
	}
	built.Do(func() {
		dir, err := os.MkdirTemp("", "istio-cni-test") //nolint:usetesting // it outlives the first test
		if err != nil {
			tb.Fatal(err)
		}
		binary = chaintest.Build(tb, dir)
	})
	if binary == "" {
		tb.Fatal("the program could not be built")
	}
	return binary
}

var (
	built  sync.Once
	binary string
)

func TestMain(m *testing.M) {
	code := m.Run()
	if binary != "" {
		_ = os.RemoveAll(filepath.Dir(binary))
	}
	os.Exit(code)
}

const listFile, singleFile = nodetest.NetDir + "/10-bridge.conflist", nodetest.NetDir + "/10-bridge.conf"

// kubeconfig is where the plugin looks for its credentials.
const kubeconfig = nodetest.RunDir + "/istio-cni-kubeconfig"

// newNode is a node with a list of a primary CNI, API server and credentials.
func newNode(tb testing.TB) *nodetest.Node {
	tb.Helper()
	n := nodetest.New(tb, program(tb))
	n.StartAPI()
	n.GrantAccess()
	n.Put(listFile, nodetest.BridgeList)
	return n
}

// types are what the runtime would run.
func types(tb testing.TB, n *nodetest.Node) []string {
	tb.Helper()
	list, err := n.Load()
	if err != nil {
		tb.Fatalf("loading the configuration: %v", err)
	}
	return list.Types()
}

func withUs() []string { return []string{"bridge", "tuning", "istio-cni"} }

func TestAgentFromNothingToCapturedPods(t *testing.T) {
	t.Parallel()
	n := nodetest.New(t, program(t))
	began := time.Now()
	a := n.Start()
	notReady := func(what, reason string) {
		t.Helper()
		nodetest.Await(t, what, func() error {
			err := a.Ready()
			if err == nil {
				return notYet("it is ready")
			}
			if !strings.Contains(err.Error(), reason) {
				return notYet("the agent says: %w", err)
			}
			return nil
		})
	}
	notReady("an agent that waits for its credentials", "waiting for the service account")
	t.Logf("waiting %s after the start", time.Since(began))
	if got := n.Tree(nodetest.NetDir); len(got) != 0 {
		t.Errorf("it wrote a configuration already: %v", got)
	}
	for _, name := range []string{"istio-iptables", "istio-cni-taint", "istio-cni-repair"} {
		if got, err := os.Readlink(n.Path(nodetest.BinDir + "/" + name)); got != "istio-cni" {
			t.Errorf("%s: a link to %q, %v", name, got, err)
		}
	}
	n.StartAPI()
	// Still away for everybody, as when the API server starts after the node.
	n.API.Stop()
	n.GrantAccess()
	notReady("an agent that waits for a primary CNI", "waiting for a valid CNI configuration")
	began = time.Now()
	n.Put(listFile, nodetest.BridgeList)
	a.AwaitReady()
	t.Logf("ready %s after the primary configuration came, without an API server", time.Since(began))
	if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
		t.Fatalf("the runtime loads: -want +got:\n%s", diff)
	}

	// The API server comes, as a new one: its authority and token are others.
	n.StartAPI()
	n.API.SetToken("the-token-of-today")
	n.GrantAccess()
	nodetest.Await(t, "the new token in the kubeconfig", func() error {
		if !strings.Contains(n.Read(kubeconfig), "the-token-of-today") {
			return notYet("it is the old one")
		}
		return nil
	})
	mesh := n.NewPod("apps", "mesh", chaintest.Sidecar)
	plain := n.NewPod("apps", "plain", chaintest.PlainPod)
	for _, p := range []nodetest.Pod{mesh, plain} {
		if _, err := n.Add(p); err != nil {
			t.Fatalf("ADD of pod %s: %v", p.Name, err)
		}
	}
	if !mesh.Captured(n) || plain.Captured(n) {
		t.Errorf("captured: mesh pod %v, plain pod %v", mesh.Captured(n), plain.Captured(n))
	}
	// The agent answered the plugin, which reported both decisions.
	agent, err := agentapi.Dial(t.Context(), n.Path(nodetest.RunDir)+"/"+agentapi.SocketName)
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close() //nolint:errcheck // all is said
	decisions, err := agent.Decisions(t.Context(), time.Minute)
	if err != nil || len(decisions) != 2 || decisions[0].Source != agentapi.SourceAgent || decisions[1].Source != agentapi.SourceAgent {
		t.Errorf("decisions %+v, %v", decisions, err)
	}
	for _, p := range []nodetest.Pod{mesh, plain} {
		if err := n.Del(p, "pods"); err != nil {
			t.Errorf("DEL of pod %s: %v", p.Name, err)
		}
	}
}
