// Package nodes tests a cluster of two nodes: two kubelets, two containerds, and an agent on each.
//
// It is one scenario on one cluster: both nodes register with the taint and get rid of it one by one, pods of both talk through
// both proxies, the agents are updated while pods come and go on both, one agent goes, one node loses power, and comes back.
//
// Start reading at TestTwoNodes.
package nodes

import (
	"os"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

// taintKey is the key of the taint with which kubelets register their nodes.
const taintKey = "cni.istio.io/not-ready"

// values are the chart's values.
const values = `taint: {enabled: true, add: true, hysteresis: 15s}
audit: {interval: 5s}
`

// scenario is the fixture: a cluster and its nodes.
type scenario struct {
	*lab.Lab
	first, second *cluster.Machine
}

func newScenario(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{Lab: lab.Node(t, cluster.Options{
		NodeMonitorGracePeriod: 20 * time.Second,
		RegisterWithTaints:     []core.Taint{{Key: taintKey, Value: "true", Effect: core.TaintEffectNoSchedule}},
	})}
	s.first = s.Machine
	var err error
	s.second, err = s.Join(t.Context())
	s.Must(err)
	return s
}

// subtest runs a part of the scenario as a subtest. The next parts need its result, so they do not run after a failure.
func (s *scenario) subtest(name string, run func(*scenario)) {
	s.Helper()
	if !s.Run(name, func(t *testing.T) { t.Helper(); run(&scenario{Lab: s.With(t), first: s.first, second: s.second}) }) {
		s.FailNow()
	}
}

// untilNode waits for a status of the condition Ready of a node.
func (s *scenario) untilNode(m *cluster.Machine, status core.ConditionStatus) {
	s.Helper()
	s.Until("condition Ready of "+m.Node()+" to be "+string(status), func() bool { return s.NodeNamedIs(m.Node(), status) })
}

func (s *scenario) node(m *cluster.Machine) *core.Node {
	s.Helper()
	node, err := s.Client().CoreV1().Nodes().Get(s.Context(), m.Node(), meta.GetOptions{})
	s.Must(err)
	return node
}

// tainted reports whether a node has the taint.
func (s *scenario) tainted(m *cluster.Machine) bool {
	s.Helper()
	return slices.ContainsFunc(s.node(m).Spec.Taints, func(t core.Taint) bool { return t.Key == taintKey })
}

func (s *scenario) untilTainted(m *cluster.Machine) {
	s.Helper()
	s.Until("the taint of "+m.Node(), func() bool { return s.tainted(m) })
}

func (s *scenario) untilUntainted(m *cluster.Machine) {
	s.Helper()
	s.Until("the taint of "+m.Node()+" to go", func() bool { return !s.tainted(m) })
}

// cut removes the CNI configuration of a node, which then starts no pod. mend restores it as it was before the plugin.
func (s *scenario) cut(m *cluster.Machine) (mend func()) {
	s.Helper()
	path := m.NodeFile("/etc/cni/net.d/" + cluster.PrimaryNetwork)
	text, err := os.ReadFile(path)
	s.Must(err)
	s.Must(os.Remove(path))
	return func() { s.Helper(); s.Must(m.PutNetwork(cluster.PrimaryNetwork, text)) }
}

// patient has a pod tolerate a lost node for longer than the default of 300 s.
func patient(template *core.PodTemplateSpec) {
	template.Spec.Tolerations = []core.Toleration{{Operator: core.TolerationOpExists, Effect: core.TaintEffectNoExecute}}
}
