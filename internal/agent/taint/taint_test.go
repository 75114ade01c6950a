package taint

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

func yesterday() time.Time { return agenttest.Start().Add(-24 * time.Hour) }

const (
	ours  = "cni.istio.io/not-ready:NoSchedule"
	other = "other:NoExecute"
)

func TestASecondWriterLosesNothing(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.after(readiness.AgentUnready, func() { l.run() })
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	// The other one writes between what was read and the patch: the watch tells it too late.
	l.server.HoldWatches("/nodes")
	l.node("n", nodeSpec{taints: []object{otherTaint(), ourTaint()}, labels: object{"by": "hand"}})
	l.pod("n", "agent", "True", agenttest.Start())
	until(t, "there is no conflict", func() bool {
		return l.metric(`istio_cni_taint_changes_total{change="remove",result="conflict"}`) > 0
	})
	if diff := cmp.Diff([]string{other, ours}, l.taints("n")); diff != "" {
		t.Errorf("the other writer lost (-want +got):\n%s", diff)
	}
	l.server.ReleaseWatches()
	l.wantTaints("n", other)
	metadata, _ := l.fetch("/api/v1/nodes/n")["metadata"].(object)
	if diff := cmp.Diff(object{"by": "hand"}, metadata["labels"]); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}

// TestAResponseWithAnotherChangeIsEvaluated: the node becomes Ready before the patch, and the watch delivers it after the response.
func TestAResponseWithAnotherChangeIsEvaluated(t *testing.T) {
	policy := legacy()
	policy.Requirements = untaint().Requirements
	l := newLab(t, policy)
	l.node("n", nodeSpec{unready: true})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("PATCH /api/v1/nodes/", kubetest.Unavailable, 1)
	l.run()
	until(t, "the node is not patched", func() bool { return l.patches() == 1 && l.server.Watches() == 2 })
	l.server.HoldWatches("/nodes")
	l.node("n", nodeSpec{})
	until(t, "the taint is not added", func() bool {
		l.clock.Step(time.Second)
		return l.metric(`istio_cni_taint_changes_total{change="add",result="success"}`) == 1
	})
	l.server.ReleaseWatches()
	l.wantTaints("n")
}

func TestANoOpSendsNothing(t *testing.T) {
	l := newLab(t, adding())
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.run()
	until(t, "not all are known", func() bool { return l.metric(`istio_cni_taint_nodes{reason="AgentReady"}`) == 10 })
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	before, decisions := len(l.server.Requests()), l.decided(readiness.AgentReady)
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}, heartbeat: agenttest.Start().Add(time.Minute)})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.after(readiness.AgentReady, func() { l.node("n0", nodeSpec{}) })
	if after := len(l.server.Requests()); after != before || before != 2 {
		t.Errorf("%d requests, then %d, want 2 at all: %q", before, after, l.server.Requests())
	}
	if got := l.decided(readiness.AgentReady); got != decisions+1 {
		t.Errorf("%d decisions for heartbeats and pods that did not change", got-decisions-1)
	}
	l.server.Delete("/api/v1/nodes/n9")
	until(t, "a deleted node is still counted", func() bool { return l.metric(`istio_cni_taint_nodes{reason="AgentReady"}`) == 9 })
}

func TestTheAPIServerIsAwayMeanwhile(t *testing.T) {
	for name, away := range map[string]func(*kubetest.Server){
		"watches break":         func(s *kubetest.Server) { s.BreakWatches() },
		"watches end":           func(s *kubetest.Server) { s.CloseWatches() },
		"the history is gone":   func(s *kubetest.Server) { s.Set(requirements("")); s.Compact(); s.BreakWatches() },
		"it refuses for a time": func(s *kubetest.Server) { s.Fail(kubetest.Unavailable, 5); s.BreakWatches() },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, adding())
			l.node("n", nodeSpec{})
			l.pod("n", "agent", "True", yesterday())
			l.node("m", nodeSpec{taints: []object{ourTaint()}})
			l.run()
			until(t, "it is never ready", l.ready)
			until(t, "no watches", func() bool { return l.server.Watches() == 2 })
			l.server.Delete(podPath("agent"))
			away(l.server)
			l.pod("m", "agent-m", "True", agenttest.Start())
			l.wantTaints("m")
			until(t, "the loss of the agent is not seen", func() bool { return l.metric(`istio_cni_taint_nodes{reason="NoAgent"}`) == 1 })
			l.clock.Step(2 * time.Minute)
			l.wantTaints("n", ours)
		})
	}
}

