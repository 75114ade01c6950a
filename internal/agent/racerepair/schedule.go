package racerepair

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

const (
	// duty is the ratio of the time to that of the inspections in it: one percent of a core.
	duty = 100
	// burst is the time of inspections that need no pauses between them: faults of some pods at a time are found at once, and the
	// pods of a full node soon after the agent's start.
	burst = 500 * time.Millisecond
	// slow is the time from which on an inspection is a slow one. It counts as much in the pause after it, so that one pod does not
	// delay the others for long, and is repeated seldom instead.
	slow = 100 * time.Millisecond
	// maxChecks bounds the inspections at a time that requests have caused. With the one of the schedule, one worker is left for
	// race repair.
	maxChecks = 2
)

// processes are those of the node's pods.
type processes struct {
	mu              sync.Mutex
	byPod           map[string][]sandbox.Process // by pod UID
	listed, scanned time.Time                    // the begin of a complete list, and the end
	took            time.Duration
}

// schedule inspects the pods that are due, one at a time, until ctx ends. A pod has no timer of its own.
func (c *controller) schedule(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-c.synced:
	}
	for ctx.Err() == nil {
		k, at := c.nextDue()
		if wait := at.Sub(c.Clock.Now()); at.IsZero() || wait > 0 {
			c.idle(ctx, at, wait)
			continue
		}
		took, err := c.inspectNext(ctx, k, false)
		if err == nil && took > 0 {
			c.sleep(ctx, c.pauseAfter(took))
		}
	}
}

// newBudget returns a limit of inspections, in microseconds of their time.
func newBudget(duty int64, burst time.Duration) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(time.Second.Microseconds()/duty), int(burst.Microseconds()))
}

// pauseAfter returns the pause after an inspection.
func (c *controller) pauseAfter(took time.Duration) time.Duration {
	now := c.Clock.Now()
	return c.budget.ReserveN(now, int(min(took, slow).Microseconds())).DelayFrom(now)
}

// idle waits until a pod is due or one has become so; at is zero if none is.
func (c *controller) idle(ctx context.Context, at time.Time, wait time.Duration) {
	var due <-chan time.Time
	if !at.IsZero() {
		timer := c.Clock.NewTimer(wait)
		defer timer.Stop()
		due = timer.C()
	}
	select {
	case <-ctx.Done():
	case <-due:
	case <-c.wake:
	}
}

// nextDue returns the pod that is due first, the zero time if there is none.
func (c *controller) nextDue() (first types.NamespacedName, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range c.pods {
		if due := e.audited.due; !due.IsZero() && (at.IsZero() || due.Before(at)) {
			first, at = k, due
		}
	}
	return first, at
}

// errEnded means that the controller ends.
var errEnded = errors.New("the node agent ends")

// ErrNoPod means that the node has no pod of that name.
var ErrNoPod = errors.New("no such pod on this node")

// inspectNext has a worker inspect a pod, and returns the duration. A forced inspection is for a request.
func (c *controller) inspectNext(ctx context.Context, k types.NamespacedName, forced bool) (time.Duration, error) {
	c.mu.Lock()
	e := c.pods[k]
	if e == nil {
		c.mu.Unlock()
		return 0, ErrNoPod
	}
	done := make(chan struct{})
	e.waiting, e.forced = append(e.waiting, done), e.forced || forced
	c.mu.Unlock()
	c.queue.Add(k)
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-c.ended:
		return 0, errEnded
	case <-done:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.pods[k]; e == nil {
		return 0, ErrNoPod
	}
	if forced {
		return e.audited.asked, nil
	}
	return e.audited.took, nil
}

// inspected inspects a pod now, for a request, and returns its status, without a state for a pod that has no network or ends.
func (c *controller) inspected(ctx context.Context, by Way, k types.NamespacedName) (audit.Status, error) {
	took, err := c.inspectNext(ctx, k, true)
	if err != nil {
		return audit.Status{}, err
	}
	c.charge(by, took)
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[k]
	if e == nil {
		return audit.Status{}, ErrNoPod
	}
	return named(e), nil
}

// check inspects a pod for a request about all pods when it is its turn, if it was not inspected since a time.
func (c *controller) check(ctx context.Context, by Way, k types.NamespacedName, since time.Time) {
	select {
	case c.checks <- struct{}{}:
		defer func() { <-c.checks }()
	case <-ctx.Done():
		return
	}
	if c.checkedBefore(k, since) {
		_, _ = c.inspected(ctx, by, k) // a pod may be gone; the others have their own state
	}
}

// checkAll inspects all pods of the mesh, maxChecks at a time. Requests at the same time share the inspections. If half of the
// way's budget is used up, the pods keep their last results.
func (c *Controller) checkAll(ctx context.Context, by Way) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	since := c.Clock.Now()
	if by == Port {
		since = since.Add(-sharedFor)
	}
	if !c.admit(ctx, by, c.asked[by].Burst()/2) {
		return
	}
	var work sync.WaitGroup
	keys := make(chan types.NamespacedName)
	for range maxChecks {
		work.Go(func() {
			for k := range keys {
				c.check(ctx, by, k, since)
			}
		})
	}
	for _, k := range c.keys() {
		if ctx.Err() != nil {
			break
		}
		keys <- k
	}
	close(keys)
	work.Wait()
}

// checkedBefore reports whether the pod is inspected at all, and was not inspected since a time.
func (c *controller) checkedBefore(k types.NamespacedName, since time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[k]
	return e != nil && !e.audited.due.IsZero() && e.audited.status.Checked.Before(since)
}

// inspectable reports whether a pod has a network of its own that can be inspected.
func inspectable(p kube.Pod) bool {
	return !podOf(p).Ended && !p.Deleting && len(p.Addresses) > 0
}

// unchanged reports whether the pod is still the one of the job, with the same addresses, and has not begun to end.
func (j *job) unchanged() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := j.pods[j.pod.Key()]
	return e != nil && e.pod.Facts.UID == j.pod.Facts.UID && inspectable(e.pod) && sameAddresses(e.pod, j.pod)
}
