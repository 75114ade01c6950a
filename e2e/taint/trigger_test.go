package taint

import (
	"slices"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// scenario is one node with its pods, the expected taints and decision, and the same after a change. One controller
// sees all scenarios of a table at the same time.
type scenario struct {
	name string
	node nodeState
	pods []podState
	// want has the expected taints in order, decision is the expected last decision.
	want     []string
	decision string
	// change, if set, changes the node or its pods; wantAfter and decisionAfter are expected after it.
	change        func(l *fixture, node string)
	wantAfter     []string
	decisionAfter string
	// patches is the expected number of patches of the node.
	patches int
}

// runScenarios runs the scenarios of a table.
func runScenarios(t *testing.T, l *fixture, scenarios []scenario, begin func() *controller) {
	t.Helper()
	name := func(i int) string { return "node-" + string(rune('a'+i)) }
	for i, s := range scenarios {
		l.node(name(i), s.node)
		for _, pod := range s.pods {
			l.pod(name(i), pod)
		}
	}
	c := begin()
	check := func(what string, i int, want []string, decision string) {
		s := scenarios[i]
		if !eventually(l, func() bool { return c.decided(name(i)) == decision && slices.Equal(l.taints(name(i)), want) }) {
			l.Errorf("%s (%s), %s: decision %q, taints %q; want %q, %q",
				s.name, name(i), what, c.decided(name(i)), l.taints(name(i)), decision, want)
		}
	}
	for i, s := range scenarios {
		check("at first", i, s.want, s.decision)
	}
	for i, s := range scenarios {
		if s.change != nil {
			s.change(l, name(i))
		}
	}
	for i, s := range scenarios {
		if s.change != nil {
			check("then", i, s.wantAfter, s.decisionAfter)
		}
	}
	c.waitSynced()
	c.stop()
	for i, s := range scenarios {
		if n := c.patches(name(i)); n != s.patches {
			l.Errorf("%s (%s): %d patches, want %d", s.name, name(i), n, s.patches)
		}
		if want := s.last(); !slices.Equal(l.taints(name(i)), want) {
			l.Errorf("%s (%s), in the end: taints %q, want %q", s.name, name(i), l.taints(name(i)), want)
		}
	}
	c.checkRequests()
}

func (s scenario) last() []string {
	if s.change != nil {
		return s.wantAfter
	}
	return s.want
}

// waitSynced waits until the controller has processed all earlier changes. It creates one more node, which needs a
// patch with any settings of these tests, and waits for the patch. Watch events arrive in order and are processed in
// order, except that several workers run in parallel; stop waits for those.
func (c *controller) waitSynced() {
	l := c.fixture
	l.Helper()
	const name = "zz-last"
	l.node(name, nodeState{ready: "True", taints: []string{legacy, untaint, autoscalerKey + ":NoExecute"}})
	l.pod(name, podState{ready: true, labels: map[string]string{
		"k8s-app": "istio-cni-node", "a": "1", "b": "2", "app": "mesh", "tier": "cni",
	}})
	l.Until("the last node to be changed", func() bool { return len(l.taints(name)) == 2 })
}

// eventually polls like Until, and returns false in place of ending the test.
func eventually(l *fixture, holds func() bool) bool {
	end := time.Now().Add(20 * time.Second)
	for !holds() {
		if time.Now().After(end) || l.Context().Err() != nil {
			return false
		}
		time.Sleep(20 * time.Millisecond)
	}
	return true
}

// podReadyBecomes sets condition Ready of the node's agent pod, with the current time as transition time.
func podReadyBecomes(ready bool) func(*fixture, string) {
	return func(l *fixture, node string) { l.reportPod(node, podState{ready: ready, since: time.Now()}) }
}

// nodeReadyBecomes sets condition Ready of the node. The transition time, in whole seconds, is after the controller's
// start.
func nodeReadyBecomes(ready string) func(*fixture, string) {
	return func(l *fixture, node string) {
		l.report(node, nodeState{ready: ready, since: time.Now().Add(2 * time.Second)})
	}
}

const (
	// autoscalerKey has the prefix by which the Cluster Autoscaler recognises startup taints.
	autoscalerKey = "startup-taint.cluster-autoscaler.kubernetes.io/mesh-cni"

	legacy  = "NodeReadiness:NoSchedule"
	untaint = "cni.istio.io/not-ready=true:NoSchedule"
)

// TestLegacyTriggers tests the semantics of istio-cni-taint of Istio 1.8 to 1.17, which had no hysteresis.
func TestLegacyTriggers(t *testing.T) {
	l := newFixture(t)
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName}})
	ready, agent := nodeState{ready: "True"}, podState{ready: true}
	tainted := nodeState{ready: "True", taints: []string{legacy}}
	none, one := []string{}, []string{legacy}
	scenarios := []scenario{
		{"the agent becomes ready", tainted, []podState{{}}, one, "AgentUnready", podReadyBecomes(true), none, "AgentReady", 1},
		{
			"a ready agent comes", tainted, nil, one, "NoAgent",
			func(l *fixture, node string) { l.pod(node, podState{ready: true}) },
			none, "AgentReady", 1,
		},
		{"the agent becomes unready", ready, []podState{agent}, none, "AgentReady", podReadyBecomes(false), one, "AgentUnready", 1},
		{
			"the agent is deleted", ready,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			one, "NoAgent", 1,
		},
		{
			"the agent is terminating", ready,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) { l.terminatePod(l.mesh, node) },
			one, "AgentUnready", 1,
		},
		{
			"the node becomes ready",
			nodeState{ready: "False", taints: one},
			[]podState{agent},
			one, "NodeUnready",
			nodeReadyBecomes("True"), none, "AgentReady", 1,
		},
		{"the node becomes unready", ready, []podState{agent}, none, "AgentReady", nodeReadyBecomes("False"), one, "NodeUnready", 1},
		{"the node is lost", ready, []podState{agent}, none, "AgentReady", nodeReadyBecomes("Unknown"), one, "NodeUnready", 1},
		{
			// T-2: the reference used the condition with the newest heartbeat, whatever its type.
			"another condition has the same or a later heartbeat",
			nodeState{ready: "True", pressure: "False", later: "True", taints: one},
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				l.report(node, nodeState{ready: "False", pressure: "True", later: "True"})
			},
			one, "NodeUnready", 2,
		},
		{"a node without conditions", nodeState{}, []podState{agent}, one, "NodeUnready", nil, nil, "", 1},
		{"a node without an agent", ready, nil, one, "NoAgent", nil, nil, "", 1},
		{
			"other taints stay, and the same key with another effect",
			nodeState{ready: "True", taints: []string{"a=b:NoExecute", "NodeReadiness=x:NoSchedule", "NodeReadiness:NoExecute", "z:PreferNoSchedule"}},
			[]podState{agent},
			[]string{"a=b:NoExecute", "NodeReadiness:NoExecute", "z:PreferNoSchedule"},
			"AgentReady", podReadyBecomes(false),
			[]string{"a=b:NoExecute", "NodeReadiness:NoExecute", "z:PreferNoSchedule", legacy},
			"AgentUnready", 2,
		},
		{
			"an agent of another namespace", tainted,
			[]podState{{ready: true, namespace: l.other}},
			one, "NoAgent",
			func(l *fixture, node string) { l.pod(node, podState{ready: true}) },
			none, "AgentReady", 1,
		},
		{
			"another label", tainted,
			[]podState{{ready: true, labels: map[string]string{"k8s-app": "other"}}},
			one, "NoAgent", nil, nil, "", 0,
		},
		{
			"one of two agents is enough", ready,
			[]podState{agent, {name: "second-a"}},
			none, "AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			one, "AgentUnready", 1,
		},
		{
			"the node is recreated with its name", tainted, nil, one, "NoAgent",
			func(l *fixture, node string) {
				l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), node, meta.DeleteOptions{}))
				l.node(node, nodeState{ready: "True"})
			},
			// The new node has no conditions at first, so the taint is added at once or after the status update.
			one, "NoAgent", 1,
		},
	}
	runScenarios(t, l, scenarios, func() *controller {
		return l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
			"--lease-namespace="+l.mesh)
	})
}

