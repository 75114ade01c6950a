package unixsock

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"
)

// The wait after a connection could not be accepted: there are no file descriptors left, say.
const (
	firstRetry = 5 * time.Millisecond
	lastRetry  = time.Second
)

// gate lets in whom it may, and not too many at a time.
//
// When all places are taken, the connection that has had its place for longest loses it, unless that is not long yet:
// an honest client is done within milliseconds, so it is those who hang that go. Meanwhile others wait in the kernel's
// queue, where they cost the agent nothing.
type gate struct {
	allowed []uint32
	limit   int
	grace   time.Duration
	now     func() time.Time
	trouble Trouble

	mu   sync.Mutex
	open []*place // the longest first
	left chan struct{}
}

func newGate(o Options) *gate {
	return &gate{
		allowed: append(slices.Clone(o.AllowedUIDs), 0), limit: o.Connections, grace: o.Grace, now: o.Now, trouble: o.Trouble,
		left: make(chan struct{}, 1),
	}
}

// place is a connection that was let in.
type place struct {
	net.Conn

	gate  *gate
	since time.Time
}

// Close gives the place back.
func (p *place) Close() error {
	p.gate.leave(p)
	return p.Conn.Close()
}

func (g *gate) leave(p *place) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if at := slices.Index(g.open, p); at >= 0 {
		g.open = slices.Delete(g.open, at, at+1)
		select {
		case g.left <- struct{}{}:
		default:
		}
	}
}

// guard returns a listener that hands out only connections that are let in, and fails only when it is closed.
func (g *gate) guard(ctx context.Context, s *socket) net.Listener {
	return &guarded{UnixListener: s.listener, ctx: ctx, gate: g}
}

type guarded struct {
	*net.UnixListener

	ctx  context.Context //nolint:containedctx // Accept has none
	gate *gate
}

// Accept waits for a connection that may be let in.
func (l *guarded) Accept() (net.Conn, error) {
	retry := firstRetry
	for {
		conn, err := l.AcceptUnix()
		switch {
		case err == nil:
			retry = firstRetry
			if l.gate.mayEnter(conn) {
				if p := l.gate.enter(l.ctx, conn); p != nil {
					return p, nil
				}
			}
			_ = conn.Close() // a stranger, or the end of the agent
		case errors.Is(err, net.ErrClosed):
			return nil, err
		default:
			l.gate.trouble.CannotAccept(err)
			if !pause(l.ctx, retry) {
				return nil, net.ErrClosed
			}
			retry = min(2*retry, lastRetry)
		}
	}
}

// mayEnter asks the kernel who it is.
func (g *gate) mayEnter(conn *net.UnixConn) bool {
	who, err := peer(conn)
	if err != nil {
		return false // it is gone
	}
	if !slices.Contains(g.allowed, who.Uid) {
		g.trouble.Stranger(who.Uid)
		return false
	}
	return true
}

// enter gives the connection a place, if need be another's. It returns nil when ctx ends before there is one.
func (g *gate) enter(ctx context.Context, conn net.Conn) *place {
	for {
		p, wait := g.tryEnter(conn)
		if p != nil {
			return p
		}
		timer := time.NewTimer(wait)
		select {
		case <-g.left:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// tryEnter gives the connection a place, or says how long the next may be kept by who has it.
func (g *gate) tryEnter(conn net.Conn) (*place, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	if len(g.open) >= g.limit {
		oldest := g.open[0]
		if wait := g.grace - now.Sub(oldest.since); wait > 0 {
			return nil, wait
		}
		g.open = slices.Delete(g.open, 0, 1)
		_ = oldest.Conn.Close() // its server finds out
		g.trouble.Slow()
	}
	p := &place{Conn: conn, gate: g, since: now}
	g.open = append(g.open, p)
	return p, 0
}
