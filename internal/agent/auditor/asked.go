package auditor

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Way is how a request reaches the agent. Each way has its own budget of inspections, so that users of the port cannot use up the
// operator's.
type Way string

const (
	// Socket is the unix socket, which only root can use.
	Socket Way = "socket"
	// Port is the introspection port, open to every process that reaches the loopback address. Its requests never cause one to the API
	// server.
	Port Way = "port"
)

const (
	// askedDuty is elapsed time divided by inspection time, per way: inspections take at most half a percent of a core.
	askedDuty = 2 * duty
	// The budget after an idle time: some checks of a full node, which leave half of it for single pods.
	socketBurst = 2 * time.Second
	portBurst   = time.Second
	// patience is how long a request waits for its budget. A single user does not notice it; a loop does.
	patience = 2 * time.Second
	// sharedFor is the maximum age of a result that answers a request on the port.
	sharedFor = time.Second
	// recent is the maximum age of results that answer a request about all pods whose budget is used up.
	recent = 10 * time.Second
)

// CheckTimeout bounds the inspection of all pods for one request.
const CheckTimeout = 45 * time.Second

// ErrAsked means that the request's way has used up its budget.
var ErrAsked = errors.New("too many requests: the agent inspects pods for half a percent of the time; ask again in some seconds")

func newAsked() map[Way]*rate.Limiter {
	return map[Way]*rate.Limiter{Socket: newBudget(askedDuty, socketBurst), Port: newBudget(askedDuty, portBurst)}
}

// lacking returns the time until a way's budget reaches least, in microseconds, or 0 if it already does.
func (a *Auditor) lacking(by Way, least int) time.Duration {
	budget := a.asked[by]
	if lacks := float64(least) - budget.TokensAt(a.Env.Clock.Now()); lacks >= 1 {
		return time.Duration(lacks / float64(budget.Limit()) * float64(time.Second))
	}
	return 0
}

// admit waits until a way's budget reaches least, in microseconds, and reports whether it does.
func (a *Auditor) admit(ctx context.Context, by Way, least int) bool {
	if wait := a.lacking(by, least); wait > 0 {
		a.Env.Sleep(ctx, min(wait, patience))
	}
	return ctx.Err() == nil && a.lacking(by, least) == 0
}

// Charge counts an inspection for a request. It delays the schedule like a scheduled one, in total by at most the pause after a slow
// one.
func (a *Auditor) Charge(by Way, took time.Duration) {
	now, n := a.Env.Clock.Now(), int(min(took, slow).Microseconds())
	a.asked[by].ReserveN(now, n)
	room := int(float64(slow.Microseconds()) + a.budget.TokensAt(now))
	a.budget.ReserveN(now, max(0, min(n, room)))
}

// Admit waits until a request may inspect one pod. The caller calls done after the inspection.
func (a *Auditor) Admit(ctx context.Context, by Way) (done func(), err error) {
	if !a.admit(ctx, by, 0) {
		return nil, ErrAsked
	}
	select {
	case a.checks <- struct{}{}:
		done = func() { <-a.checks }
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if a.lacking(by, 0) > 0 { // used up by the requests ahead
		done()
		return nil, ErrAsked
	}
	return done, nil
}

// check waits its turn and inspects a pod for a request about all pods, unless the pod was inspected after since.
func (a *Auditor) check(ctx context.Context, by Way, k types.NamespacedName, since time.Time) {
	select {
	case a.checks <- struct{}{}:
		defer func() { <-a.checks }()
	case <-ctx.Done():
		return
	}
	if a.checkedBefore(k, since) {
		_, _ = a.Inspect(ctx, by, k) // a pod may be gone; the others have their own state
	}
}

// CheckAll inspects all pods of the mesh, maxChecks at a time, and returns those that keep an older result, because CheckTimeout is over.
// Concurrent requests share the inspections. If the way has less than half of its budget, no pod is inspected, and results that are not
// recent are older ones.
func (a *Auditor) CheckAll(ctx context.Context, by Way) (left []types.NamespacedName) {
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	all, since := a.Pods.Keys(), a.Env.Clock.Now()
	if by == Port {
		since = since.Add(-sharedFor)
	}
	if a.admit(ctx, by, a.asked[by].Burst()/2) {
		workqueue.ParallelizeUntil(ctx, maxChecks, len(all), func(i int) { a.check(ctx, by, all[i], since) })
	} else {
		since = a.Env.Clock.Now().Add(-recent)
	}
	return slices.DeleteFunc(all, func(k types.NamespacedName) bool { return !a.checkedBefore(k, since) })
}

// checkedBefore reports whether the pod is audited and was last inspected before since.
func (a *Auditor) checkedBefore(k types.NamespacedName, since time.Time) (before bool) {
	a.Pods.Get(k, func(_ kube.Pod, m *Memory) { before = !m.due.IsZero() && m.status.Checked.Before(since) })
	return before
}
