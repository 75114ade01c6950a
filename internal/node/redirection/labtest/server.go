package labtest

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/probe"
)

// Service is one socket that answers requests.
type Service struct {
	// By is the name in its answers.
	By  string
	Via Protocol
	At  netip.AddrPort
	// Transparent sockets accept connections to addresses of other machines (TPROXY).
	Transparent bool
	// Redirected: clients connect to another address than At. The service answers with the original destination.
	Redirected bool
	// Onward returns the request that passes on a received one; nil passes none on.
	Onward func(Hop) Request
}

// server answers on several sockets.
type server struct {
	actor Actor
	done  sync.WaitGroup
}

// Serve opens the sockets as the actor, and answers until the test ends. All sockets are open when it returns.
func Serve(tb testing.TB, a Actor, services ...Service) {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	s := &server{actor: a}
	tb.Cleanup(func() { cancel(); s.done.Wait() })
	for _, service := range services {
		if err := s.open(ctx, service); err != nil {
			tb.Fatalf("listening as %s on %s %s: %v", a, service.Via, service.At, err)
		}
	}
}

func (s *server) open(ctx context.Context, service Service) error {
	// Multipath TCP is off: it hides accepted sockets from the owner match, and the original destination.
	config := net.ListenConfig{Control: socketOptions{service.Transparent, s.actor.Mark != 0, s.actor.Mark}.control}
	config.SetMultipathTCP(false)
	network := Request{Via: service.Via, To: service.At}.network()
	if service.Via == UDP {
		conn, err := open(s.actor, func() (net.PacketConn, error) { return config.ListenPacket(ctx, network, service.At.String()) })
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = conn.Close() })
		s.done.Go(func() { s.datagrams(ctx, service, conn.(*net.UDPConn)) })
		return nil
	}
	listener, err := open(s.actor, func() (net.Listener, error) { return config.Listen(ctx, network, service.At.String()) })
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	// An accepted socket has the owner of the thread that accepts it.
	s.done.Go(func() { _ = s.actor.do(func() error { return s.connections(ctx, service, listener) }) })
	return nil
}

func (s *server) connections(ctx context.Context, service Service, listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		s.done.Go(func() {
			hangUp := func() { _ = conn.Close() }
			defer hangUp()
			defer context.AfterFunc(ctx, hangUp)()
			s.connection(ctx, service, conn.(*net.TCPConn))
		})
	}
}

func (s *server) connection(ctx context.Context, service Service, conn *net.TCPConn) {
	request, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return
	}
	hop := Hop{By: service.By, Dst: addrPort(conn.LocalAddr()), From: addrPort(conn.RemoteAddr())}
	if service.Redirected {
		if hop.Dst, err = probe.OriginalDestination(conn); err != nil {
			_, _ = io.WriteString(conn, Answer{Hops: []Hop{hop}, Err: err}.text())
			return
		}
	}
	_, _ = io.WriteString(conn, service.answer(ctx, hop, request))
}

func (s *server) datagrams(ctx context.Context, service Service, conn *net.UDPConn) {
	buf := make([]byte, 1<<12)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			// An ICMP error about an earlier answer.
			continue
		}
		request := string(buf[:n])
		hop := Hop{By: service.By, From: netip.AddrPortFrom(from.Addr().Unmap(), from.Port())}
		if !service.Redirected {
			hop.Dst = service.At
		}
		s.done.Go(func() {
			_, _ = conn.WriteToUDPAddrPort([]byte(service.answer(ctx, hop, request)), from)
		})
	}
}

// answer returns the service's own hop, and the further hops if the request is passed on.
func (s Service) answer(ctx context.Context, hop Hop, request string) string {
	answer := Answer{Hops: []Hop{hop}}
	if strings.TrimSpace(request) == requestThrough && s.Onward != nil {
		next := s.Onward(hop).Send(ctx)
		answer.Hops = append(answer.Hops, next.Hops...)
		answer.Err = next.Err
	}
	return answer.text()
}
