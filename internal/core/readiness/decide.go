package readiness

import (
	"slices"
	"time"
)

// Decide says what to do about a node. pods has the agent pods on the node for each requirement of the policy, in their
// order. The memory that comes out goes into the next decision about this node.
func Decide(n Node, pods [][]Pod, p Policy, m Memory, now time.Time) (Decision, Memory) {
	m = m.learn(n, now)
	d := verdict(n, pods, p, m, now)
	if d.Reason.Good() {
		m.trusted, m.unready = true, time.Time{}
		d.Standing, d.Action, d.Hold = StandsReady, Keep, InPlace
		if p.tainted(n) {
			d.Action, d.Hold = Remove, ""
		}
		return d, m
	}
	if m.unready.IsZero() {
		m.unready = now
	}
	patient := m.patience(n, p)
	d.Standing = StandsUnready
	switch {
	case d.Reason == MaybeRebooted:
		d.Standing = Undecided
	case now.Before(patient):
		d.Standing = Undecided
		d.Again = sooner(d.Again, patient)
	}
	d.Action, d.Hold = Keep, ""
	switch {
	case p.tainted(n):
		d.Hold = InPlace
	case p.Adding == NeverAdd:
		d.Hold = NoAdding
	case d.Reason == MaybeRebooted:
		d.Hold = Suspicion
	case now.Before(patient):
		d.Hold = Hysteresis
	default:
		d.Action = Add
	}
	return d, m
}

// patience is until when an unready node is left alone. There is none with a node of which all is known since it was
// made or rebooted, and that was never ready since.
func (m Memory) patience(n Node, p Policy) time.Time {
	young := m.unready.Sub(n.Created) < p.Hysteresis
	if !m.trusted && (m.boot.witnessed || young) {
		return time.Time{}
	}
	return m.unready.Add(p.Hysteresis)
}

// verdict says whether the node is ready: its reason, the requirement that is missed, and when that passes by itself.
func verdict(n Node, pods [][]Pod, p Policy, m Memory, now time.Time) Decision {
	if p.Node == NodeReadinessRequired && !n.Ready {
		return Decision{Reason: NodeUnready}
	}
	if len(p.Requirements) == 0 {
		return Decision{Reason: NothingRequired}
	}
	worst := Decision{Reason: AgentReady}
	for i, requirement := range p.Requirements {
		var here []Pod
		if i < len(pods) {
			here = pods[i]
		}
		best := m.best(n, here, p.Settle, now)
		best.Requirement = requirement.Name
		if weight(best.Reason) > weight(worst.Reason) {
			worst = best
		}
	}
	return worst
}

// best is what the pods of one requirement are good for: one that is ready is enough.
func (m Memory) best(n Node, pods []Pod, settle time.Duration, now time.Time) Decision {
	best := Decision{Reason: NoAgent}
	for _, pod := range pods {
		reason, again := AgentUnready, time.Time{}
		if pod.Ready && !pod.Leaving {
			reason, again = m.judge(n, pod, settle, now)
		}
		switch {
		case weight(reason) < weight(best.Reason):
			best.Reason, best.Again = reason, again
		case reason == best.Reason:
			best.Again = sooner(best.Again, again)
		}
	}
	return best
}

func weight(r Reason) int { return slices.Index(Reasons(), r) }

// sooner is the earlier of two times, of which the zero one means never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
