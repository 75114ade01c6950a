package readiness

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// at returns a time by minutes and seconds.
func at(minutes, seconds int) time.Time {
	return time.Date(2026, 1, 1, 12, minutes, seconds, 0, time.UTC)
}

// old returns a time long before all other times in the tests.
func old() time.Time { return time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC) }

func untaint() Policy {
	return Policy{
		Taint: Taint{UntaintKey, UntaintValue, NoSchedule}, AnyEffect: true, Settle: 2 * time.Minute, GracePeriod: 2 * time.Minute,
		Requirements: []Requirement{{Name: "agent", Namespaces: []string{"istio-system"}, Selector: AgentSelector}},
	}
}

func adding() Policy {
	p := untaint()
	p.AddTaint = true
	return p
}

func legacy() Policy {
	p := adding()
	p.Taint, p.AnyEffect, p.RequireNodeReady, p.GracePeriod = Taint{LegacyKey, "", NoSchedule}, false, true, 0
	return p
}

func clean(taints ...Taint) Node {
	return Node{Name: "n", Ready: true, ReadySince: old(), Heartbeat: at(0, 0), BootID: "a", Created: old(), Taints: taints}
}

func tainted() Node {
	return clean(Taint{"other", "", NoExecute}, Taint{UntaintKey, "true", NoSchedule})
}
func oldTainted() Node  { return clean(Taint{LegacyKey, "", NoSchedule}) }
func unreadyNode() Node { n := clean(); n.Ready = false; return n }

func ready() [][]Pod              { return [][]Pod{{{Ready: true, Since: old()}}} }
func readyAt(t time.Time) [][]Pod { return [][]Pod{{{Ready: true, Since: t}}} }
func unready() [][]Pod            { return [][]Pod{{{Since: old()}}} }
func none() [][]Pod               { return [][]Pod{nil} }

