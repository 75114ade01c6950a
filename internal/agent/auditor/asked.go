package auditor

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Way is how a request reaches the agent. The inspections for each way have a budget of their own, so that users of the port leave
// the operator's commands theirs.
type Way string

const (
	// Socket is the unix socket, which is root's.
	Socket Way = "socket"
	// Port is the introspection port, which any process can use that reaches the loopback address. A request there never becomes one to
	// the API server.
	Port Way = "port"
)

const (
	// askedDuty is the ratio of the time to that of the inspections for one way: half a percent of a core.
	askedDuty = 2 * duty
	// The time of inspections after a calm time: some checks of a full node and, in the half that is left for them, of single pods.
	socketBurst = 2 * time.Second
	portBurst   = time.Second
	// patience is the time that a request waits for its budget, which a single user does not notice and a loop does.
	patience = 2 * time.Second
	// sharedFor is the age of a result that answers a request of the port.
	sharedFor = time.Second
)

// checkTimeout bounds the inspection of all pods for one request.
const checkTimeout = time.Minute

// ErrAsked is the cause for a request whose way has used up its budget.
var ErrAsked = errors.New("too many requests: the agent inspects pods for half a percent of the time; ask again in some seconds")

func newAsked() map[Way]*rate.Limiter {
	return map[Way]*rate.Limiter{Socket: newBudget(askedDuty, socketBurst), Port: newBudget(askedDuty, portBurst)}
}

// lacking returns the time until a way has so much of its budget, in microseconds, 0 if it has.
func (a *Auditor) lacking(by Way, least int) time.Duration {
	budget := a.asked[by]
	if lacks := float64(least) - budget.TokensAt(a.Env.Clock.Now()); lacks >= 1 {
		return time.Duration(lacks / float64(budget.Limit()) * float64(time.Second))
	}
	return 0
}

// admit waits for so much of a way's budget, in microseconds, and reports whether there is.
func (a *Auditor) admit(ctx context.Context, by Way, least int) bool {
	if wait := a.lacking(by, least); wait > 0 {
		a.Env.Sleep(ctx, min(wait, patience))
	}
	return ctx.Err() == nil && a.lacking(by, least) == 0
}

// Charge counts an inspection for a request. It delays the schedule as one of the schedule does, in all by the pause after a slow one.
func (a *Auditor) Charge(by Way, took time.Duration) {
	now, n := a.Env.Clock.Now(), int(min(took, slow).Microseconds())
	a.asked[by].ReserveN(now, n)
	room := int(float64(slow.Microseconds()) + a.budget.TokensAt(now))
	a.budget.ReserveN(now, max(0, min(n, room)))
}

// Admit waits until a request may inspect one pod; done ends that.
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
	if a.lacking(by, 0) > 0 { // the requests ahead have used it
		done()
		return nil, ErrAsked
	}
	return done, nil
}

// check inspects a pod for a request about all pods when it is its turn, if it was not inspected since a time.
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

// CheckAll inspects all pods of the mesh, maxChecks at a time. Requests at the same time share the inspections. If half of the
// way's budget is used up, the error is ErrAsked and the pods keep their last results.
func (a *Auditor) CheckAll(ctx context.Context, by Way) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	since := a.Env.Clock.Now()
	if by == Port {
		since = since.Add(-sharedFor)
	}
	if !a.admit(ctx, by, a.asked[by].Burst()/2) {
		return ErrAsked
	}
	var work sync.WaitGroup
	keys := make(chan types.NamespacedName)
	for range maxChecks {
		work.Go(func() {
			for k := range keys {
				a.check(ctx, by, k, since)
			}
		})
	}
	for _, k := range a.Pods.Keys() {
		if ctx.Err() != nil {
			break
		}
		keys <- k
	}
	close(keys)
	work.Wait()
	return nil
}

// checkedBefore reports whether the pod is inspected at all, and was not inspected since a time.
func (a *Auditor) checkedBefore(k types.NamespacedName, since time.Time) (before bool) {
	a.Pods.Get(k, func(_ kube.Pod, m *Memory) { before = !m.due.IsZero() && m.status.Checked.Before(since) })
	return before
}
