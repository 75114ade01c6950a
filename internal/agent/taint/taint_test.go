package taint

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func yesterday() time.Time { return agenttest.Start().Add(-24 * time.Hour) }

// TestPatch_ResponseWithAnotherChange: the node becomes Ready before the patch, and the watch delivers it after the response.
func TestPatch_ResponseWithAnotherChange(t *testing.T) {
	policy := legacy()
	policy.Requirements = untaint().Requirements
	l := newFixture(t, policy)
	l.node("n", nodeSpec{unready: true})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("PATCH /api/v1/nodes/", kubetest.Unavailable, 1)
	l.run()
	agenttest.Eventually(t, "the node is not patched", func() bool { return l.patches() == 1 && l.server.Watches() == 2 })
	l.server.HoldWatches("/nodes")
	l.node("n", nodeSpec{})
	l.stepUntil("the taint is not added", func() bool { return l.metric(`istio_cni_taint_changes_total{change="add",result="success"}`) == 1 })
	l.server.ReleaseWatches()
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
}

func TestNodes_InDesiredState(t *testing.T) {
	l := newFixture(t, adding())
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.run()
	agenttest.Eventually(t, "not all nodes are known", func() bool { return l.metric(`istio_cni_taint_nodes{reason="AgentReady"}`) == 10 })
	agenttest.Eventually(t, "no watches", func() bool { return l.server.Watches() == 2 })
	before, decisions := len(l.server.Requests()), l.decided(readiness.AgentReady)
	const agents = "/api/v1/namespaces/istio-system/pods?"
	if !slices.ContainsFunc(l.server.Requests(), func(r string) bool {
		return strings.Contains(r, agents) && strings.Contains(r, "labelSelector=k8s-app%3Distio-cni-node")
	}) {
		t.Errorf("the API server does not select the agents: %q", l.server.Requests())
	}
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}, heartbeat: agenttest.Start().Add(time.Minute)})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.after(readiness.AgentReady, func() { l.node("n0", nodeSpec{}) })
	if after := len(l.server.Requests()); after != before || before != 2 {
		t.Errorf("%d requests, then %d, want 2 at all: %q", before, after, l.server.Requests())
	}
	check.Equal(t, l.decided(readiness.AgentReady), decisions+1, "decisions, after heartbeats and updates without a change")
	l.server.Delete("/api/v1/nodes/n9")
	agenttest.Eventually(t, "a deleted node is still counted", func() bool { return l.metric(`istio_cni_taint_nodes{reason="AgentReady"}`) == 9 })
}

func TestPatch_Refused(t *testing.T) {
	l := newFixture(t, untaint())
	l.refused()
	l.server.Heal()
	l.stepUntil("it is not retried", l.untainted)
	agenttest.Eventually(t, "it stays unready", l.ready)
}

// TestPatch_Conflict: the conflict is counted, and the retry keeps the other writer's taint.
func TestPatch_Conflict(t *testing.T) {
	l := newFixture(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.run()
	agenttest.Eventually(t, "no watches", func() bool { return l.server.Watches() == 2 })
	l.server.HoldWatches("/nodes")
	l.node("n", nodeSpec{taints: []object{otherTaint(), ourTaint()}})
	l.pod("n", "agent", "True", agenttest.Start())
	agenttest.Eventually(t, "there is no conflict", func() bool {
		return l.metric(`istio_cni_taint_changes_total{change="remove",result="conflict"}`) > 0
	})
	l.server.ReleaseWatches()
	l.stepUntil("the taint is not removed", func() bool { return len(l.taints()) == 1 })
	check.Diff(t, "result", []any{otherTaint()}, l.taints())
}

func TestCaches_NotSynced(t *testing.T) {
	l := newFixture(t, adding())
	l.options.Policy.GracePeriod = 0
	l.node("n", nodeSpec{})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("/pods?", kubetest.ServerError, 20)
	l.run()
	agenttest.Eventually(t, "it is never ready", l.ready)
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	check.Equal(t, l.patches(), 0, "patches before the pods were known")
}

func requirements(text string) []byte {
	return kubetest.ConfigMap("kube-system", "single", map[string]string{"config": text})
}

const agentRequirement = "- name: istio-cni\n  selector: k8s-app=istio-cni-node\n  namespace: istio-system\n"

// TestConfigMap_Invalid checks readiness and metrics; e2e/taint TestConfigMap has the taints and the events.
func TestConfigMap_Invalid(t *testing.T) {
	l := newFixture(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	problems := func(n int, ready bool) {
		t.Helper()
		agenttest.Eventually(t, "the bad content is not counted", func() bool { return l.metric("istio_cni_taint_config_problems_total") == n })
		check.Equal(t, l.ready(), ready, "ready after problem", n)
	}
	l.server.Set(requirements("\t{"))
	l.run()
	problems(1, false)
	l.server.Set(requirements(agentRequirement))
	agenttest.Eventually(t, "it is never ready", l.ready)
	l.server.Set(requirements("- {name: a, selektor: b}"))
	problems(2, true)
	l.server.Delete("/api/v1/namespaces/kube-system/configmaps/single")
	problems(3, true)
}

func TestOnce_Fails(t *testing.T) {
	for name, test := range map[string]struct {
		requirements, part string
		fault              kubetest.Fault
		want               string
	}{
		"bad content":        {"x: y", "", "", "reading requirements"},
		"a patch is refused": {agentRequirement, "PATCH /api/v1/nodes/n", kubetest.BadRequest, `node "n"`},
		"it takes too long":  {agentRequirement, "/nodes?", kubetest.ServerError, "it is not done after 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newFixture(t, legacy())
			l.options.ConfigMap = ConfigMap{"kube-system", "single"}
			l.node("n", nodeSpec{})
			l.server.Set(requirements(test.requirements))
			if test.part != "" {
				l.server.FailOn(test.part, test.fault, kubetest.Forever)
			}
			done := make(chan error, 1)
			go func() { done <- Once(t.Context(), l.options) }()
			l.stepUntil("it does not end", func() bool { return len(done) > 0 })
			check.Fails(t, <-done, test.want)
		})
	}
}

func TestWatch_OldVersion(t *testing.T) {
	l := newFixture(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	old := l.server.Object("/api/v1/nodes/n")
	l.run()
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	agenttest.Eventually(t, "no watches", func() bool { return l.server.Watches() == 2 })
	l.server.Send("MODIFIED", old)
	l.after(readiness.AgentReady, func() { l.pod("n", "agent", "True", agenttest.Start()) })
	// The second node is created after all that.
	l.after(readiness.NoAgent, func() { l.node("m", nodeSpec{}) })
	check.Equal(t, l.patches(), 1, "patches")
}
