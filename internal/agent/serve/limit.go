package serve

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/time/rate"
)

// Bounds of a port's connections: those that wait for a request's header, and those that are being answered. Every pod that
// reaches the port can open connections, and each connection costs the agent a file descriptor and 20 to 40 KiB.
const (
	maxWaiting  = 512
	maxAnswered = 128
)

// The rate at which a port accepts connections per second, and the burst after a pause. Further connections wait in the kernel's
// backlog, by default 4096 connections or 0.7 s. So even with maxWaiting later ones, a connection has 75 ms to send its request.
const (
	acceptRate  = 6000
	acceptBurst = 64
)

// limit bounds the connections of a port and always admits a new one: it closes an older connection instead.
//
// Waiting connections cannot evict connections that are being answered, so a complete request gets its answer. In each group the
// address with most connections loses its oldest: a client that floods the port evicts its own connections. With many
// addresses, the accept rate gives a new connection its time.
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

// state is the server's ConnState hook. The server calls it for a new connection before it accepts the next, and for an active
// connection after a whole header.
func (l *limit) state(conn net.Conn, s http.ConnState) {
	if s == http.StateNew {
		_ = l.rate.Wait(context.Background()) // Background never ends: Wait returns with a token
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

// group is a list of connections, the oldest first.
type group struct {
	most  int
	conns []net.Conn
}

// add appends a connection. If the group is full, add closes the oldest connection of the address with most connections.
func (g *group) add(conn net.Conn) {
	if len(g.conns) >= g.most {
		bySource := map[netip.Addr]int{}
		for _, c := range g.conns {
			bySource[source(c)]++
		}
		victim := slices.MaxFunc(g.conns, func(a, b net.Conn) int { return cmp.Compare(bySource[source(a)], bySource[source(b)]) })
		if tcp, ok := victim.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // the kernel keeps no unread data
		}
		_ = victim.Close() // the connection is closed even with an error
		g.remove(victim)
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
