package taint

import (
	"slices"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// rebooted reports another boot ID, as the kubelet does after a reboot. Its heartbeat is later than all earlier ones,
// in whole seconds.
func rebooted(l *fixture, node string) {
	l.report(node, nodeState{ready: "True", boot: "boot-2", heartbeat: time.Now().Add(5 * time.Second)})
}

// TestRebootAndHysteresis, T-4 and T-5: with --add the controller taints a rebooted node at once in spite of
// hysteresis; the restart of an agent during an update adds no taint.
func TestRebootAndHysteresis(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}})
	node, agent := nodeState{ready: "True"}, podState{ready: true}
	none, one := []string{}, []string{untaint}
	settled := func(l *fixture, node string, want []string) {
		l.Helper()
		l.Until("taints of "+node, func() bool { return slices.Equal(l.taints(node), want) })
	}
	runScenarios(t, l, []scenario{
		{"a reboot", node, []podState{agent}, none, "AgentReady", rebooted, one, "Rebooted", 1},
		{
			"a reboot, and the agent becomes ready again", node,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				rebooted(l, node)
				settled(l, node, one)
				l.reportPod(node, podState{})
				l.reportPod(node, podState{ready: true, since: time.Now().Add(10 * time.Second)})
			},
			none, "AgentReady", 2,
		},
		{
			"a reboot, and the readiness from before it is reported again", node,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				rebooted(l, node)
				settled(l, node, one)
				l.reportPod(node, podState{})
				l.reportPod(node, podState{ready: true, since: time.Now().Add(-30 * time.Minute)})
			},
			one, "Rebooted", 1,
		},
		{
			"the kubelet was away and the node was not rebooted", node,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				l.report(node, nodeState{ready: "Unknown", since: time.Now()})
				l.report(node, nodeState{ready: "True", since: time.Now().Add(2 * time.Second)})
			},
			none, "AgentReady", 0,
		},
		{
			"an update of the agent", node,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) {
				l.deletePod(l.mesh, node)
				l.pod(node, podState{name: node + "-new"})
				l.reportPod(node, podState{name: node + "-new", ready: true, since: time.Now()})
			},
			none, "AgentReady", 0,
		},
		{
			"the agent is away for a while", node,
			[]podState{agent},
			none, "AgentReady",
			func(l *fixture, node string) { l.deletePod(l.mesh, node) },
			none, "NoAgent, unready for a short time", 0,
		},
		{
			"the agent is unready for a while", node,
			[]podState{agent},
			none, "AgentReady", podReadyBecomes(false),
			none, "AgentUnready, unready for a short time", 0,
		},
		{"a new node without the taint", node, nil, one, "NoAgent", nil, nil, "", 1},
	}, func() *controller {
		return l.begin(kubeconfig, "--add", "--hysteresis=1h", "--namespace="+l.mesh, "--lease-namespace="+l.mesh)
	})
}

// TestUntaintIgnoresReadinessFromBeforeAReboot, T-5 in the mode that only removes: another component adds the taint
// after a reboot.
func TestUntaintIgnoresReadinessFromBeforeAReboot(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}})
	none, one := []string{}, []string{untaint}
	tainted := func(l *fixture, node string) {
		rebooted(l, node)
		l.setTaints(node, taint(admissionTaint), taint(untaint))
	}
	runScenarios(t, l, []scenario{
		{"readiness from before the reboot", nodeState{ready: "True"}, []podState{{ready: true}}, none, "AgentReady", tainted, one, "Rebooted", 0},
		{
			"readiness from after the reboot",
			nodeState{ready: "True"},
			[]podState{{ready: true}},
			none, "AgentReady",
			func(l *fixture, node string) {
				tainted(l, node)
				l.reportPod(node, podState{ready: true, since: time.Now().Add(10 * time.Second)})
			},
			none, "AgentReady", 1,
		},
	}, func() *controller { return l.begin(kubeconfig, "--namespace="+l.mesh, "--leader-elect=false") })
}

// TestSettleAfterASuspectedReboot: a controller that starts after a reboot can only suspect it from an agent's
// readiness that is older than the node's. Until --settle is over it neither adds nor removes the taint.
func TestSettleAfterASuspectedReboot(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}})
	// The time is in the past, but the controller starts later.
	back := time.Now().Add(-time.Second)
	l.node("tainted", nodeState{ready: "True", taints: []string{untaint}, since: back})
	l.pod("tainted", podState{ready: true})
	l.node("clean", nodeState{ready: "True", since: back})
	l.pod("clean", podState{ready: true})
	l.node("repaired", nodeState{ready: "True", taints: []string{untaint}, since: back})
	l.pod("repaired", podState{ready: true, since: time.Now()})
	args := []string{"--add", "--hysteresis=0", "--namespace=" + l.mesh, "--leader-elect=false"}

	c := l.begin(kubeconfig, append(args, "--settle=1h")...)
	l.Until("the suspicion", func() bool {
		return c.decided("tainted") == "MaybeRebooted" && c.decided("clean") == "MaybeRebooted, only a suspicion" && len(l.taints("repaired")) == 0
	})
	if c.patches("tainted") != 0 || c.patches("clean") != 0 {
		t.Error("a suspected reboot changed a taint")
	}
	// A new readiness of the agent ends the suspicion.
	l.reportPod("clean", podState{})
	l.reportPod("clean", podState{ready: true, since: time.Now()})
	l.Until("the end of the suspicion", func() bool { return c.decided("clean") == "AgentReady" })
	c.stop()

	c = l.begin(kubeconfig, append(args, "--settle=4s")...)
	l.Until("the end of --settle", func() bool { return c.decided("tainted") == "AgentReady" && len(l.taints("tainted")) == 0 })
	for _, r := range c.requests() {
		if r.Verb == "patch" && r.Name == "tainted" && r.Received.Before(back.Truncate(time.Second).Add(4*time.Second)) {
			t.Errorf("the taint was removed at %s, before --settle was over", r.Received)
		}
	}
	c.stop()
}

// TestTaintAfterHysteresis: the controller adds the taint when an agent was away for the hysteresis, and not earlier.
func TestTaintAfterHysteresis(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint", Condition: true}})
	l.node("a", nodeState{ready: "True"})
	l.pod("a", podState{ready: true})
	c := l.begin(kubeconfig, "--add", "--hysteresis=3s", "--namespace="+l.mesh, "--leader-elect=false",
		"--node-condition=cni.istio.io/MeshCNIReady")
	l.Until("the condition", func() bool { return l.condition("a") == "True" })
	gone := time.Now()
	l.deletePod(l.mesh, "a")
	l.Until("the taint", func() bool { return slices.Equal(l.taints("a"), []string{untaint}) })
	l.Until("the condition", func() bool { return l.condition("a") == "False" })
	for _, r := range c.requests() {
		if r.Verb == "patch" && r.Subresource == "" && r.Received.Before(gone.Add(3*time.Second)) {
			t.Errorf("tainted after %s", r.Received.Sub(gone))
		}
	}
	c.checkRequests()
	c.stop()
}
