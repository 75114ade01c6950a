package taint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Lease is the lock that one replica holds, in the format of k8s.io/client-go/tools/leaderelection, so that a replica of
// another implementation can compete for it.
type Lease struct {
	Namespace, Name string
	// Identity is the identity of this replica; it must be unique.
	Identity string
	// Duration is the time for which other replicas respect the lease after its last observed renewal. The holder renews the
	// lease each Retry, and stops leading after Deadline without a renewal; Deadline must be shorter than Duration.
	Duration, Deadline, Retry time.Duration
}

// releaseTimeout bounds the release of the lease.
const releaseTimeout = 5 * time.Second

var errOtherHolder = errors.New("another replica has the lease")

// elect runs lead whenever this replica acquires the lease, for as long as it holds the lease, until ctx ends.
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

	// seen is the last observed lease, seenAt the time of its first observation. Only the local clock counts: the holder's
	// clock can be wrong.
	seen   kube.Lease
	seenAt time.Time
	// logged is the last logged state.
	logged string
}

// beat is the heartbeat of the election loop. Between two beats there is at most one pause and one request.
func (e *elector) beat() { e.options.Health.Beat(PartElection, e.lease.Deadline+e.lease.Retry) }

// acquire acquires a lease without a holder, or whose holder has not renewed it.
func (e *elector) acquire(ctx context.Context) bool {
	// The request must end before a renewal would be late.
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
		e.logState(ctx, "waiting for the lease", lease.Holder)
		return false
	}
	if lease.Exists() && lease.Holder != e.lease.Identity {
		lease.Transitions++
	}
	lease.Acquired = now
	if err := e.write(ctx, lease, e.lease.Identity, now); err != nil {
		if !kube.IsConflict(err) {
			e.onError(ctx, "the lease cannot be taken", err)
		}
		return false
	}
	return true
}

// write writes this replica as the holder from now on or, to release the lease, no holder and the shortest duration.
func (e *elector) write(ctx context.Context, lease kube.Lease, holder string, now time.Time) error {
	lease.Holder, lease.Duration, lease.Renewed = holder, e.lease.Duration, now
	if holder == "" {
		lease.Duration, lease.Acquired = time.Second, now
	}
	written, err := e.options.API.WriteLease(ctx, lease)
	if err == nil {
		e.seen, e.seenAt = written, now
	}
	return err
}

// hold runs lead and renews the lease until the lease is lost or ctx ends. It returns after lead.
func (e *elector) hold(ctx context.Context, lead func(context.Context)) {
	e.options.Health.Ready(PartElection)
	e.logState(ctx, "leading", e.lease.Identity)
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

// keep renews the lease until the renewals have failed for Deadline.
func (e *elector) keep(ctx context.Context) error {
	renewed := e.seenAt
	for {
		e.beat()
		e.options.sleep(ctx, e.lease.Retry)
		err := e.renew(ctx, renewed.Add(e.lease.Deadline))
		if err == nil {
			renewed = e.seenAt
			e.options.Health.Ready(PartElection)
			e.logState(ctx, "leading", e.lease.Identity)
			continue
		}
		if errors.Is(err, errOtherHolder) || ctx.Err() != nil || !e.options.Clock.Now().Before(renewed.Add(e.lease.Deadline)) {
			return err
		}
		e.onError(ctx, "the lease cannot be renewed", err)
	}
}

// renew writes the lease again, until a deadline. After the deadline, for example in a process that was stopped, it sends nothing.
func (e *elector) renew(ctx context.Context, until time.Time) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	left := until.Sub(e.options.Clock.Now())
	if left <= 0 {
		return fmt.Errorf("not renewed within %s", e.lease.Deadline)
	}
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	return e.rewrite(ctx, e.lease.Identity)
}

// rewrite writes the lease that this replica holds, for the holder. After a conflict it reads the lease: another client can have
// written it for another reason, or the last renewal has succeeded although its response timed out.
func (e *elector) rewrite(ctx context.Context, holder string) error {
	now := e.options.Clock.Now()
	err := e.write(ctx, e.seen, holder, now)
	if !kube.IsConflict(err) && (kube.ClassOf(err) != kube.NotFound || holder == "") {
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
	return e.write(ctx, lease, holder, now)
}

// release clears the holder, so that the next replica leads at once. This replica makes no changes after release.
func (e *elector) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	e.options.Health.Rest(PartElection)
	if err := e.rewrite(ctx, ""); err != nil && !errors.Is(err, errOtherHolder) {
		e.log.WarnContext(ctx, "the lease is not released: the next leader waits until it is over",
			slog.String("error", err.Error()))
		return
	}
	e.log.InfoContext(ctx, "the lease is released")
}

func (e *elector) onError(ctx context.Context, state string, err error) {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return
	}
	e.options.Health.NotReady(PartElection, state)
	if e.logState(ctx, state, string(kube.ClassOf(err))) {
		e.log.WarnContext(ctx, "election fails", slog.String("what", state), slog.String("error", err.Error()))
	}
}

// logState logs a new state with its detail, and reports whether it was new.
func (e *elector) logState(ctx context.Context, state, detail string) bool {
	if e.logged == state+detail {
		return false
	}
	e.logged = state + detail
	e.log.InfoContext(ctx, "election", slog.String("state", state), slog.String("holder", e.seen.Holder))
	return true
}
