package nodes

import (
	"net/url"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestTwoNodes(t *testing.T) {
	s := newScenario(t)
	s.subtest("each node loses its taint by its own agent", (*scenario).newNodes)
	s.subtest("traffic between the nodes", (*scenario).traffic)
	s.subtest("the agents are updated under churn", (*scenario).updated)
	s.subtest("one agent is gone", (*scenario).agentGone)
	s.subtest("one node loses power", (*scenario).nodeLost)
	s.subtest("the node comes back", (*scenario).nodeBack)
}

// newNodes: the second node has no network yet, so its agent cannot start.
func (s *scenario) newNodes() {
	s.Helper()
	s.untilNode(s.first, core.ConditionTrue)
	s.untilNode(s.second, core.ConditionTrue)
	mend := s.cut(s.second)
	s.untilNode(s.second, core.ConditionFalse)
	if !s.tainted(s.first) || !s.tainted(s.second) {
		s.Fatal("a node has no taint")
	}
	s.Pod("one", lab.Injected(lab.On(s.first.Node()), patient))
	s.Pod("two", lab.Injected(lab.On(s.second.Node()), patient))
	s.Apply(s.Chart(values))
	s.untilUntainted(s.first)
	s.UntilReady("one")
	if !s.tainted(s.second) || s.Get(lab.App, "two").Spec.NodeName != "" || lab.Ready(s.AgentOn(s.second.Node())) {
		s.Error("the second node has no taint, although its agent is not ready")
	}
	s.Step("the first node has no taint any more")
	mend()
	s.untilUntainted(s.second)
	s.UntilReady("two")
	s.Step("the second node has no taint any more")
	for _, m := range []*cluster.Machine{s.first, s.second} {
		if agent := s.AgentOn(m.Node()); !lab.Ready(agent) {
			s.Errorf("%s has no taint, and its agent is not ready", m.Node())
		}
	}
	for _, name := range []string{"one", "two"} {
		if n := lab.Restarts(s.Get(lab.App, name)); n != 0 {
			s.Errorf("%s: %d container restarts", name, n)
		}
	}
}

// traffic: the proxies of both ends, or of the one end that is in the mesh, are on the way.
func (s *scenario) traffic() {
	s.Helper()
	s.Pod("plain-one", lab.Plain(lab.On(s.first.Node()), patient))
	s.Pod("plain-two", lab.Plain(lab.On(s.second.Node()), patient))
	s.UntilReady("plain-one", "plain-two")
	s.between()
	for _, c := range []struct {
		m         *cluster.Machine
		own, away string
	}{{s.first, "one", "two"}, {s.second, "two", "one"}} {
		agent := s.AgentOn(c.m.Node())
		own, away := s.DecisionsOf(agent, "/"+c.own), s.DecisionsOf(agent, "/"+c.away)
		if len(own) != 1 || !own[0].Captured || len(away) != 0 {
			s.Errorf("decisions of the agent of %s: %+v, and about a pod of the other node: %+v", c.m.Node(), own, away)
		}
	}
}

// between checks the way of requests between all pods of different nodes.
func (s *scenario) between() {
	s.Helper()
	for _, c := range []struct{ from, to, way string }{
		{"one", "two", "via outbound one, inbound two"},
		{"two", "one", "via outbound two, inbound one"},
		{"one", "plain-two", "via outbound one"},
		{"two", "plain-one", "via outbound two"},
		{"plain-one", "two", "via inbound two"},
		{"plain-two", "one", "via inbound one"},
		{"plain-one", "plain-two", ""},
		{"plain-two", "plain-one", ""},
	} {
		to, text := s.URL(c.to, "", lab.AppPort), ""
		s.Until(c.from+" to reach "+c.to, func() bool {
			var answered bool
			text, answered = s.GetFrom(c.from, to)
			return answered && strings.Contains(text, "hello from "+c.to)
		})
		way := ""
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "via ") {
				way = strings.TrimSpace(line)
			}
		}
		if way != c.way {
			s.Errorf("%s to %s: %q, want %q", c.from, c.to, text, c.way)
		}
		// Without a proxy the peer sees the pod's address, also on the other node.
		if from, err := url.Parse(s.URL(c.from, "", lab.AppPort)); c.way == "" && (err != nil || !strings.Contains(text, " to "+from.Hostname())) {
			s.Errorf("%s to %s: %q, want address %s, %v", c.from, c.to, text, from, err)
		}
	}
}

// uids returns the UIDs of the agents' pods.
func (s *scenario) uids() (first, second types.UID) {
	s.Helper()
	return s.AgentOn(s.first.Node()).UID, s.AgentOn(s.second.Node()).UID
}

