package taint

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestGracePeriod_AgentGone: the node is tainted, and its condition changes, when the grace period ends.
func TestGracePeriod_AgentGone(t *testing.T) {
	l := newFixture(t, adding())
	l.options.Condition = "example.com/Ready"
	condition := func() string {
		status, _ := l.fetch("/api/v1/nodes/n")["status"].(object)
		all, _ := status["conditions"].([]any)
		for _, c := range all {
			if c, _ := c.(object); c["type"] == l.options.Condition {
				return c["status"].(string)
			}
		}
		return ""
	}
	l.node("n", nodeSpec{})
	l.pod("n", "agent", "True", yesterday())
	l.run()
	agenttest.Eventually(t, "no condition", func() bool { return condition() == "True" })
	gone := l.clock.Now()
	l.after(readiness.NoAgent, func() { l.server.Delete("/api/v1/namespaces/istio-system/pods/agent") })
	l.stepUntil("the node is not tainted", l.tainted)
	if waited := l.clock.Now().Sub(gone); waited < l.options.Policy.GracePeriod {
		t.Errorf("tainted after %s", waited)
	}
	agenttest.Eventually(t, "the condition stays", func() bool { return condition() == "False" })
}

// TestRequirements_DifferentPods: each part of a selector is a requirement, and different pods may meet them.
func TestRequirements_DifferentPods(t *testing.T) {
	l := newFixture(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	l.server.Set(requirements("- {name: two, selector: 'a=1, b=2', namespace: istio-system}\n"))
	l.node("n", nodeSpec{})
	l.labelledPod("n", "a", "True", yesterday(), object{"a": "1"})
	l.run()
	agenttest.Eventually(t, "one of two requirements is enough", l.tainted)
	l.labelledPod("n", "b", "True", yesterday(), object{"b": "2"})
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	l.labelledPod("n", "b", "False", agenttest.Start(), object{"b": "2"})
	agenttest.Eventually(t, "an unready pod meets a requirement", l.tainted)
}

// TestRequirements_NoPodOnAnyNode, T-6: a wrong namespace is the usual reason for nodes that stay tainted.
func TestRequirements_NoPodOnAnyNode(t *testing.T) {
	const text = "no pod meets the requirement on any node"
	l := newFixture(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.run()
	agenttest.Eventually(t, "no warning", func() bool { return strings.Contains(l.log.String(), text) })
	l.after(readiness.NoAgent, func() { l.node("m", nodeSpec{}) })
	l.pod("n", "agent", "True", yesterday())
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	l.after(readiness.NoAgent, func() { l.node("o", nodeSpec{}) })
	check.Equal(t, strings.Count(l.log.String(), text), 1, text, "in", l.log.String())
}

// TestPatch_RefusedForADeletedNode: no later patch can succeed, and the controller is ready again.
func TestPatch_RefusedForADeletedNode(t *testing.T) {
	l := newFixture(t, untaint())
	l.refused()
	l.server.Delete("/api/v1/nodes/n")
	agenttest.Eventually(t, "it stays unready", l.ready)
}

// TestPatch_RefusedInAnEarlierTerm: the refusal does not make a replica unready while it waits for the lease.
func TestPatch_RefusedInAnEarlierTerm(t *testing.T) {
	l := candidate(t)
	l.refused()
	l.takeLease()
	l.stepUntil("it keeps leading", func() bool { return !l.leads() })
	l.stepUntil("it stays unready", l.ready)
}

// refused runs the controller until the API server has refused a patch.
func (l *fixture) refused() {
	l.Helper()
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("PATCH /api/v1/nodes/", kubetest.Forbidden, kubetest.Forever)
	l.run()
	agenttest.Eventually(l.T, "the refusal is not reported", func() bool { return !l.ready() && l.patches() > 0 })
}

// TestPlan checks the lines that --dry-run prints; no request changes anything.
func TestPlan(t *testing.T) {
	l := newFixture(t, adding())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.node("o", nodeSpec{taints: []object{ourTaint()}})
	l.node("p", nodeSpec{})
	got, err := Plan(t.Context(), l.options)
	want := []string{
		"node n: remove: the CNI agent is ready",
		`node o: keep: there is no CNI agent on the node (requirement "agent") (in place)`,
		`node p: add: there is no CNI agent on the node (requirement "agent")`,
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if slices.ContainsFunc(l.server.Requests(), func(r string) bool { return !strings.HasPrefix(r, "GET ") }) {
		t.Errorf("requests %q", l.server.Requests())
	}
}

func TestRequirements(t *testing.T) {
	got, err := requirementsOf(map[string]string{
		"b": "- {name: x, selector: 'a=1, b in (c)', namespace: ns}\n- {name: z, selector: d}\n",
		"a": "- name: istio-cni\n  selector: k8s-app=istio-cni-node\n  namespace: istio-system\n", "c": "",
	})
	want := []readiness.Requirement{
		{Name: "istio-cni", Namespaces: []string{"istio-system"}, Selector: "k8s-app=istio-cni-node"},
		{Name: "x", Namespaces: []string{"ns"}, Selector: "a=1"},
		{Name: "x", Namespaces: []string{"ns"}, Selector: "b in (c)"},
		{Name: "z", Namespaces: []string{""}, Selector: "d"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	got, err = requirementsOf(map[string]string{"a": "\t{", "b": "- {name: x, selektor: y}", "c": "- {selector: '-='}", "d": "- {selector: a, namespace: A/B}", "e": "- {name: z}"})
	if got != nil || err == nil {
		t.Fatal(got, err)
	}
	check.Contains(t, err.Error(), `key "a": decoding`, "selektor", `key "c"[0]`, `"A/B" is not a namespace`, `key "e"[0]: the selector is empty`)
}
