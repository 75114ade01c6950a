package serve

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/time/rate"
)

// How many connections a port has at a time: those from which a request's header is still to come, and those that are
// answered. Whoever reaches the port can open them, and each costs the agent a file descriptor and 20 to 40 KiB.
const (
	maxWaiting  = 512
	maxAnswered = 128
)

// How many connections a port takes per second, and at once after a rest. The others wait in the kernel, which has 4096 of
// them by default: for 0.7 s. So even when maxWaiting come after it, a connection has 75 ms to send its request.
const (
	acceptRate  = 6000
	acceptBurst = 64
)

// limit bounds the connections of a port and lets a new one in always: another one gives way.
//
// Connections that wait cannot push out those that are answered, so a request that came in whole gets its answer. In each
// group it is the address with most connections that loses its oldest: a client that floods the port pushes out itself. With
// many addresses the rate is what gives a newcomer its time.
type limit struct {
	rate *rate.Limiter

	mu                sync.Mutex
	waiting, answered group
}

func newLimit() *limit {
	return &limit{
		rate: rate.NewLimiter(acceptRate, acceptBurst), waiting: newGroup(maxWaiting), answered: newGroup(maxAnswered),
	}
}

// state is the server's hook: it is called for a new connection before the next is accepted, and for an active one when a
// whole header has come.
func (l *limit) state(conn net.Conn, s http.ConnState) {
	if s == http.StateNew {
		_ = l.rate.Wait(context.Background()) // which ends by itself
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting.remove(conn)
	l.answered.remove(conn)
	switch s {
	case http.StateNew, http.StateIdle:
		l.waiting.add(conn)
	case http.StateActive:
		l.answered.add(conn)
	case http.StateHijacked, http.StateClosed:
	}
}

// group is connections, the oldest first.
type group struct {
	most     int
	conns    []member
	bySource map[netip.Addr]int
}

type member struct {
	net.Conn

	source netip.Addr
}

func newGroup(most int) group { return group{most: most, bySource: map[netip.Addr]int{}} }

// add takes a connection in, if need be in place of another one.
func (g *group) add(conn net.Conn) {
	if len(g.conns) >= g.most {
		at, most := 0, 0
		for i, m := range g.conns {
			if n := g.bySource[m.source]; n > most {
				at, most = i, n
			}
		}
		cut(g.conns[at].Conn)
		g.removeAt(at)
	}
	m := member{Conn: conn}
	if tcp, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		m.source = tcp.AddrPort().Addr()
	}
	g.conns = append(g.conns, m)
	g.bySource[m.source]++
}

// cut ends a connection without waiting, as Close does, for a write that hangs: its server closes it when it finds out. What
// was sent and is not read is thrown away.
func cut(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		_ = conn.Close()
		return
	}
	_ = tcp.SetLinger(0)
	_ = tcp.CloseRead()
	_ = tcp.CloseWrite()
}

func (g *group) remove(conn net.Conn) {
	if at := slices.IndexFunc(g.conns, func(m member) bool { return m.Conn == conn }); at >= 0 {
		g.removeAt(at)
	}
}

func (g *group) removeAt(at int) {
	source := g.conns[at].source
	if g.bySource[source]--; g.bySource[source] == 0 {
		delete(g.bySource, source)
	}
	g.conns = slices.Delete(g.conns, at, at+1)
}
