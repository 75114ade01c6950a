package taint

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

// reconcile brings a node to its desired state. After an error the caller retries.
func (t *leadership) reconcile(ctx context.Context, name string) error {
	state, decision, known := t.decide(ctx, name)
	if !known {
		return nil
	}
	if !decision.RecheckAt.IsZero() {
		t.queue.AddAfter(name, decision.RecheckAt.Sub(t.options.Clock.Now()))
	}
	after, err := t.change(ctx, state, decision)
	if err == nil {
		after, err = t.publish(ctx, after, decision)
	}
	t.observe(after)
	if err == nil {
		t.setRefused(name, nil)
	}
	if ctx.Err() != nil || kube.ClassOf(err) == kube.NotFound {
		return nil //nolint:nilerr // the controller ends, or the node is deleted and the watch is about to report the deletion
	}
	return err
}

// decide returns the cached node and the decision, and false for an unknown node or before all caches are synced.
func (t *leadership) decide(ctx context.Context, name string) (kube.NodeState, readiness.Decision, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[name]
	if n == nil || !t.complete {
		return kube.NodeState{}, readiness.Decision{}, false
	}
	decision, memory := readiness.Decide(n.state.Node, t.podsOn(name), t.policy, n.memory, t.options.Clock.Now())
	before := n.decision
	n.memory, n.decision = memory, decision
	t.options.Metrics.SetNodeReason(before.Reason, decision.Reason)
	t.options.Metrics.Decided(decision.Reason)
	if before.Action != decision.Action || before.Reason != decision.Reason || before.NoActionReason != decision.NoActionReason {
		level := slog.LevelInfo
		if decision.Reason.Good() && decision.Action == readiness.Keep { // most nodes are in their desired state
			level = slog.LevelDebug
		}
		t.options.Log.LogAttrs(ctx, level, "taint decision", slog.String("node", name),
			slog.String("action", string(decision.Action)), slog.String("reason", string(decision.Reason)),
			slog.String("requirement", decision.Requirement), slog.String("hold", string(decision.NoActionReason)))
	}
	if decision.Reason == readiness.NoAgent {
		t.warnOfNone(ctx)
	}
	return n.state, decision, true
}

// podsOn returns the pods on a node by requirement. It needs the lock.
func (t *leadership) podsOn(name string) [][]readiness.Pod {
	all := make([][]readiness.Pod, 0, len(t.required))
	for _, requirement := range t.required {
		var here []readiness.Pod
		for _, set := range requirement.sets {
			here = slices.AppendSeq(here, maps.Values(set.onNode[name]))
		}
		all = append(all, here)
	}
	return all
}

// warnOfNone logs once that a requirement selects no pod at all: its namespace or selector can be wrong. It needs the lock.
func (t *leadership) warnOfNone(ctx context.Context) {
	for _, requirement := range t.required {
		none := !slices.ContainsFunc(requirement.sets, func(set *podSet) bool { return len(set.onNode) > 0 })
		first := requirement.sets[0]
		if none && !first.warned {
			t.options.Log.WarnContext(ctx,
				"no pod meets the requirement on any node: do namespace and selector match the agent?",
				slog.Any("namespaces", requirement.Namespaces), slog.String("selector", requirement.Selector))
		}
		first.warned = none
	}
}

// change adds or removes the taint. It returns the node after the change.
func (t *leadership) change(ctx context.Context, state kube.NodeState, d readiness.Decision) (kube.NodeState, error) {
	put, drop := &t.options.Policy.Taint, func(readiness.Taint) bool { return false }
	kind, text, event, reason := metrics.TaintAdded, "taint added", kube.EventWarning, eventTainted
	switch d.Action {
	case readiness.Keep:
		return state, nil
	case readiness.Remove:
		put, drop = nil, t.options.Policy.Ours
		kind, text, event, reason = metrics.TaintRemoved, "taint removed", kube.EventNormal, eventUntainted
	case readiness.Add:
	}
	after, sent, err := t.options.API.PatchTaints(ctx, state, put, drop)
	if !sent && err == nil {
		return after, nil
	}
	t.counted(ctx, state.Name, kind, err)
	if err != nil {
		return state, err
	}
	t.options.Log.InfoContext(ctx, "node changed", slog.String("node", state.Name), slog.String("change", string(kind)),
		slog.String("taint", t.options.Policy.Taint.Key), slog.String("reason", string(d.Reason)))
	t.options.event(kube.NodeRef(state.Name), event, reason,
		fmt.Sprintf("%s (%s): %s", text, t.options.Policy.Taint.Key, d.Reason.Sentence()))
	return after, nil
}

// publish sets the node condition, if one is configured and decided.
func (t *leadership) publish(ctx context.Context, state kube.NodeState, d readiness.Decision) (kube.NodeState, error) {
	if t.options.Condition == "" || d.ConditionStatus == readiness.ConditionUnchanged {
		return state, nil
	}
	want := kube.Condition{
		Type: t.options.Condition, Status: string(d.ConditionStatus), Reason: string(d.Reason), Message: d.Reason.Sentence(),
	}
	after, sent, err := t.options.API.PatchCondition(ctx, state, want, t.options.Clock.Now())
	if sent {
		t.counted(ctx, state.Name, metrics.ConditionSet, err)
	}
	return after, err
}

// counted counts and logs the result of a change.
func (t *leadership) counted(ctx context.Context, name string, kind metrics.TaintChange, err error) {
	result := metrics.ChangeFailed
	switch {
	case err == nil:
		result = metrics.ChangeDone
	case kube.IsConflict(err):
		result = metrics.ChangeConflict
		t.options.Log.DebugContext(ctx, "another client changed the node", slog.String("node", name), slog.String("error", err.Error()))
	case ctx.Err() != nil:
		return
	default:
		t.options.Log.WarnContext(ctx, "the node was not changed", slog.String("node", name), slog.String("change", string(kind)),
			slog.String("error", err.Error()))
		if class := kube.ClassOf(err); class == kube.Forbidden || class == kube.Unauthorized {
			t.setRefused(name, err)
		}
	}
	t.options.Metrics.Changed(kind, result)
}

// setRefused records whether the API server refused the last change of a node for lack of permission, for PartWrites.
func (t *leadership) setRefused(name string, why error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case why != nil:
		t.forbidden[name] = true
		t.options.Health.NotReady(PartWrites, "changes of nodes are refused: "+why.Error())
	case t.forbidden[name]:
		delete(t.forbidden, name)
		if len(t.forbidden) == 0 {
			t.options.Health.Ready(PartWrites)
		}
	}
}

// observe stores the response to a change, unless the watch delivered a newer version. The response can contain changes of other
// clients, which the watch then delivers as known: so the node is evaluated again.
func (t *leadership) observe(after kube.NodeState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[after.Name]
	if n == nil || !n.state.Before(after) {
		return
	}
	n.state = after
	t.queue.Add(after.Name)
}