func TestDecide(t *testing.T) {
	two := legacy()
	two.Requirements = append(two.Requirements, Requirement{Name: "other"})
	nothing := legacy()
	nothing.Requirements = nil
	exact := untaint()
	exact.AnyEffect = false
	custom := untaint()
	custom.Taint.Key = "example.com/not-ready"
	young := clean()
	young.Created = at(0, 50)
	for _, test := range []struct {
		name   string
		node   Node
		pods   [][]Pod
		policy Policy
		want   Decision
	}{
		// 3.2, the untaint controller.
		{"a ready agent takes the taint away", tainted(), ready(), untaint(), Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"a ready agent on a clean node: nothing to do", clean(), ready(), untaint(), Decision{Action: Keep, Reason: AgentReady, NoActionReason: AsWanted, ConditionStatus: ConditionTrue}},
		{"an unready agent keeps the taint", tainted(), unready(), untaint(), Decision{Action: Keep, Reason: AgentUnready, Requirement: "agent", NoActionReason: AsWanted, RecheckAt: at(3, 0)}},
		{"no agent keeps the taint", tainted(), none(), untaint(), Decision{Action: Keep, Reason: NoAgent, Requirement: "agent", NoActionReason: AsWanted, RecheckAt: at(3, 0)}},
		{"a terminating agent is ignored", tainted(), [][]Pod{{{Ready: true, Terminating: true}}}, untaint(), Decision{Action: Keep, Reason: AgentUnready, Requirement: "agent", NoActionReason: AsWanted, RecheckAt: at(3, 0)}},
		{"one ready agent of two is enough", tainted(), [][]Pod{{{}, {Ready: true, Since: old()}}}, untaint(), Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"the node itself does not matter", func() Node { n := tainted(); n.Ready = false; return n }(), ready(), untaint(), Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"any effect of the key goes", clean(Taint{UntaintKey, "", NoExecute}), ready(), untaint(), Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"another effect stays when one is chosen", clean(Taint{UntaintKey, "", NoExecute}), ready(), exact, Decision{Action: Keep, Reason: AgentReady, NoActionReason: AsWanted, ConditionStatus: ConditionTrue}},
		{"another key is not ours", tainted(), ready(), custom, Decision{Action: Keep, Reason: AgentReady, NoActionReason: AsWanted, ConditionStatus: ConditionTrue}},
		{"never adds unless wanted", young, none(), untaint(), Decision{Action: Keep, Reason: NoAgent, Requirement: "agent", NoActionReason: NoAdding, ConditionStatus: ConditionFalse}},

		// 3.1, the legacy controller.
		{"legacy: ready node and requirement met", oldTainted(), ready(), legacy(), Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"legacy: unready pod", clean(), unready(), legacy(), Decision{Action: Add, Reason: AgentUnready, Requirement: "agent", ConditionStatus: ConditionFalse}},
		{"legacy: deleted pod", clean(), none(), legacy(), Decision{Action: Add, Reason: NoAgent, Requirement: "agent", ConditionStatus: ConditionFalse}},
		{"legacy: unready node", unreadyNode(), ready(), legacy(), Decision{Action: Add, Reason: NodeUnready, ConditionStatus: ConditionFalse}},
		{"legacy: taint in place already", oldTainted(), none(), legacy(), Decision{Action: Keep, Reason: NoAgent, Requirement: "agent", NoActionReason: AsWanted, ConditionStatus: ConditionFalse}},
		{"legacy: all requirements must be met", clean(), [][]Pod{{{Ready: true, Since: old()}}, nil}, two, Decision{Action: Add, Reason: NoAgent, Requirement: "other", ConditionStatus: ConditionFalse}},
		{"legacy: different pods may meet them", oldTainted(), [][]Pod{{{Ready: true, Since: old()}}, {{Ready: true, Since: old()}}}, two, Decision{Action: Remove, Reason: AgentReady, ConditionStatus: ConditionTrue}},
		{"legacy: nothing required is met", oldTainted(), nil, nothing, Decision{Action: Remove, Reason: NothingRequired, ConditionStatus: ConditionTrue}},
		{"legacy: no requirements, unready node", unreadyNode(), nil, nothing, Decision{Action: Add, Reason: NodeUnready, ConditionStatus: ConditionFalse}},
		{"legacy: another effect of the key is not ours", clean(Taint{LegacyKey, "", NoExecute}), ready(), legacy(), Decision{Action: Keep, Reason: AgentReady, NoActionReason: AsWanted, ConditionStatus: ConditionTrue}},

		// Adding.
		{"a new node without agent is tainted at once", young, none(), adding(), Decision{Action: Add, Reason: NoAgent, Requirement: "agent", ConditionStatus: ConditionFalse}},
		{"an old node is given time", clean(), none(), adding(), Decision{Action: Keep, Reason: NoAgent, Requirement: "agent", NoActionReason: WithinGracePeriod, RecheckAt: at(3, 0)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, _ := Decide(test.node, test.pods, test.policy, Memory{}, at(1, 0))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// step is one of several decisions about one node.
type step struct {
	now    time.Time
	node   Node
	pods   [][]Pod
	action Action
	reason Reason
	hold   NoActionReason
}

// steps makes decisions with the memory of the previous one.
func steps(t *testing.T, p Policy, all ...step) {
	t.Helper()
	var m Memory
	for i, s := range all {
		var d Decision
		d, m = Decide(s.node, s.pods, p, m, s.now)
		if d.Action != s.action || d.Reason != s.reason || d.NoActionReason != s.hold {
			t.Fatalf("step %d: %s, %s, %q, want %s, %s, %q", i, d.Action, d.Reason, d.NoActionReason, s.action, s.reason, s.hold)
		}
	}
}

// again returns the first report of a node after a reboot.
func again(n Node, when time.Time) Node {
	n.BootID, n.Heartbeat = n.BootID+"'", when
	return n
}

func TestDecide_RollingUpdate(t *testing.T) {
	steps(t, adding(),
		step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted},
		step{at(1, 0), clean(), unready(), Keep, AgentUnready, WithinGracePeriod},
		step{at(1, 10), clean(), none(), Keep, NoAgent, WithinGracePeriod},
		step{at(2, 30), clean(), unready(), Keep, AgentUnready, WithinGracePeriod},
		step{at(2, 59), clean(), readyAt(at(2, 58)), Keep, AgentReady, AsWanted},
		// The grace period begins again.
		step{at(4, 0), clean(), none(), Keep, NoAgent, WithinGracePeriod},
		step{at(5, 59), clean(), none(), Keep, NoAgent, WithinGracePeriod},
		step{at(6, 0), clean(), none(), Add, NoAgent, ""},
		step{at(6, 1), tainted(), none(), Keep, NoAgent, AsWanted},
		step{at(7, 0), tainted(), readyAt(at(7, 0)), Remove, AgentReady, ""})
}

func TestDecide_ReadinessBeforeReboot(t *testing.T) {
	steps(t, adding(),
		step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted},
		// The node returns before its loss was noticed, with the earlier readiness: T-4, T-5.
		step{at(1, 0), again(clean(), at(1, 0)), ready(), Add, Rebooted, ""},
		step{at(1, 1), again(tainted(), at(1, 0)), unready(), Keep, AgentUnready, AsWanted},
		step{at(1, 30), again(tainted(), at(1, 0)), readyAt(at(1, 29)), Remove, AgentReady, ""},
		step{at(1, 31), again(clean(), at(1, 0)), readyAt(at(1, 29)), Keep, AgentReady, AsWanted})
}

func TestDecide_ReadinessOfOldBoot(t *testing.T) {
	steps(t, adding(),
		step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted},
		step{at(1, 0), again(tainted(), at(1, 0)), ready(), Keep, Rebooted, AsWanted},
		step{at(50, 0), again(tainted(), at(1, 0)), ready(), Keep, Rebooted, AsWanted})
}

func TestDecide_ReadinessBetweenReports(t *testing.T) {
	between := readyAt(at(0, 30))
	first := step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted}
	back := step{at(1, 0), again(tainted(), at(1, 0)), between, Keep, Rebooted, AsWanted}
	steps(t, adding(), first, back, step{at(2, 59), back.node, between, Keep, Rebooted, AsWanted},
		step{at(3, 0), back.node, between, Remove, AgentReady, ""})

	// A later heartbeat of the old boot shows that the readiness belongs to the old boot too.
	_, m := Decide(first.node, first.pods, adding(), Memory{}, first.now)
	beat := clean()
	beat.Heartbeat = at(0, 40)
	_, m = Decide(back.node, between, adding(), m.WithHeartbeat(beat), back.now)
	if d, _ := Decide(back.node, between, adding(), m, at(3, 0)); d.Reason != Rebooted || !d.RecheckAt.IsZero() {
		t.Errorf("%s, again at %s", d.Reason, d.RecheckAt)
	}
}

