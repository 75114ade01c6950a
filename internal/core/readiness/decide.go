package readiness

import (
	"slices"
	"time"
)

// Decide returns the action for a node. pods has the agent pods on the node for each requirement, in the policy's order.
// The returned memory is for the next decision about this node.
func Decide(n Node, pods [][]Pod, p Policy, m Memory, now time.Time) (Decision, Memory) {
	m = m.learn(n, now)
	d := assess(n, pods, p, m, now)
	if d.Reason.Good() {
		m.trusted, m.unready = true, time.Time{}
		d.ConditionStatus, d.Action, d.NoActionReason = ConditionTrue, Keep, AsWanted
		if p.tainted(n) {
			d.Action, d.NoActionReason = Remove, ""
		}
		return d, m
	}
	if m.unready.IsZero() {
		m.unready = now
	}
	graceEnd := m.graceEnd(n, p)
	d.Action, d.ConditionStatus = Add, ConditionFalse
	switch {
	case d.Reason == MaybeRebooted:
		d.ConditionStatus, d.NoActionReason = ConditionUnchanged, RebootSuspected
	case now.Before(graceEnd):
		d.ConditionStatus, d.NoActionReason = ConditionUnchanged, WithinGracePeriod
		d.RecheckAt = sooner(d.RecheckAt, graceEnd)
	}
	switch {
	case p.tainted(n):
		d.NoActionReason = AsWanted
	case !p.AddTaint:
		d.NoActionReason = NoAdding
	}
	if d.NoActionReason != "" {
		d.Action = Keep
	}
	return d, m
}

// graceEnd returns the end of an unready node's grace period. A node that was observed since its creation or reboot, and was never
// ready since, has no grace period.
func (m Memory) graceEnd(n Node, p Policy) time.Time {
	young := m.unready.Sub(n.Created) < p.GracePeriod
	if !m.trusted && (m.boot.witnessed || young) {
		return time.Time{}
	}
	return m.unready.Add(p.GracePeriod)
}

// assess returns the readiness of the node with its reason, the unmet requirement, and the time of the next assessment.
func assess(n Node, pods [][]Pod, p Policy, m Memory, now time.Time) Decision {
	if p.RequireNodeReady && !n.Ready {
		return Decision{Reason: NodeUnready}
	}
	if len(p.Requirements) == 0 {
		return Decision{Reason: NothingRequired}
	}
	worst := Decision{Reason: AgentReady}
	for i, requirement := range p.Requirements {
		best := m.best(n, pods[i], p.Settle, now)
		best.Requirement = requirement.Name
		if weight(best.Reason) > weight(worst.Reason) {
			worst = best
		}
	}
	return worst
}

// best returns the assessment of a requirement's best pod: one ready pod is enough.
func (m Memory) best(n Node, pods []Pod, settle time.Duration, now time.Time) Decision {
	best := Decision{Reason: NoAgent}
	for _, pod := range pods {
		reason, again := AgentUnready, time.Time{}
		if pod.Ready && !pod.Terminating {
			reason, again = m.believe(n, pod, settle, now)
		}
		switch {
		case weight(reason) < weight(best.Reason):
			best.Reason, best.RecheckAt = reason, again
		case reason == best.Reason:
			best.RecheckAt = sooner(best.RecheckAt, again)
		}
	}
	return best
}

func weight(r Reason) int { return slices.Index(Reasons(), r) }

// sooner returns the earlier of two times; the zero time means never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