// TestLegacySelectorWithACommaIsTwoRequirements: two different pods may meet them.
func TestLegacySelectorWithACommaIsTwoRequirements(t *testing.T) {
	l := newFixture(t)
	l.configMap(l.requires("a=1, b=2"))
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName}})
	a, b := map[string]string{"a": "1"}, map[string]string{"b": "2"}
	both := map[string]string{"a": "1", "b": "2"}
	tainted := nodeState{ready: "True", taints: []string{legacy}}
	none, one := []string{}, []string{legacy}
	runScenarios(t, l, []scenario{
		{
			"two pods", tainted,
			[]podState{{name: "a1", labels: a, ready: true}, {name: "b1", labels: b, ready: true}},
			none, "AgentReady",
			func(l *fixture, _ string) { l.deletePod(l.mesh, "b1") }, one, "NoAgent", 2,
		},
		{"one pod with both", tainted, []podState{{labels: both, ready: true}}, none, "AgentReady", nil, nil, "", 1},
		{
			"one is not ready", tainted,
			[]podState{{name: "a3", labels: a, ready: true}, {name: "b3", labels: b}},
			one, "AgentUnready", nil, nil, "", 0,
		},
		{"one is missing", tainted, []podState{{labels: a, ready: true}}, one, "NoAgent", nil, nil, "", 0},
	}, func() *controller {
		return l.begin(kubeconfig, "--mode=legacy", "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
			"--leader-elect=false")
	})
}