func TestAFailedPatchIsTriedAgain(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("PATCH /api/v1/nodes/", kubetest.Forbidden, 3)
	l.run()
	until(t, "the failure is not told", func() bool { return !l.ready() && l.patches() > 0 })
	until(t, "it gave up", func() bool {
		l.clock.Step(time.Second)
		return len(l.taints("n")) == 0
	})
	until(t, "it stays unready", l.ready)
	if l.patches() != 4 {
		t.Errorf("%d patches, want 4", l.patches())
	}
}

func TestNothingIsDecidedBeforeAllIsKnown(t *testing.T) {
	l := newLab(t, adding())
	l.options.Policy.GracePeriod = 0
	l.node("n", nodeSpec{})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("/pods?", kubetest.ServerError, 20)
	l.run()
	until(t, "it is never ready", l.ready)
	l.wantTaints("n")
	if l.patches() != 0 {
		t.Errorf("%d patches before the pods were known", l.patches())
	}
}

func requirements(text string) []byte {
	return kubetest.ConfigMap("kube-system", "single", map[string]string{"config": text})
}

const agentRequirement = "- name: istio-cni\n  selector: k8s-app=istio-cni-node\n  namespace: istio-system\n"

// TestBadRequirements: the e2e test of the ConfigMap has the taints and the events; here are readiness and metrics.
func TestBadRequirements(t *testing.T) {
	l := newLab(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	problems := func(n int, ready bool) {
		t.Helper()
		until(t, "the bad content is not counted", func() bool { return l.metric("istio_cni_taint_config_problems_total") == n })
		if l.ready() != ready {
			t.Errorf("ready %t after problem %d, want %t", !ready, n, ready)
		}
	}
	l.server.Set(requirements("\t{"))
	l.run()
	problems(1, false)
	l.server.Set(requirements(agentRequirement))
	until(t, "it is never ready", l.ready)
	l.server.Set(requirements("- {name: a, selektor: b}"))
	problems(2, true)
	l.server.Delete("/api/v1/namespaces/kube-system/configmaps/single")
	problems(3, true)
}

func TestOnceFails(t *testing.T) {
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
			l := newLab(t, legacy())
			l.options.ConfigMap = ConfigMap{"kube-system", "single"}
			l.node("n", nodeSpec{})
			l.server.Set(requirements(test.requirements))
			if test.part != "" {
				l.server.FailOn(test.part, test.fault, kubetest.Forever)
			}
			done := make(chan error, 1)
			go func() { done <- Once(t.Context(), l.options) }()
			until(t, "it does not end", func() bool { l.clock.Step(time.Second); return len(done) > 0 })
			if err := <-done; err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestNodeCondition(t *testing.T) {
	l := newLab(t, untaint())
	l.options.Condition = "cni.istio.io/MeshCNIReady"
	l.node("n", nodeSpec{})
	l.pod("n", "agent", "True", yesterday())
	l.run()
	is := func(status, reason string) {
		t.Helper()
		at := l.clock.Now().Format(time.RFC3339)
		until(t, "the condition is not "+status, func() bool {
			whole, _ := l.fetch("/api/v1/nodes/n")["status"].(object)
			list, _ := whole["conditions"].([]any)
			return len(list) == 3 && slices.ContainsFunc(list, func(one any) bool {
				c, _ := one.(object)
				return c["type"] == l.options.Condition && c["status"] == status && c["reason"] == reason && c["lastTransitionTime"] == at
			})
		})
	}
	is("True", "AgentReady")
	l.after(readiness.NoAgent, func() { l.server.Delete(podPath("agent")) })
	is("True", "AgentReady") // within the grace period
	l.clock.Step(2 * time.Minute)
	is("False", "NoAgent")
	if l.patches() != 2 {
		t.Errorf("%d patches, want 2", l.patches())
	}
}

func TestAnOldStateThatTheWatchTellsLateIsPassedOver(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	old := l.server.Object("/api/v1/nodes/n")
	l.run()
	l.wantTaints("n")
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	l.server.Tell("MODIFIED", old)
	l.after(readiness.AgentReady, func() { l.pod("n", "agent", "True", agenttest.Start()) })
	// The second node comes after all that.
	l.after(readiness.NoAgent, func() { l.node("m", nodeSpec{}) })
	if l.patches() != 1 {
		t.Errorf("%d patches, want 1", l.patches())
	}
}
