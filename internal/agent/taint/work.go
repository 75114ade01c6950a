package taint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

// settle makes a node what it should be. An error is a change that is to be tried again, after a time that the API server
// may have asked for.
func (t *term) settle(ctx context.Context, name string) (wait time.Duration, err error) {
	state, decision, known := t.decide(ctx, name)
	if !known {
		return 0, nil
	}
	if !decision.RecheckAt.IsZero() {
		t.queue.AddAfter(name, decision.RecheckAt.Sub(t.options.Clock.Now()))
	}
	after, err := t.change(ctx, state, decision)
	if err == nil {
		after, err = t.publish(ctx, after, decision)
	}
	t.took(after)
	if err == nil {
		t.mu.Lock()
		t.settled(name)
		t.mu.Unlock()
	}
	if ctx.Err() != nil || kube.ClassOf(err) == kube.NotFound {
		return 0, nil //nolint:nilerr // nobody is left to try again, or the node is gone, as the watch is about to say
	}
	if failed, ok := errors.AsType[*kube.Error](err); ok {
		wait = min(failed.RetryAfter, t.options.MaxRetry)
	}
	return wait, err
}

// decide gives the node as it is known and what to do about it. It is known once everything is.
func (t *term) decide(ctx context.Context, name string) (kube.NodeState, readiness.Decision, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[name]
	if n == nil || !t.complete {
		return kube.NodeState{}, readiness.Decision{}, false
	}
	decision, memory := readiness.Decide(n.state.Node, t.podsOn(name), t.policy, n.memory, t.options.Clock.Now())
	before, decided := n.decision, n.decided
	n.memory, n.decision, n.decided = memory, decision, true
	t.options.Metrics.SetNodeReason(string(before.Reason), string(decision.Reason))
	t.options.Metrics.Decided(string(decision.Reason))
	if !decided || before.Action != decision.Action || before.Reason != decision.Reason || before.NoActionReason != decision.NoActionReason {
		t.options.Log.LogAttrs(ctx, level(decision), "decided", slog.String("node", name),
			slog.String("action", string(decision.Action)), slog.String("reason", string(decision.Reason)),
			slog.String("requirement", decision.Requirement), slog.String("hold", string(decision.NoActionReason)))
	}
	if decision.Reason == readiness.NoAgent {
		t.warnOfNone(ctx)
	}
	return n.state, decision, true
}

