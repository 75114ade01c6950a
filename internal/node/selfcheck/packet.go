package selfcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probe"
)

// Ports of the services that are called.
const (
	webPort  = 80
	namePort = 53
)

// arrival bounds the wait for a packet, which takes microseconds if it arrives.
const arrival = 2 * time.Second

// packets sends the packets of an app and its clients, and checks at which of the sidecar's ports they arrive. The user and
// group of the sockets are those of this process, and so not the proxy's.
func (b *testbed) packets(ctx context.Context, mode redirect.Mode) error {
	web := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, webPort) }
	return errors.Join(
		b.connect(ctx, "a connection of the app to the outside", b.pod, web(b.outside), redirect.OutboundPort, false),
		b.connect(ctx, "a connection of a client to the app", b.peer, web(b.podIP), redirect.InboundPort, mode == redirect.TPROXY),
		b.query(ctx),
	)
}

// connect opens a connection and checks that a listener in the pod gets it, with its original destination.
func (b *testbed) connect(ctx context.Context, what string, from *netns.Namespace, to netip.AddrPort, port uint16, tproxy bool) error {
	ctx, cancel := context.WithTimeout(ctx, arrival)
	defer cancel()
	config := net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) error { return transparent(network, c, tproxy) }}
	config.SetMultipathTCP(false) // with which Linux 5.6 to 5.16 refuse transparent sockets
	listener, err := in(b.pod, func() (net.Listener, error) { return config.Listen(ctx, "tcp", b.every(port)) })
	if err != nil {
		return err
	}
	defer listener.Close() //nolint:errcheck // nothing was written
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	client, err := dial(ctx, from, "tcp", to)
	if err != nil {
		return fmt.Errorf("%s does not come out at port %d: %w", what, port, err)
	}
	defer client.Close() //nolint:errcheck // nothing was written
	conn, err := listener.Accept()
	if err != nil {
		return fmt.Errorf("%s does not come out at port %d: %w", what, port, errors.Join(context.Cause(ctx), err))
	}
	defer conn.Close()                                              //nolint:errcheck // nothing was written
	original, err := probe.OriginalDestination(conn.(*net.TCPConn)) //nolint:forcetypeassert // the listener is one of TCP
	if err != nil {
		return fmt.Errorf("asking where %s was going: %w", what, err)
	}
	if original != to {
		return fmt.Errorf("%s was going to %s, and the proxy reads %s", what, to, original)
	}
	return nil
}

// transparent lets a socket accept connections to any address.
func transparent(network string, c syscall.RawConn, wanted bool) error {
	if !wanted {
		return nil
	}
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if network == "tcp6" {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var err error
	failed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(failed, err)
}

// query sends a query to a name server and checks that the agent's resolver gets it.
func (b *testbed) query(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, arrival)
	defer cancel()
	resolver, err := in(b.pod, func() (net.PacketConn, error) {
		return (&net.ListenConfig{}).ListenPacket(ctx, "udp", b.every(redirect.DNSPort))
	})
	if err != nil {
		return err
	}
	defer resolver.Close() //nolint:errcheck // nothing was written
	defer context.AfterFunc(ctx, func() { _ = resolver.Close() })()
	app, err := dial(ctx, b.pod, "udp", netip.AddrPortFrom(b.outside, namePort))
	if err != nil {
		return err
	}
	defer app.Close() //nolint:errcheck // the datagram is sent
	if _, err = app.Write([]byte("?")); err == nil {
		_, _, err = resolver.ReadFrom(make([]byte, 1))
	}
	if err != nil {
		return fmt.Errorf("a DNS query of the app does not come out at port %d: %w", redirect.DNSPort, errors.Join(context.Cause(ctx), err))
	}
	return nil
}

// every is a port of all addresses of the testbed's family.
func (b *testbed) every(port uint16) string {
	if b.podIP.Is6() {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port).String()
	}
	return netip.AddrPortFrom(netip.IPv4Unspecified(), port).String()
}

func dial(ctx context.Context, from *netns.Namespace, network string, to netip.AddrPort) (net.Conn, error) {
	return in(from, func() (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, network, to.String()) })
}

// in opens a socket in a namespace: package net makes it on the calling thread, where there is one address to try.
func in[T any](n *netns.Namespace, open func() (T, error)) (socket T, err error) {
	err = n.Do(func() (err error) {
		socket, err = open()
		return err
	})
	return socket, err
}