// TestUntaintTriggers tests the semantics of istiod's untaint controller, which never adds a taint.
func TestUntaintTriggers(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}})
	agent := podState{ready: true}
	tainted := nodeState{taints: []string{untaint}}
	none, one := []string{}, []string{untaint}
	runScenarios(t, l, []scenario{
		{"a ready agent", tainted, []podState{agent}, none, "AgentReady", nil, nil, "", 1},
		{"an unready agent, which becomes ready", tainted, []podState{{}}, one, "AgentUnready", podReadyBecomes(true), none, "AgentReady", 1},
		{
			"another label", tainted,
			[]podState{{ready: true, labels: map[string]string{"k8s-app": "other"}}},
			one, "NoAgent", nil, nil, "", 0,
		},
		{
			"labels beside that of the agent", tainted,
			[]podState{{ready: true, labels: map[string]string{"k8s-app": "istio-cni-node", "x": "y"}}},
			none, "AgentReady", nil, nil, "", 1,
		},
		{"another namespace", tainted, []podState{{ready: true, namespace: l.other}}, one, "NoAgent", nil, nil, "", 0},
		{
			"any value and any effect of the key, and no other key",
			nodeState{taints: []string{
				"cni.istio.io/not-ready=x:NoExecute", "NodeReadiness:NoSchedule", "cni.istio.io/not-ready:PreferNoSchedule",
				"cni.istio.io/not-ready2:NoSchedule", untaint,
			}},
			[]podState{agent},
			[]string{"NodeReadiness:NoSchedule", "cni.istio.io/not-ready2:NoSchedule"},
			"AgentReady", nil, nil, "", 1,
		},
		{
			"the node's own readiness does not matter",
			nodeState{ready: "False", taints: one},
			[]podState{agent},
			none, "AgentReady", nil, nil, "", 1,
		},
		{
			"an agent that becomes unready changes nothing",
			nodeState{},
			[]podState{agent},
			none, "AgentReady", podReadyBecomes(false),
			none, "AgentUnready, taints are not added", 0,
		},
		{
			"a deleted agent changes nothing",
			nodeState{},
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			none, "NoAgent, taints are not added", 0,
		},
		{
			"another writer adds the taint again", tainted,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				l.setTaints(node, taint(admissionTaint), taint(untaint))
				l.Until("its removal", func() bool { return len(l.taints(node)) == 0 })
			},
			none, "AgentReady", 2,
		},
		{
			"a node that has nothing to do with it",
			nodeState{taints: []string{"a=b:NoExecute"}},
			nil,
			[]string{"a=b:NoExecute"},
			"NoAgent, taints are not added", nil, nil, "", 0,
		},
	}, func() *controller { return l.begin(kubeconfig, "--namespace="+l.mesh, "--lease-namespace="+l.mesh) })
}

// TestCustomKeyEffectSelectorAndNamespaces, T-6 and T-8: the Cluster Autoscaler recognises this key without a flag.
func TestCustomKeyEffectSelectorAndNamespaces(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}, pods: []string{l.mesh, l.other}})
	const key = autoscalerKey
	const ours = key + "=starting:NoExecute"
	mesh := map[string]string{"app": "mesh", "tier": "cni"}
	none := []string{}
	runScenarios(t, l, []scenario{
		{
			"of the key only this effect",
			nodeState{taints: []string{untaint, key + ":NoSchedule", key + "=x:NoExecute"}},
			[]podState{{ready: true, labels: mesh}},
			[]string{untaint, key + ":NoSchedule"},
			"AgentReady", nil, nil, "", 1,
		},
		{
			"the second namespace",
			nodeState{taints: []string{ours}},
			[]podState{{ready: true, labels: mesh, namespace: l.other}},
			none, "AgentReady", nil, nil, "", 1,
		},
		{
			"the other value of the selector",
			nodeState{taints: []string{ours}},
			[]podState{{ready: true, labels: map[string]string{"app": "cni"}}},
			none, "AgentReady", nil, nil, "", 1,
		},
		{
			"a pod that the selector excludes",
			nodeState{taints: []string{ours}},
			[]podState{{ready: true, labels: map[string]string{"app": "mesh", "tier": "test"}}},
			[]string{ours},
			"NoAgent", nil, nil, "", 0,
		},
		{
			"the usual label",
			nodeState{taints: []string{ours}},
			[]podState{{ready: true}},
			[]string{ours},
			"NoAgent", nil, nil, "", 0,
		},
		{
			"added with value and effect",
			nodeState{taints: []string{untaint}},
			[]podState{{ready: true, labels: mesh}},
			[]string{untaint},
			"AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			[]string{untaint, ours},
			"NoAgent", 1,
		},
	}, func() *controller {
		return l.begin(kubeconfig, "--namespace="+l.mesh+","+l.other, "--lease-namespace="+l.mesh, "--taint-name="+key,
			"--taint-value=starting", "--effect=NoExecute", "--selector=app in (mesh,cni),tier!=test", "--add", "--hysteresis=0")
	})
}
