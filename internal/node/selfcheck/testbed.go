package selfcheck

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// testbed is the namespace of a pod and that of a peer, linked by a veth pair. The addresses are those for documentation
// (RFC 5737, RFC 3849); no interface has that of outside.
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

// link makes the veth pair. The route is last: it needs the carrier that a pair has when both ends are up.
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

// up switches an interface on and gives it addresses, IPv6 ones without duplicate address detection, which takes seconds.
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
