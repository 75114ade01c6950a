package taint

import (
	"fmt"
	"slices"
	"testing"
	"time"

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
func runScenarios(l *fixture, scenarios []scenario, begin func() *controller) {
	l.Helper()
	name := func(i int) string { return "node-" + string(rune('a'+i)) }
	for i, s := range scenarios {
		l.node(name(i), s.node)
		for _, pod := range s.pods {
			l.pod(name(i), pod)
		}
	}
	c := begin()
	check := func(i int, want []string, decision string) {
		l.Helper()
		l.Until(fmt.Sprintf("%s: taints %q of %s by decision %q", scenarios[i].name, want, name(i), decision), func() bool {
			return c.decided(name(i)) == decision && slices.Equal(l.taints(name(i)), want)
		})
	}
	for i, s := range scenarios {
		check(i, s.want, s.decision)
	}
	for i, s := range scenarios {
		if s.change != nil {
			s.change(l, name(i))
		}
	}
	for i, s := range scenarios {
		if s.change != nil {
			check(i, s.wantAfter, s.decisionAfter)
		}
	}
	l.waitSynced()
	l.Stop(c.Program)
	for i, s := range scenarios {
		if n := l.patches(name(i)); n != s.patches {
			l.Errorf("%s (%s): %d patches, want %d", s.name, name(i), n, s.patches)
		}
	}
	l.checkRequests()
}

// waitSynced waits until the controller has processed all earlier changes. It creates one more node, which needs a
// patch with any settings of these tests, and waits for the patch. Watch events arrive in order and are processed in
// order, except that several workers run in parallel; Stop waits for those.
func (l *fixture) waitSynced() {
	l.Helper()
	const name = "zz-last"
	l.node(name, nodeState{ready: "True", taints: []string{legacy, untaint, autoscalerKey + ":NoExecute"}})
	l.pod(name, podState{ready: true, labels: map[string]string{"k8s-app": "istio-cni-node", "app": "mesh"}})
	l.Until("the last node to be changed", func() bool { return len(l.taints(name)) == 2 })
}

// Changes of a scenario.

// podReadyBecomes sets condition Ready of the node's agent, with the current time as transition time.
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

func agentComes(l *fixture, node string)      { l.pod(node, podState{ready: true}) }
func agentIsDeleted(l *fixture, node string)  { l.deletePod(node, 0) }
func agentTerminates(l *fixture, node string) { l.deletePod(node, 30) }

const (
	// autoscalerKey has the prefix by which the Cluster Autoscaler recognises startup taints.
	autoscalerKey = "startup-taint.cluster-autoscaler.kubernetes.io/mesh-cni"

	legacy  = "NodeReadiness:NoSchedule"
	untaint = "cni.istio.io/not-ready=true:NoSchedule"
)

// TestTriggers_Legacy tests the semantics of istio-cni-taint of Istio 1.8 to 1.17, which had no hysteresis.
func TestTriggers_Legacy(t *testing.T) {
	l := newFixture(t)
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	kubeconfig := l.grant(rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName})
	ready, agents := nodeState{ready: "True"}, []podState{{ready: true}}
	tainted := nodeState{ready: "True", taints: []string{legacy}}
	none, one := []string{}, []string{legacy}
	others := []string{"a=b:NoExecute", "NodeReadiness:NoExecute", "z:PreferNoSchedule"}
	runScenarios(l, []scenario{
		{"the agent becomes ready", tainted, []podState{{}}, one, "AgentUnready", podReadyBecomes(true), none, "AgentReady", 1},
		{"a ready agent comes", tainted, nil, one, "NoAgent", agentComes, none, "AgentReady", 1},
		{"the agent becomes unready", ready, agents, none, "AgentReady", podReadyBecomes(false), one, "AgentUnready", 1},
		{"the agent is deleted", ready, agents, none, "AgentReady", agentIsDeleted, one, "NoAgent", 1},
		{"the agent terminates", ready, agents, none, "AgentReady", agentTerminates, one, "AgentUnready", 1},
		{
			"the node becomes ready",
			nodeState{ready: "False", taints: one},
			agents, one, "NodeUnready",
			nodeReadyBecomes("True"), none, "AgentReady", 1,
		},
		{"the node becomes unready", ready, agents, none, "AgentReady", nodeReadyBecomes("False"), one, "NodeUnready", 1},
		{"the node is lost", ready, agents, none, "AgentReady", nodeReadyBecomes("Unknown"), one, "NodeUnready", 1},
		{
			"other taints stay, and the same key with another effect",
			nodeState{ready: "True", taints: slices.Insert(slices.Clone(others), 1, "NodeReadiness=x:NoSchedule")},
			agents, others, "AgentReady",
			podReadyBecomes(false), append(slices.Clone(others), legacy), "AgentUnready", 2,
		},
		{
			"the node is recreated with its name", tainted, nil, one, "NoAgent",
			func(l *fixture, node string) { l.deleteNode(node); l.node(node, ready) },
			// The new node has no conditions at first, so the taint is added at once or after the status update.
			one, "NoAgent", 1,
		},
	}, func() *controller {
		return l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
			"--lease-namespace="+l.mesh)
	})
}

