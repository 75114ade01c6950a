// Package follow shows how real packets pass the rules of a pod's network namespace, with the reason of each rule that they
// match.
//
// It promises that a trace does not change the way of any packet, that nothing remains when the trace ends or is killed, and that its
// rate, memory and output are bounded whatever the pod sends. Where the kernel cannot trace (no nf_tables, or rules in legacy tables)
// it says so and shows the rules whose packet counters rise.
//
// Start at Run; packet.go assembles the kernel's events, counters.go has the counters.
package follow

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Record is one line of the agent's answer: an event, or as the last one why the trace failed. The events before it are complete.
type Record struct {
	document.TraceEvent

	Error string `json:"error,omitempty"`
}

// MaxPackets bounds a trace.
const MaxPackets = 1000

// Options select what to trace.
type Options struct {
	Subject string
	Filter  nftrace.Filter
	For     time.Duration
	// Now returns the current time.
	Now func() time.Time
}

// follower is a running trace.
type follower struct {
	Options

	space redirection.Namespace
	want  redirect.Wanted
	rules redirection.Traceable
	each  func(document.TraceEvent) error

	// blind reports that the trace cannot see packets.
	blind   bool
	open    []*packet
	answers map[flow]bool
	ticks   int
	// reread is the tick of the last reading of the rules, rereads the number of these readings.
	reread, rereads int
	counts          map[place]iptables.Count
	end             document.TraceEnd
}

// Run traces the packets of a namespace until the time is over, ctx ends or each returns an error. want explains the rules; if it is nil,
// Run infers it from the rules.
func Run(ctx context.Context, space redirection.Namespace, want redirect.Wanted, o Options, each func(document.TraceEvent) error) error {
	return run(ctx, space, want, o, nftrace.Open, each)
}

// run is Run with the kernel's trace, which some kernels lack.
func run(
	ctx context.Context, space redirection.Namespace, want redirect.Wanted, o Options, open func(nftrace.Filter) (*nftrace.Tracer, error),
	each func(document.TraceEvent) error,
) (err error) {
	if want == nil {
		if want, err = inspect.Inferred(ctx, &space); err != nil {
			return err
		}
	}
	f := &follower{Options: o, space: space, want: want, each: each, answers: map[flow]bool{}}
	if f.rules, err = space.Traceable(ctx, want); err != nil {
		return err
	}
	tracer, err := netns.In(space.NetNS, func() (*nftrace.Tracer, error) { return open(o.Filter) })
	note := ""
	switch {
	case errors.Is(err, nftrace.ErrUnsupported):
		f.blind = true
		note = fmt.Sprintf("%v; this trace shows only the counters of rules in legacy tables", err)
	case err != nil:
		return err
	case f.rules.Legacy:
		note = "the kernel does not trace rules of legacy tables; their counters are shown as well"
	}
	if note != "" {
		all, err := space.LegacyCounts(ctx)
		if err != nil {
			return errors.Join(err, tracer.Close())
		}
		_ = f.count(all, false) // the first reading shows no rule
	}
	begin := document.TraceBegin{Subject: o.Subject, Packets: packetsText(o.Filter), Until: o.Now().Add(o.For), Note: note}
	if err := each(document.TraceEvent{Begin: &begin}); err != nil {
		return errors.Join(err, tracer.Close())
	}
	return f.follow(ctx, tracer)
}

// packetsText describes the packets that a filter selects.
func packetsText(f nftrace.Filter) string {
	text := "the first packet of each TCP connection and UDP packets"
	if f.Source.IsValid() {
		text += " from " + address(f.Source)
	}
	if f.Destination.IsValid() {
		text += " to " + address(f.Destination)
	}
	if f.Port != 0 {
		text += fmt.Sprintf(" with destination port %d", f.Port)
	}
	return text
}

// hint returns advice for a trace without packets.
func (f *follower) hint() string {
	if f.end.Packets > 0 || f.end.Counted > 0 {
		return ""
	}
	if f.blind {
		return "no counter of a rule rose"
	}
	return "no packet was seen: connections that were already open are not shown; reconnect the client, and check that its name " +
		"resolves to the traced address and that it runs in this pod"
}

const (
	// tick is the time between two checks for packets without further events; quiet is the number of ticks to wait.
	tick  = 100 * time.Millisecond
	quiet = 2
	// countEach is the number of ticks between two readings of counters. A reading starts processes.
	countEach = 20
	// waiting bounds the queue of events. The kernel has a larger queue, and drops events when that is full.
	waiting = 1024
)

// errEnough ends a trace at MaxPackets.
var errEnough = fmt.Errorf("%d packets were seen", MaxPackets)

// follow handles events until the trace ends, and then shows the result. It closes the tracer, which may be nil.
func (f *follower) follow(ctx context.Context, tracer *nftrace.Tracer) error {
	ctx, cancel := context.WithTimeout(ctx, f.For)
	defer cancel()
	events, done := make(chan *nftrace.Event, waiting), make(chan error, 1)
	queue := func(e *nftrace.Event) {
		select {
		case events <- e:
		case <-ctx.Done():
		}
	}
	go func() {
		var err error
		if tracer != nil {
			err = tracer.Run(ctx, func(e nftrace.Event) { queue(&e) }, func() { queue(nil) })
		} else {
			<-ctx.Done()
		}
		done <- errors.Join(err, tracer.Close())
	}()
	err := f.loop(ctx, events)
	cancel()
	traceErr := <-done
	if err == nil {
		err = f.flush(0)
	}
	f.end.Reason = "the time is over"
	switch {
	case errors.Is(err, errEnough):
		f.end.Reason = err.Error()
	case err != nil:
		return errors.Join(err, traceErr)
	case errors.Is(context.Cause(ctx), context.Canceled):
		f.end.Reason = "it was interrupted"
	case !errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		f.end.Reason = context.Cause(ctx).Error()
	}
	failed := errors.Join(f.last(ctx), traceErr)
	if failed == nil {
		f.end.Hint = f.hint()
	}
	return errors.Join(failed, f.each(document.TraceEvent{End: &f.end}))
}

// emit counts a record and passes it on.
func (f *follower) emit(r document.TraceEvent) error {
	f.end.Add(r)
	return f.each(r)
}

// last reads the counters a final time, even after an error or an interrupt.
func (f *follower) last(ctx context.Context) error {
	if f.counts == nil {
		return nil
	}
	const limit = 5 * time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	all, err := f.space.LegacyCounts(ctx)
	if err != nil {
		return err
	}
	return f.count(all, true)
}

// loop handles events and ticks until ctx ends, and then the queued events. A nil event means that the kernel dropped some.
func (f *follower) loop(ctx context.Context, events <-chan *nftrace.Event) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			for err == nil && len(events) > 0 {
				err = f.event(ctx, <-events)
			}
			return err
		case e := <-events:
			err = f.event(ctx, e)
		case <-ticker.C:
			err = f.onTick(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// onTick ends the packets without further events and reads the counters every countEach ticks.
func (f *follower) onTick(ctx context.Context) error {
	f.ticks++
	err := f.flush(quiet)
	if err == nil && f.counts != nil && f.ticks%countEach == 0 {
		if all, failed := f.space.LegacyCounts(ctx); failed == nil { // the last reading has what this one does not
			err = f.count(all, true)
		}
	}
	return err
}
