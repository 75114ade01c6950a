package selfcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probe"
)

// Ports of the called services.
const (
	webPort  = 80
	namePort = 53
)

// arrival bounds the wait for a packet. A packet that arrives takes microseconds.
const arrival = 2 * time.Second

// packets sends the packets of an app and its clients, and checks that they arrive at the sidecar's ports. The sockets have
// the user and group of this process, which differ from the proxy's.
func (b *testbed) packets(ctx context.Context) error {
	web := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, webPort) }
	return errors.Join(
		b.connect(ctx, "a connection of the app to the outside", b.pod, web(b.outside), redirect.OutboundPort),
		b.connect(ctx, "a connection of a client to the app", b.peer, web(b.podIP), redirect.InboundPort),
		b.query(ctx),
	)
}

// connect opens a connection and checks that a listener in the pod accepts it with its original destination. Like the proxy's
// under TPROXY, the listener accepts connections to any address; IPv6 uses the same option of SOL_IP.
func (b *testbed) connect(ctx context.Context, what string, from *netns.Namespace, to netip.AddrPort, port uint16) error {
	ctx, cancel := context.WithTimeout(ctx, arrival)
	defer cancel()
	listener, err := netns.In(b.pod, func() (net.Listener, error) {
		return probe.ListenConfig([2]int{unix.SOL_IP, unix.IP_TRANSPARENT}).Listen(ctx, "tcp", b.anyAddress(port))
	})
	if err != nil {
		return err
	}
	defer listener.Close() //nolint:errcheck // nothing was written
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	client, err := dial(ctx, from, "tcp", to)
	if err != nil {
		return missing(ctx, what, port, err)
	}
	defer client.Close() //nolint:errcheck // nothing was written
	conn, err := listener.Accept()
	if err != nil {
		return missing(ctx, what, port, err)
	}
	defer conn.Close()                                              //nolint:errcheck // nothing was written
	original, err := probe.OriginalDestination(conn.(*net.TCPConn)) //nolint:forcetypeassert // the listener is a TCP listener
	if err != nil {
		return fmt.Errorf("reading the original destination of %s: %w", what, err)
	}
	if original != to {
		return fmt.Errorf("%s was sent to %s, but the proxy reads %s", what, to, original)
	}
	return nil
}

// missing is the error for a packet that did not arrive at its port.
func missing(ctx context.Context, what string, port uint16, err error) error {
	return fmt.Errorf("%s did not arrive at port %d: %w", what, port, errors.Join(context.Cause(ctx), err))
}

// query sends a query to a name server and checks that the agent's resolver gets it.
func (b *testbed) query(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, arrival)
	defer cancel()
	resolver, err := netns.In(b.pod, func() (net.PacketConn, error) {
		return probe.ListenConfig().ListenPacket(ctx, "udp", b.anyAddress(redirect.DNSPort))
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
		return missing(ctx, "a DNS query of the app", redirect.DNSPort, err)
	}
	return nil
}

// anyAddress returns the port on all addresses of the testbed's family.
func (b *testbed) anyAddress(port uint16) string {
	if b.podIP.Is6() {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port).String()
	}
	return netip.AddrPortFrom(netip.IPv4Unspecified(), port).String()
}

// dial opens a socket in a namespace: for a single address, package net opens it on the calling thread.
func dial(ctx context.Context, from *netns.Namespace, network string, to netip.AddrPort) (net.Conn, error) {
	return netns.In(from, func() (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, network, to.String()) })
}

// testbed has the namespaces of a pod and of a peer, linked by a veth pair. The addresses are reserved for documentation
// (RFC 5737, RFC 3849); no interface has the address outside.
type testbed struct {
	pod, peer              *netns.Namespace
	podIP, peerIP, outside netip.Addr
}

func newTestbed(f ruleset.Family) (*testbed, error) {
	podIP, peerIP, outside := "192.0.2.2/24", "192.0.2.1/24", "198.51.100.7"
	if f == ruleset.IPv6 {
		podIP, peerIP, outside = "2001:db8::2/64", "2001:db8::1/64", "2001:db8:1::7"
	}
	inPod, inPeer := netip.MustParsePrefix(podIP), netip.MustParsePrefix(peerIP)
	b := &testbed{podIP: inPod.Addr(), peerIP: inPeer.Addr(), outside: netip.MustParseAddr(outside)}
	var err error
	if b.pod, err = netns.New(); err != nil {
		return nil, err
	}
	if b.peer, err = netns.New(); err != nil {
		b.pod.Close()
		return nil, err
	}
	if err := b.link(inPod, inPeer); err != nil {
		b.close()
		return nil, fmt.Errorf("linking two namespaces: %w", err)
	}
	return b, nil
}

// link makes the veth pair. It adds the route last because that needs the carrier of a pair with both ends up.
func (b *testbed) link(podIP, peerIP netip.Prefix) error {
	err := b.pod.Do(func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "eth0", PeerNamespace: netlink.NsFd(b.peer.FD())}
		veth.Name = "eth0"
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("adding a veth pair: %w", err)
		}
		if err := up("lo"); err != nil {
			return err
		}
		return up("eth0", podIP)
	})
	if err == nil {
		err = b.peer.Do(func() error { return up("eth0", peerIP) })
	}
	if err == nil {
		err = b.pod.Do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: b.peerIP.AsSlice()}) })
	}
	return err
}

// up switches an interface on and adds addresses, IPv6 ones without duplicate address detection, which takes seconds.
func up(name string, addresses ...netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("switching interface %q on: %w", name, err)
	}
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a.String())
		if err != nil {
			return err
		}
		address.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, address); err != nil {
			return fmt.Errorf("adding address %s to interface %q: %w", a, name, err)
		}
	}
	return nil
}

func (b *testbed) close() {
	b.pod.Close()
	b.peer.Close()
}
