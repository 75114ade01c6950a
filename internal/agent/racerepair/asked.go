package racerepair

import (
	"context"
	"errors"
	"time"

	"golang.org/x/time/rate"
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

// errAsked is the cause for a request whose way has used up its budget.
var errAsked = errors.New("too many requests: the agent inspects pods for half a percent of the time; ask again in some seconds")

func newAsked() map[Way]*rate.Limiter {
	return map[Way]*rate.Limiter{Socket: newBudget(askedDuty, socketBurst), Port: newBudget(askedDuty, portBurst)}
}

// lacking returns the time until a way has so much of its budget, in microseconds, 0 if it has.
func (c *controller) lacking(by Way, least int) time.Duration {
	budget := c.asked[by]
	if lacks := float64(least) - budget.TokensAt(c.Clock.Now()); lacks >= 1 {
		return time.Duration(lacks / float64(budget.Limit()) * float64(time.Second))
	}
	return 0
}

// admit waits for so much of a way's budget, in microseconds, and reports whether there is.
func (c *controller) admit(ctx context.Context, by Way, least int) bool {
	if wait := c.lacking(by, least); wait > 0 {
		c.sleep(ctx, min(wait, patience))
	}
	return ctx.Err() == nil && c.lacking(by, least) == 0
}

// charge counts an inspection for a request. It delays the schedule as one of the schedule does, in all by the pause after a slow one.
func (c *controller) charge(by Way, took time.Duration) {
	now, n := c.Clock.Now(), int(min(took, slow).Microseconds())
	c.asked[by].ReserveN(now, n)
	room := int(float64(slow.Microseconds()) + c.budget.TokensAt(now))
	c.budget.ReserveN(now, max(0, min(n, room)))
}

// turn waits until a request may inspect one pod; done ends that.
func (c *controller) turn(ctx context.Context, by Way) (done func(), err error) {
	if !c.admit(ctx, by, 0) {
		return nil, errAsked
	}
	select {
	case c.checks <- struct{}{}:
		done = func() { <-c.checks }
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if c.lacking(by, 0) > 0 { // the requests ahead have used it
		done()
		return nil, errAsked
	}
	return done, nil
}