func TestDecide_RebootHasNoGracePeriod(t *testing.T) {
	steps(t, adding(),
		step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted},
		step{at(1, 0), again(clean(), at(1, 0)), none(), Add, NoAgent, ""})
}

func TestDecide_UnobservedReboot(t *testing.T) {
	back := clean()
	back.ReadySince = at(1, 0)
	stillTainted := tainted()
	stillTainted.ReadySince = at(1, 0)
	// A clean node is not tainted: the whole cluster may have been unreachable.
	steps(t, adding(), step{at(1, 1), back, ready(), Keep, MaybeRebooted, RebootSuspected},
		step{at(3, 0), back, ready(), Keep, AgentReady, AsWanted})
	// A tainted node stays tainted until its kubelet has checked the pod.
	steps(t, untaint(), step{at(1, 1), stillTainted, ready(), Keep, MaybeRebooted, AsWanted},
		step{at(3, 0), stillTainted, ready(), Remove, AgentReady, ""})
	steps(t, untaint(), step{at(1, 1), stillTainted, readyAt(at(1, 0)), Remove, AgentReady, ""})
	d, _ := Decide(stillTainted, ready(), untaint(), Memory{}, at(1, 1))
	if !d.RecheckAt.Equal(at(3, 0)) || d.ConditionStatus != ConditionUnchanged {
		t.Errorf("again at %s, condition %q", d.RecheckAt, d.ConditionStatus)
	}
}