// level keeps the many nodes that are as they should be out of the log.
func level(d readiness.Decision) slog.Level {
	if d.Reason.Good() && d.Action == readiness.Keep {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// podsOn gives the pods on a node by requirement. It needs the lock.
func (t *term) podsOn(name string) [][]readiness.Pod {
	var all [][]readiness.Pod
	for _, requirement := range t.policy.Requirements {
		var here []readiness.Pod
		for _, s := range sourcesOf(requirement) {
			if set := t.sources[s]; set != nil {
				for _, pod := range set.onNode[name] {
					here = append(here, pod)
				}
			}
		}
		all = append(all, here)
	}
	return all
}

// warnOfNone says that a requirement picks no pod at all: somebody looks in a wrong namespace. It needs the lock.
func (t *term) warnOfNone(ctx context.Context) {
	for _, requirement := range t.policy.Requirements {
		count := 0
		var sets []*podSet
		for _, s := range sourcesOf(requirement) {
			if set := t.sources[s]; set != nil {
				count += set.count
				sets = append(sets, set)
			}
		}
		for _, set := range sets {
			if count == 0 && !set.warned {
				t.options.Log.WarnContext(ctx,
					"no pod meets the requirement on any node: are namespace and selector those of the agent?",
					slog.Any("namespaces", requirement.Namespaces), slog.String("selector", requirement.Selector))
			}
			set.warned = count == 0
			if count == 0 {
				break
			}
		}
	}
}

// change adds or removes the taint. It gives the node as it is then.
func (t *term) change(ctx context.Context, state kube.NodeState, d readiness.Decision) (kube.NodeState, error) {
	var put *readiness.Taint
	drop := func(readiness.Taint) bool { return false }
	kind := metrics.TaintAdded
	switch d.Action {
	case readiness.Keep:
		return state, nil
	case readiness.Add:
		put = &t.options.Policy.Taint
	case readiness.Remove:
		drop, kind = t.options.Policy.Ours, metrics.TaintRemoved
	}
	after, sent, err := t.options.API.PatchTaints(ctx, state, put, drop)
	if !sent && err == nil {
		return after, nil
	}
	t.counted(ctx, state.Name, kind, err)
	if err != nil {
		return state, err
	}
	text, event, reason := "taint removed", kube.EventNormal, eventUntainted
	if d.Action == readiness.Add {
		text, event, reason = "taint added", kube.EventWarning, eventTainted
	}
	t.options.Log.InfoContext(ctx, "node changed", slog.String("node", state.Name), slog.String("change", string(kind)),
		slog.String("taint", t.options.Policy.Taint.Key), slog.String("reason", string(d.Reason)))
	t.options.event(kube.NodeRef(state.Name), event, reason,
		fmt.Sprintf("%s (%s): %s", text, t.options.Policy.Taint.Key, d.Reason.Sentence()))
	return after, nil
}

// publish sets the node condition, if there is one to set.
func (t *term) publish(ctx context.Context, state kube.NodeState, d readiness.Decision) (kube.NodeState, error) {
	if t.options.Condition == "" || d.ConditionStatus == readiness.ConditionUnchanged {
		return state, nil
	}
	want := kube.NodeCondition{
		Type: t.options.Condition, Status: "False", Reason: string(d.Reason), Message: d.Reason.Sentence(),
	}
	if d.ConditionStatus == readiness.ConditionTrue {
		want.Status = "True"
	}
	after, sent, err := t.options.API.PatchCondition(ctx, state, want, t.options.Clock.Now())
	if sent {
		t.counted(ctx, state.Name, metrics.ConditionSet, err)
	}
	return after, err
}

// counted tells how a change ended.
func (t *term) counted(ctx context.Context, name string, kind metrics.TaintChange, err error) {
	class := kube.ClassOf(err)
	switch {
	case err == nil:
		t.options.Metrics.Changed(kind, metrics.ChangeDone)
		t.allowed()
	case kube.IsConflict(err):
		t.options.Metrics.Changed(kind, metrics.ChangeConflict)
		t.options.Log.DebugContext(ctx, "somebody else changed the node", slog.String("node", name),
			slog.String("error", err.Error()))
	case ctx.Err() != nil:
	default:
		t.options.Metrics.Changed(kind, metrics.ChangeFailed)
		t.options.Log.WarnContext(ctx, "the node was not changed", slog.String("node", name), slog.String("change", string(kind)),
			slog.String("error", err.Error()))
		if class == kube.Forbidden || class == kube.Unauthorized {
			t.refused(name, err)
		}
	}
}

// allowed and refused say whether changes of nodes are allowed, once they were not.
func (t *term) allowed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.forbidden) > 0 {
		clear(t.forbidden)
		t.options.Health.Ready(PartWrites)
	}
}

// settled says that nothing is due at a node any more. It needs the lock.
func (t *term) settled(name string) {
	if t.forbidden[name] {
		delete(t.forbidden, name)
		if len(t.forbidden) == 0 {
			t.options.Health.Ready(PartWrites)
		}
	}
}

func (t *term) refused(name string, why error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forbidden[name] = true
	t.options.Health.NotReady(PartWrites, "changes of nodes are refused: "+why.Error())
}

// took makes the outcome of a change what is known of the node, unless the watch was faster.
func (t *term) took(after kube.NodeState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[after.Name]; n != nil && n.state.Before(after) {
		n.state = after
	}
}
