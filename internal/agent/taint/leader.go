package taint

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Lease is the lock that one replica holds. It is written as k8s.io/client-go/tools/leaderelection writes it, so that a
// replica of another make can be a candidate for the same one.
type Lease struct {
	Namespace, Name string
	// Identity is this replica's, of which there must be no second one.
	Identity string
	// Duration is for how long others respect the lease after they saw it renewed. The holder renews it each Retry, and
	// gives up when that has not worked for Deadline, which must be shorter.
	Duration, Deadline, Retry time.Duration
}

// releaseTimeout bounds giving the lease back.
const releaseTimeout = 5 * time.Second

var errOtherHolder = errors.New("another replica has the lease")

// elect runs lead whenever the lease can be had, and for as long as it can be kept, until ctx ends.
func elect(ctx context.Context, o Options, lead func(context.Context)) {
	e := &elector{options: o, lease: *o.Lease, log: o.Log.With("lease", o.Lease.Namespace+"/"+o.Lease.Name)}
	for ctx.Err() == nil {
		e.beat()
		if e.acquire(ctx) {
			e.hold(ctx, lead)
			continue
		}
		e.options.sleep(ctx, e.lease.Retry)
	}
}

type elector struct {
	options Options
	lease   Lease
	log     *slog.Logger

	// seen is the lease as it was last, seenAt when it became so. What counts is our own clock: that of the holder may be
	// wrong.
	seen   kube.Lease
	seenAt time.Time
	// logged is the last logged state.
	logged string
}

// beat says that the election goes round. Between two beats there is a pause and a request at most.
func (e *elector) beat() { e.options.Health.Beat(PartElection, e.lease.Deadline+e.lease.Retry) }

// acquire takes a lease that has no holder, or whose holder has not renewed it.
func (e *elector) acquire(ctx context.Context) bool {
	// Nothing of the request may be under way when a renewal would already be late.
	ctx, cancel := context.WithTimeout(ctx, e.lease.Deadline)
	defer cancel()
	now := e.options.Clock.Now()
	lease, err := e.options.API.Lease(ctx, e.lease.Namespace, e.lease.Name)
	if err != nil {
		e.onError(ctx, "the lease cannot be read", err)
		return false
	}
	if !lease.Same(e.seen) || e.seenAt.IsZero() {
		e.seen, e.seenAt = lease, now
	}
	if lease.Exists() && lease.Holder != "" && lease.Holder != e.lease.Identity && now.Before(e.seenAt.Add(lease.Duration)) {
		e.options.Health.Ready(PartElection)
		e.say(ctx, "waiting for the lease", lease.Holder)
		return false
	}
	if lease.Exists() && lease.Holder != e.lease.Identity {
		lease.Transitions++
	}
	lease.Acquired = now
	if err := e.write(ctx, lease, now); err != nil {
		if !kube.IsConflict(err) {
			e.onError(ctx, "the lease cannot be taken", err)
		}
		return false
	}
	return true
}

// write makes the lease ours from now on.
func (e *elector) write(ctx context.Context, lease kube.Lease, now time.Time) error {
	lease.Holder, lease.Duration, lease.Renewed = e.lease.Identity, e.lease.Duration, now
	written, err := e.options.API.WriteLease(ctx, lease)
	if err == nil {
		e.seen, e.seenAt = written, now
	}
	return err
}

// hold lets lead work and renews the lease until it is lost or ctx ends. When it returns lead has ended.
func (e *elector) hold(ctx context.Context, lead func(context.Context)) {
	e.options.Health.Ready(PartElection)
	e.say(ctx, "leading", e.lease.Identity)
	term, end := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		lead(term)
	}()
	err := e.keep(ctx)
	end()
	<-ended
	if ctx.Err() != nil {
		e.release(ctx)
		return
	}
	e.options.standby()
	e.onError(ctx, "the lease is lost", err)
}

// keep renews until that has not worked for too long.
func (e *elector) keep(ctx context.Context) error {
	renewed := e.seenAt
	for {
		e.beat()
		e.options.sleep(ctx, e.lease.Retry)
		err := e.renew(ctx, renewed.Add(e.lease.Deadline))
		if err == nil {
			renewed = e.seenAt
			e.options.Health.Ready(PartElection)
			e.say(ctx, "leading", e.lease.Identity)
			continue
		}
		if errors.Is(err, errOtherHolder) || ctx.Err() != nil || !e.options.Clock.Now().Before(renewed.Add(e.lease.Deadline)) {
			return err
		}
		e.onError(ctx, "the lease cannot be renewed", err)
	}
}

// renew writes the lease again. Whoever else wrote it meanwhile may have done so for another reason.
func (e *elector) renew(ctx context.Context, until time.Time) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	now := e.options.Clock.Now()
	ctx, cancel := context.WithTimeout(ctx, max(until.Sub(now), time.Millisecond))
	defer cancel()
	err := e.write(ctx, e.seen, now)
	if !kube.IsConflict(err) && kube.ClassOf(err) != kube.NotFound {
		return err
	}
	lease, err := e.options.API.Lease(ctx, e.lease.Namespace, e.lease.Name)
	if err != nil {
		return err
	}
	if lease.Exists() && lease.Holder != e.lease.Identity {
		e.seen, e.seenAt = lease, now
		return errOtherHolder
	}
	if !lease.Exists() {
		lease.Acquired, lease.Transitions = e.seen.Acquired, e.seen.Transitions
	}
	return e.write(ctx, lease, now)
}

// release lets the next replica begin at once. Nothing is done in the name of the lease any more.
func (e *elector) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	e.options.Health.Rest(PartElection)
	err := e.clear(ctx, e.seen)
	if kube.IsConflict(err) {
		// The answer to the last renewal may be what was given up.
		var now kube.Lease
		if now, err = e.options.API.Lease(ctx, e.lease.Namespace, e.lease.Name); err == nil && now.Holder == e.lease.Identity {
			err = e.clear(ctx, now)
		}
	}
	if err != nil {
		e.log.WarnContext(ctx, "the lease is not released: the next leader waits until it is over",
			slog.String("error", err.Error()))
		return
	}
	e.log.InfoContext(ctx, "the lease is released")
}

// clear writes a lease without a holder and with the shortest duration.
func (e *elector) clear(ctx context.Context, lease kube.Lease) error {
	now := e.options.Clock.Now()
	lease.Holder, lease.Duration, lease.Renewed, lease.Acquired = "", time.Second, now, now
	_, err := e.options.API.WriteLease(ctx, lease)
	return err
}

func (e *elector) onError(ctx context.Context, what string, err error) {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return
	}
	e.options.Health.NotReady(PartElection, what)
	if e.say(ctx, what, string(kube.ClassOf(err))) {
		e.log.WarnContext(ctx, "election fails", slog.String("what", what), slog.String("error", err.Error()))
	}
}

// say logs what is new.
func (e *elector) say(ctx context.Context, what, who string) bool {
	if e.logged == what+who {
		return false
	}
	e.logged = what + who
	e.log.InfoContext(ctx, "election", slog.String("state", what), slog.String("holder", e.seen.Holder))
	return true
}
