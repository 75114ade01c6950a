package labtest

import (
	"errors"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Witness counts first packets at the ends of their way, even if the answer of the listener is lost. It identifies a packet by its
// source port: use FreshPort.
type Witness struct {
	l    *Fixture
	tb   testing.TB
	Sent map[uint16]bool
	// Pod, Peer and Guest have the destination ports of the packets that arrived there.
	Pod, Peer, Guest map[uint16][]uint16
}

// witness has two sets. A packet is added to the first one before all other rules, and to the second one where it is received. Hosts
// other than the pod have no rules, and may drop a packet that arrives from their own address: there the second set uses the first hook.
const witness = `table inet labtest-witness {
	set sent { type inet_service . inet_service; flags dynamic; size 65535; }
	set seen { type inet_service . inet_service; flags dynamic; size 65535; }
	chain out { type filter hook output priority -2147483648; meta l4proto { tcp, udp } add @sent { th sport . th dport }; }
	chain in { type filter hook HOOK; meta l4proto { tcp, udp } add @seen { th sport . th dport }; }
}
`

// Watch adds the witness's table to all namespaces of the fixture.
func (l *Fixture) Watch(tb testing.TB) *Witness {
	tb.Helper()
	for _, path := range []string{l.pod, l.peer, l.guest} {
		hook := "prerouting priority -2147483648"
		if path == l.pod {
			hook = "input priority 2147483647"
		}
		netnstest.Feed(tb, path, regexp.MustCompile("HOOK").ReplaceAllString(witness, hook), "nft", "-f", "-")
	}
	return &Witness{l: l, tb: tb}
}

var element = regexp.MustCompile(`(\d+) \. (\d+)`)

// Look reads the counts.
func (w *Witness) Look() {
	w.tb.Helper()
	read := func(path, set string) map[uint16][]uint16 {
		found := map[uint16][]uint16{}
		for _, m := range element.FindAllStringSubmatch(netnstest.Run(w.tb, path, "nft", "-nn", "list", "set", "inet", "labtest-witness", set), -1) {
			source, _ := strconv.ParseUint(m[1], 10, 16)
			destination, _ := strconv.ParseUint(m[2], 10, 16)
			found[uint16(source)] = append(found[uint16(source)], uint16(destination))
		}
		return found
	}
	w.Sent = map[uint16]bool{}
	for _, path := range []string{w.l.pod, w.l.peer, w.l.guest} {
		for port := range read(path, "sent") {
			w.Sent[port] = true
		}
	}
	w.Pod, w.Peer, w.Guest = read(w.l.pod, "seen"), read(w.l.peer, "seen"), read(w.l.guest, "seen")
}

// Acquaint tells all hosts their neighbours, so that a rule that drops neighbour discovery drops no other packets with it.
func (l *Fixture) Acquaint(tb testing.TB) {
	tb.Helper()
	type end struct{ path, link string }
	find := func(e end) (link netlink.Link) {
		err := netnstest.At(e.path).Do(func() (err error) {
			link, err = netlink.LinkByName(e.link)
			return err
		})
		check.OK(tb, err)
		return link
	}
	know := func(at, other end, places ...Place) {
		link, hardware := find(at).Attrs().Index, find(other).Attrs().HardwareAddr
		err := netnstest.At(at.path).Do(func() error {
			var errs []error
			for _, f := range l.Families {
				for _, p := range places {
					entry := netlink.Neigh{LinkIndex: link, State: netlink.NUD_PERMANENT, IP: net.IP(p.Addr(f).AsSlice()), HardwareAddr: hardware}
					errs = append(errs, netlink.NeighSet(&entry))
				}
			}
			return errors.Join(errs...)
		})
		check.OK(tb, err)
	}
	know(end{l.pod, "eth0"}, end{l.peer, "eth0"}, gateway, Peer, Resolver, OtherResolver)
	know(end{l.pod, "eth1"}, end{l.peer, "eth1"}, SideGateway, Side)
	know(end{l.pod, "vm0"}, end{l.guest, "eth0"}, Guest)
	know(end{l.peer, "eth0"}, end{l.pod, "eth0"}, Pod)
	know(end{l.peer, "eth1"}, end{l.pod, "eth1"}, PodSide)
	know(end{l.guest, "eth0"}, end{l.pod, "vm0"}, PodInside)
}

// Collect makes a set of addresses for iptables, like "ipset create", for each family of the addresses.
func (l *Fixture) Collect(tb testing.TB, name string, addresses ...netip.Addr) {
	tb.Helper()
	err := netnstest.At(l.pod).Do(func() error {
		family := uint8(netlink.FAMILY_V4)
		if addresses[0].Is6() {
			family = netlink.FAMILY_V6
		}
		if err := netlink.IpsetCreate(name, "hash:ip", netlink.IpsetCreateOptions{Family: family}); err != nil {
			return err
		}
		for _, a := range addresses {
			if err := netlink.IpsetAdd(name, &netlink.IPSetEntry{IP: net.IP(a.AsSlice())}); err != nil {
				return err
			}
		}
		return nil
	})
	check.OK(tb, err, "making the set", name)
}
