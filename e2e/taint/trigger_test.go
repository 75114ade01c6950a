package taint

import (
	"slices"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// scenario is one node: how it is, what is done to it, and what becomes of its taints. All scenarios of a table are told to one
// controller at the same time.
type scenario struct {
	name string
	node nodeState
	pods []podState
	// want are the taints, in their order, and said the last decision.
	want     []string
	decision string
	// then is what happens next, with wantAfter and decisionAfter.
	change        func(l *fixture, node string)
	wantAfter     []string
	decisionAfter string
	// patches is how often the node may have been changed in all.
	patches int
}

// runScenarios runs a table.
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

// waitSynced returns when the controller has seen all that was done until now, and decided: what it is told last is a node that
// it has to do something about, whatever its settings here. News come in order, and so does the work on them, except that
// a few nodes are worked on at the same time; stop waits for those.
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

// waits is until without an end of the test.
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

// podReadyBecomes makes the node's agent ready or not, from now on.
func podReadyBecomes(ready bool) func(*fixture, string) {
	return func(l *fixture, node string) { l.reportPod(node, podState{ready: ready, since: time.Now()}) }
}

// nodeReadyBecomes changes the node's own condition. The kubelet's time has whole seconds and lies behind that of the controller's
// start.
func nodeReadyBecomes(ready string) func(*fixture, string) {
	return func(l *fixture, node string) {
		l.report(node, nodeState{ready: ready, since: time.Now().Add(2 * time.Second)})
	}
}

const (
	// autoscalerKey is a taint that the Cluster Autoscaler takes for one of starting nodes by its prefix.
	autoscalerKey = "startup-taint.cluster-autoscaler.kubernetes.io/mesh-cni"

	legacy  = "NodeReadiness:NoSchedule"
	untaint = "cni.istio.io/not-ready=true:NoSchedule"
)

// TestLegacyTriggers is the logic of istio-cni-taint of Istio 1.8 to 1.17. Hysteresis is off, as it had none.
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
			"the agent is told to end", ready,
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
			// T-2: the condition with the newest heartbeat counted, whatever it was.
			"another condition was said at the same time or later",
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
			"the node is made anew under its name", tainted, nil, one, "NoAgent",
			func(l *fixture, node string) {
				l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), node, meta.DeleteOptions{}))
				l.node(node, nodeState{ready: "True"})
			},
			// The new node has no conditions at first: it is tainted in that moment, or in the next.
			one, "NoAgent", 1,
		},
	}
	runScenarios(t, l, scenarios, func() *controller {
		return l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
			"--lease-namespace="+l.mesh)
	})
}

// TestLegacySelectorWithACommaIsTwoRequirements, which two pods may meet.
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

// TestUntaintTriggers is the logic of istiod's untaint controller: it never adds.
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
			"an agent that goes changes nothing",
			nodeState{},
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			none, "NoAgent, taints are not added", 0,
		},
		{
			"a taint that somebody puts back", tainted,
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

// TestCustomKeyEffectSelectorAndNamespaces, T-6 and T-8: the key is one that the Cluster Autoscaler knows without a flag.
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