// TestTriggers_Untaint tests the semantics of istiod's untaint controller, which never adds a taint.
func TestTriggers_Untaint(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(rights.Taint{Lease: "istio-node-untaint"})
	agents := []podState{{ready: true}}
	tainted := nodeState{taints: []string{untaint}}
	none, one := []string{}, []string{untaint}
	runScenarios(l, []scenario{
		{"the agent becomes ready", tainted, []podState{{}}, one, "AgentUnready", podReadyBecomes(true), none, "AgentReady", 1},
		{"an agent of another namespace", tainted, []podState{{ready: true, namespace: l.other}}, one, "NoAgent", nil, nil, "", 0},
		{
			"another label", tainted,
			[]podState{{ready: true, labels: map[string]string{"k8s-app": "other"}}},
			one, "NoAgent", nil, nil, "", 0,
		},
		{
			"any value and any effect of the key, and no other key",
			nodeState{taints: []string{
				"cni.istio.io/not-ready=x:NoExecute", legacy, "cni.istio.io/not-ready:PreferNoSchedule",
				"cni.istio.io/not-ready2:NoSchedule", untaint,
			}},
			agents,
			[]string{legacy, "cni.istio.io/not-ready2:NoSchedule"},
			"AgentReady", nil, nil, "", 1,
		},
		{
			"a deleted agent changes nothing",
			nodeState{},
			agents, none, "AgentReady",
			agentIsDeleted, none, "NoAgent, taints are not added", 0,
		},
		{
			"another writer adds the taint again", tainted, agents, none, "AgentReady",
			func(l *fixture, node string) {
				l.setTaints(node, taint(admissionTaint), taint(untaint))
				l.untilTaints(node)
			},
			none, "AgentReady", 2,
		},
	}, func() *controller { return l.begin(kubeconfig, "--namespace="+l.mesh, "--lease-namespace="+l.mesh) })
}

// TestTriggers_CustomTaint, T-6 and T-8: key, effect, selector and namespaces are set.
func TestTriggers_CustomTaint(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(rights.Taint{Lease: "istio-node-untaint"}, l.other)
	const ours = autoscalerKey + "=starting:NoExecute"
	mesh, tainted := map[string]string{"app": "mesh", "tier": "cni"}, nodeState{taints: []string{ours}}
	none := []string{}
	runScenarios(l, []scenario{
		{
			"of the key only this effect",
			nodeState{taints: []string{untaint, autoscalerKey + ":NoSchedule", autoscalerKey + "=x:NoExecute"}},
			[]podState{{ready: true, labels: mesh}},
			[]string{untaint, autoscalerKey + ":NoSchedule"},
			"AgentReady", nil, nil, "", 1,
		},
		{
			"the second namespace", tainted,
			[]podState{{ready: true, labels: mesh, namespace: l.other}},
			none, "AgentReady", nil, nil, "", 1,
		},
		{
			"the other value of the selector", tainted,
			[]podState{{ready: true, labels: map[string]string{"app": "cni"}}},
			none, "AgentReady", nil, nil, "", 1,
		},
		{
			"a pod that the selector excludes", tainted,
			[]podState{{ready: true, labels: map[string]string{"app": "mesh", "tier": "test"}}},
			[]string{ours},
			"NoAgent", nil, nil, "", 0,
		},
		{
			"added with value and effect",
			nodeState{taints: []string{untaint}},
			[]podState{{ready: true, labels: mesh}},
			[]string{untaint},
			"AgentReady", agentIsDeleted,
			[]string{untaint, ours},
			"NoAgent", 1,
		},
	}, func() *controller {
		return l.begin(kubeconfig, "--namespace="+l.mesh+","+l.other, "--lease-namespace="+l.mesh, "--taint-name="+autoscalerKey,
			"--taint-value=starting", "--effect=NoExecute", "--selector=app in (mesh,cni),tier!=test", "--add", "--hysteresis=0")
	})
}
