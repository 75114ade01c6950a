package auditor

import (
	"context"
	"errors"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/kube"
)

const (
	// duty is elapsed time divided by inspection time: inspections take at most one percent of a core.
	duty = 100
	// burst is the inspection time without pauses: simultaneous faults of some pods are found at once, and the pods of a full
	// node soon after the agent's start.
	burst = 500 * time.Millisecond
	// slow is the longest inspection time that is counted, so that one slow pod does not delay the others for long. A slower
	// inspection is repeated less often instead.
	slow = 100 * time.Millisecond
	// maxChecks bounds concurrent inspections for requests. Together with a scheduled inspection they leave one worker for race
	// repair.
	maxChecks = 2
)

// schedule inspects the pods that are due, one at a time, until ctx ends.
func (a *Auditor) schedule(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-a.Pods.Synced():
	}
	for ctx.Err() == nil {
		k, at := a.nextDue()
		if wait := at.Sub(a.Env.Clock.Now()); at.IsZero() || wait > 0 {
			a.idle(ctx, at, wait)
			continue
		}
		took, err := a.InspectNext(ctx, k, false)
		if err == nil && took > 0 {
			a.Env.Sleep(ctx, a.pauseAfter(took))
		}
	}
}

// newBudget returns a token bucket of inspection time, in microseconds.
func newBudget(duty int64, burst time.Duration) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(time.Second.Microseconds()/duty), int(burst.Microseconds()))
}

// pauseAfter returns the pause after an inspection.
func (a *Auditor) pauseAfter(took time.Duration) time.Duration {
	now := a.Env.Clock.Now()
	return a.budget.ReserveN(now, int(min(took, slow).Microseconds())).DelayFrom(now)
}

// idle waits until at, the time of the next inspection, or until a turn may have changed it. A zero at is never.
func (a *Auditor) idle(ctx context.Context, at time.Time, wait time.Duration) {
	var due <-chan time.Time
	if !at.IsZero() {
		timer := a.Env.Clock.NewTimer(wait)
		defer timer.Stop()
		due = timer.C()
	}
	select {
	case <-ctx.Done():
	case <-due:
	case <-a.wake:
	}
}

// nextDue returns the next pod to inspect and when, or a zero time if no pod is audited.
func (a *Auditor) nextDue() (first types.NamespacedName, at time.Time) {
	a.Pods.Each(func(p kube.Pod, m *Memory) {
		if !m.due.IsZero() && (at.IsZero() || m.due.Before(at)) {
			first, at = p.Key(), m.due
		}
	})
	return first, at
}

// errEnded means that the controller ends.
var errEnded = errors.New("the node agent ends")

// ErrNoPod means that the node has no pod with that name.
var ErrNoPod = errors.New("no such pod on this node")

// InspectNext has a worker inspect a pod, and returns the duration. forced is set for a user's request.
func (a *Auditor) InspectNext(ctx context.Context, k types.NamespacedName, forced bool) (took time.Duration, err error) {
	var done <-chan struct{}
	if !a.Pods.Get(k, func(kube.Pod, *Memory) { done = a.request(k, forced) }) {
		return 0, ErrNoPod
	}
	a.Pods.Enqueue(k)
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-a.ended:
		return 0, errEnded
	case <-done:
	}
	there := a.Pods.Get(k, func(_ kube.Pod, m *Memory) {
		if took = m.took; forced {
			took = m.asked
		}
	})
	if !there {
		return 0, ErrNoPod
	}
	return took, nil
}

// request requests an inspection of a pod. The channel is closed when the inspection has ended.
func (a *Auditor) request(k types.NamespacedName, forced bool) <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.requested[k]
	if r == nil {
		r = &request{done: make(chan struct{})}
		a.requested[k] = r
	}
	r.forced = r.forced || forced
	return r.done
}

// Inspect inspects a pod now, for a request, and returns its status. A pod without a network has an empty state.
func (a *Auditor) Inspect(ctx context.Context, by Way, k types.NamespacedName) (s audit.Status, err error) {
	took, err := a.InspectNext(ctx, k, true)
	if err != nil {
		return s, err
	}
	a.Charge(by, took)
	if !a.Pods.Get(k, func(p kube.Pod, m *Memory) { s = m.named(p) }) {
		return s, ErrNoPod
	}
	return s, nil
}