// updated: two updates of the DaemonSet, one node after the other, while pods are created and deleted on both.
func (s *scenario) updated() {
	s.Helper()
	const workers, atLeast = 4, 3
	churn := s.Churn(workers)
	for _, level := range []string{"debug", "info"} {
		first, second := s.uids()
		s.Apply(s.Chart(values + "logging: {level: " + level + "}\n"))
		s.Until("the update to be rolled out", s.RolledOut)
		if one, two := s.uids(); one == first || two == second {
			s.Error("an agent was not replaced")
		}
		s.Step("rolled out with level %s", level)
	}
	churn.End(atLeast)
	s.between()
}

// agentGone: the agent of one node is deleted, and no other can start there.
func (s *scenario) agentGone() {
	s.Helper()
	mend := s.cut(s.second)
	s.untilNode(s.second, core.ConditionFalse)
	s.Must(s.Client().CoreV1().Pods(lab.Mesh).Delete(s.Context(), s.AgentOn(s.second.Node()).Name, meta.DeleteOptions{}))
	s.untilTainted(s.second)
	if s.tainted(s.first) || !lab.Ready(s.AgentOn(s.first.Node())) {
		s.Error("the first node has the taint, or its agent is not ready")
	}
	s.Step("the second node has the taint again")
	mend()
	s.untilUntainted(s.second)
	s.Step("the agent of the second node is back")
	s.between()
}

// nodeLost: the second node loses power. The first goes on.
func (s *scenario) nodeLost() {
	s.Helper()
	s.Must(s.second.PowerOff())
	s.untilNode(s.second, core.ConditionUnknown)
	s.untilTainted(s.second)
	s.Step("the second node is lost, and has the taint")
	s.Flows("one")
	s.Pod("later-one", lab.Injected(lab.On(s.first.Node())))
	s.UntilReady("later-one")
	s.Flows("later-one")

	r := s.Kubectl("istio-cni", "pods", "-n", lab.App, "--timeout=10s")
	s.Logf("kubectl istio-cni pods: %s", r)
	if r.Code != 1 || !strings.Contains(r.Stderr, "node "+s.second.Node()+": no answer") || !strings.Contains(r.Stdout, "later-one") {
		s.Error("it does not name the node that did not answer, or not the pods of the other")
	}

	s.updatedWithout()
	s.Flows("one", "later-one")
	if s.tainted(s.first) {
		s.Error("the first node has the taint")
	}
}

// updatedWithout: the lost node counts as unavailable, so the DaemonSet controller updates no other with maxUnavailable 1.
func (s *scenario) updatedWithout() {
	s.Helper()
	const update = values + "logging: {level: debug}\n"
	first, second := s.uids()
	s.Apply(s.Chart(update))
	s.Until("the end of the lost agent", func() bool { return s.AgentOn(s.second.Node()).DeletionTimestamp != nil })
	s.Step("with maxUnavailable 1 the agent of the first node is replaced: %t", s.AgentOn(s.first.Node()).UID != first)
	s.Apply(s.Chart(update + "updateStrategy: {rollingUpdate: {maxUnavailable: 2}}\n"))
	s.Until("the update of the first node", func() bool {
		agent := s.AgentOn(s.first.Node())
		return agent != nil && agent.UID != first && lab.Ready(agent)
	})
	if s.RolledOut() || s.AgentOn(s.second.Node()).UID != second {
		s.Error("the update counts as rolled out on the lost node")
	}
	s.Step("with maxUnavailable 2 the first node is updated")
}

// nodeBack: the second node boots. Its pods are captured again, and a new one starts after the agent.
func (s *scenario) nodeBack() {
	s.Helper()
	s.Pod("later-two", lab.Injected(lab.On(s.second.Node())))
	s.Until("the scheduler to refuse the pod", func() bool { return s.Event("later-two", "FailedScheduling", "") })
	boot := s.node(s.second).Status.NodeInfo.BootID
	s.Must(s.second.PowerOn(s.Context()))
	s.untilNode(s.second, core.ConditionTrue)
	s.Until("the report of another boot", func() bool { return s.node(s.second).Status.NodeInfo.BootID != boot })
	s.Step("the second node is back")
	s.Until("the update to be rolled out", s.RolledOut)
	s.untilUntainted(s.second)
	s.Step("the second node is updated, and has no taint any more")
	s.UntilReady("later-two")
	for _, c := range s.AgentOn(s.second.Node()).Status.Conditions {
		if start := s.Get(lab.App, "later-two").Status.StartTime; c.Type == core.PodReady && start.Before(&c.LastTransitionTime) {
			s.Errorf("later-two started at %s, the agent was ready at %s", start, c.LastTransitionTime)
		}
	}
	s.Until("two to be ready again", func() bool {
		pod := s.Get(lab.App, "two")
		return lab.Ready(pod) && pod.Status.ContainerStatuses[0].RestartCount > 0
	})
	for _, name := range []string{"two", "later-two"} {
		if s.Failed(name) {
			s.Errorf("%s ran without redirection", name)
		}
	}
	s.Flows("two", "later-two")
	s.between()
}
