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
// answered. Every pod that reaches the port can open them, and each costs the agent a file descriptor and 20 to 40 KiB.
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
		rate: rate.NewLimiter(acceptRate, acceptBurst), waiting: group{most: maxWaiting}, answered: group{most: maxAnswered},
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
	most  int
	conns []net.Conn
}

// add takes a connection in. If the group is full, the oldest one of the address with most of them gives way.
func (g *group) add(conn net.Conn) {
	if len(g.conns) >= g.most {
		bySource := map[netip.Addr]int{}
		for _, c := range g.conns {
			bySource[source(c)]++
		}
		victim, most := 0, 0
		for i, c := range g.conns {
			if n := bySource[source(c)]; n > most {
				victim, most = i, n
			}
		}
		reset(g.conns[victim])
		g.conns = slices.Delete(g.conns, victim, victim+1)
	}
	g.conns = append(g.conns, conn)
}

func (g *group) remove(conn net.Conn) {
	if at := slices.Index(g.conns, conn); at >= 0 {
		g.conns = slices.Delete(g.conns, at, at+1)
	}
}

func source(conn net.Conn) netip.Addr {
	if tcp, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr()
	}
	return netip.Addr{}
}

// reset ends a connection without waiting, as Close does, for a write that hangs: its server closes it when it finds out.
// What was sent and is not read is thrown away.
func reset(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		_ = conn.Close()
		return
	}
	_ = tcp.SetLinger(0)
	_ = tcp.CloseRead()
	_ = tcp.CloseWrite()
}
