package selfcheck

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// Ports of the sidecar (all are the reference's defaults) and of the questions.
const (
	outboundPort = 15001
	inboundPort  = 15006
	dnsPort      = 15053
	webPort      = 80
	namePort     = 53
)

// packets sends what an app and its clients send, and looks where it comes out. Whoever tests is no proxy: its user and
// group are others.
func (s *scene) packets(ctx context.Context, mode redirect.Mode) error {
	return errors.Join(
		s.connect(ctx, "a connection of the app to the outside", s.pod, s.elsewhere, outboundPort, false),
		s.connect(ctx, "a connection of a client to the app", s.peer, s.podAt, inboundPort, mode == redirect.TPROXY),
		s.query(ctx),
	)
}

// connect opens a connection from one of the places, and holds that the listener in the pod gets it and is told where it was going.
func (s *scene) connect(ctx context.Context, what string, from *netns.Namespace, to netip.Addr, listen uint16, transparent bool) error {
	listener, err := s.socket(s.pod, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer closeSocket(listener)
	if transparent {
		level, option := unix.SOL_IP, unix.IP_TRANSPARENT
		if s.family == ruleset.IPv6 {
			level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		if err = unix.SetsockoptInt(listener, level, option, 1); err != nil {
			return fmt.Errorf("making a transparent socket: %w", err)
		}
	}
	if err = s.serve(listener, listen); err != nil {
		return err
	}
	if err = unix.Listen(listener, 1); err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	client, err := s.socket(from, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer closeSocket(client)
	if err = unix.Connect(client, s.address(to, webPort)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return fmt.Errorf("%s is refused at once: %w", what, err)
	}
	if !readable(ctx, listener) {
		return fmt.Errorf("%s does not come out at port %d", what, listen)
	}
	accepted, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("accepting %s: %w", what, err)
	}
	defer closeSocket(accepted)
	return s.wasGoing(what, accepted, netip.AddrPortFrom(to, webPort), transparent)
}

// wasGoing holds that the proxy would know the original destination: with TPROXY it is the connection's own address, else
// the kernel is asked (SO_ORIGINAL_DST, linux/netfilter_ipv4.h and linux/netfilter_ipv6/ip6_tables.h).
func (s *scene) wasGoing(what string, connection int, want netip.AddrPort, transparent bool) error {
	const soOriginalDst = 80
	var got netip.AddrPort
	switch {
	case transparent:
		name, err := unix.Getsockname(connection)
		if err != nil {
			return fmt.Errorf("asking where %s was going: %w", what, err)
		}
		got = addrPort(name)
	case s.family == ruleset.IPv6:
		// A struct sockaddr_in6 comes back, which this type begins with.
		info, err := unix.GetsockoptIPv6MTUInfo(connection, unix.SOL_IPV6, soOriginalDst)
		if err != nil {
			return fmt.Errorf("asking where %s was going: %w", what, err)
		}
		port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, info.Addr.Port))
		got = netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr), port)
	default:
		// A struct sockaddr_in: family, port in network order, address.
		in, err := unix.GetsockoptIPv6Mreq(connection, unix.SOL_IP, soOriginalDst)
		if err != nil {
			return fmt.Errorf("asking where %s was going: %w", what, err)
		}
		got = netip.AddrPortFrom(netip.AddrFrom4([4]byte(in.Multiaddr[4:8])), binary.BigEndian.Uint16(in.Multiaddr[2:4]))
	}
	if got != want {
		return fmt.Errorf("%s was going to %s, and the proxy is told %s", what, want, got)
	}
	return nil
}

// query sends a question to a name server, and holds that the agent's resolver gets it.
func (s *scene) query(ctx context.Context) error {
	const what = "a DNS query of the app"
	resolver, err := s.socket(s.pod, unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer closeSocket(resolver)
	if err = s.serve(resolver, dnsPort); err != nil {
		return err
	}
	app, err := s.socket(s.pod, unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer closeSocket(app)
	if err := unix.Sendto(app, []byte("?"), 0, s.address(s.elsewhere, namePort)); err != nil {
		return fmt.Errorf("sending %s: %w", what, err)
	}
	if !readable(ctx, resolver) {
		return fmt.Errorf("%s does not come out at port %d", what, dnsPort)
	}
	return nil
}

// socket is one of a place, which never blocks.
func (s *scene) socket(at *netns.Namespace, kind int) (fd int, err error) {
	domain := unix.AF_INET
	if s.family == ruleset.IPv6 {
		domain = unix.AF_INET6
	}
	err = at.Do(func() (err error) {
		fd, err = unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("making a socket: %w", err)
	}
	return fd, nil
}

// serve binds a socket to a port of all addresses.
func (s *scene) serve(fd int, port uint16) error {
	everywhere := netip.IPv4Unspecified()
	if s.family == ruleset.IPv6 {
		everywhere = netip.IPv6Unspecified()
	}
	// Connections of the question before may still be ending.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("binding port %d: %w", port, err)
	}
	if err := unix.Bind(fd, s.address(everywhere, port)); err != nil {
		return fmt.Errorf("binding port %d: %w", port, err)
	}
	return nil
}

func (s *scene) address(a netip.Addr, port uint16) unix.Sockaddr {
	if s.family == ruleset.IPv6 {
		return &unix.SockaddrInet6{Port: int(port), Addr: a.As16()}
	}
	return &unix.SockaddrInet4{Port: int(port), Addr: a.As4()}
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch in := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port)) //nolint:gosec // a port
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(in.Addr), uint16(in.Port)) //nolint:gosec // a port
	}
	return netip.AddrPort{}
}

// Waiting for a packet, which takes microseconds where it comes at all.
const (
	wait   = 2 * time.Second
	glance = 50 * time.Millisecond
)

func readable(ctx context.Context, fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // a file descriptor
	for range int(wait / glance) {
		n, err := unix.Poll(poll, int(glance.Milliseconds()))
		if n > 0 || ctx.Err() != nil || err != nil && !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
	return false
}

func closeSocket(fd int) { _ = unix.Close(fd) }