func TestDecide_UnreachableNode(t *testing.T) {
	gone := clean()
	gone.Ready, gone.ReadySince = false, at(1, 0)
	back := tainted()
	back.ReadySince = at(9, 0)
	steps(t, adding(),
		step{at(0, 0), clean(), ready(), Keep, AgentReady, AsWanted},
		step{at(1, 0), gone, unready(), Keep, AgentUnready, WithinGracePeriod},
		step{at(3, 0), gone, unready(), Add, AgentUnready, ""},
		// The kubelet keeps the earlier readiness, and the boot ID is the known one.
		step{at(9, 1), back, ready(), Remove, AgentReady, ""})
}

func TestReasons_Explained(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Reasons() {
		if seen[string(r)] || r.Sentence() == "" {
			t.Errorf("reason %q", r)
		}
		seen[string(r)] = true
	}
}

// TestDecide_Properties checks sequences of random changes of a node.
func TestDecide_Properties(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	policies := []Policy{untaint(), adding(), legacy()}
	for range 3000 {
		p := policies[random.IntN(len(policies))]
		p.GracePeriod = time.Duration(random.IntN(3)) * time.Minute
		n, m, now := clean(), Memory{}, at(0, 0)
		for range 12 {
			now = now.Add(time.Duration(random.IntN(150)) * time.Second)
			switch random.IntN(6) {
			case 0:
				n = again(n, now)
			case 1:
				n.Ready, n.ReadySince = !n.Ready, now
			case 2:
				n.Taints = append(slices.Clone(n.Taints), p.Taint)
			}
			pods := [][]Pod{nil}
			for range random.IntN(3) {
				pods[0] = append(pods[0], Pod{
					Ready: random.IntN(3) > 0, Terminating: random.IntN(4) == 0, Since: now.Add(-time.Duration(random.IntN(400)) * time.Second),
				})
			}
			var d Decision
			d, m = Decide(n, pods, p, m, now)
			check(t, n, pods, p, d, m, now)
			if d.Action == Add {
				n.Taints = append(slices.Clone(n.Taints), p.Taint)
			}
			if d.Action == Remove {
				n.Taints = slices.DeleteFunc(slices.Clone(n.Taints), p.Ours)
			}
			// One change is enough.
			if after, _ := Decide(n, pods, p, m, now); after.Action != Keep {
				t.Fatalf("after %+v: %+v", d, after)
			}
		}
	}
}

func check(t *testing.T, n Node, pods [][]Pod, p Policy, d Decision, m Memory, now time.Time) {
	t.Helper()
	living := slices.ContainsFunc(pods[0], func(p Pod) bool { return p.Ready && !p.Terminating })
	switch {
	case !slices.Contains(Reasons(), d.Reason), (d.Action == Keep) != (d.NoActionReason != ""):
		t.Fatalf("unknown values: %+v", d)
	case d.Action == Remove && (!d.Reason.Good() || !living):
		t.Fatalf("removed without a ready agent: %+v", d)
	case d.Action == Add && (d.Reason.Good() || !p.AddTaint || p.tainted(n)):
		t.Fatalf("added: %+v", d)
	case !d.RecheckAt.IsZero() && !d.RecheckAt.After(now):
		t.Fatalf("again in the past: %+v at %s", d, now)
	case p.RequireNodeReady && !n.Ready && d.Reason.Good():
		t.Fatalf("an unready node is ready: %+v", d)
	}
	// A decision that changes with time has a time to decide again.
	if d.RecheckAt.IsZero() {
		if later, _ := Decide(n, pods, p, m, now.Add(time.Hour)); later.Action != d.Action || later.ConditionStatus != d.ConditionStatus {
			t.Fatalf("it changes before RecheckAt: %+v, then %+v", d, later)
		}
	}
}
