// Package mesh tests everything together on a real node: containerd, kubelet and scheduler, the agent as a DaemonSet of the
// chart, injected pods, and their traffic.
//
// The proxy is a stand-in for Envoy that forwards HTTP and adds a Via header: the header in a response proves that the
// connection was redirected, and its absence that it was not.
//
// Start reading at TestANewNode, the scenario of a node from its first pods to the end of the agent. The other tests are about
// kinds of pods (kind_test.go), families (family_test.go), primary networks (primary_test.go) and the audit (audit_test.go), each
// on a node of its own. The other modes of repair are in e2e/repair and, on a node, in e2e/imageonly; the taint in e2e/node.
package mesh

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is the fixture of one test.
type scenario struct{ *lab.Lab }

func newScenario(t *testing.T, o cluster.Options) *scenario {
	t.Helper()
	return &scenario{Lab: lab.Node(t, o)}
}

// subtest runs a part of the scenario as a subtest.
func (s *scenario) subtest(name string, run func(*scenario)) {
	s.Helper()
	s.Run(name, func(t *testing.T) { t.Helper(); run(&scenario{Lab: s.With(t)}) })
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}
