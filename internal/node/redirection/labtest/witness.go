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

// Witness counts first packets at the ends of their way, which a listener does not see if its answer is lost. A packet is known by
// its source port: use FreshPort.
type Witness struct {
	l    *Fixture
	tb   testing.TB
	Sent map[uint16]bool
	// Pod, Peer and Guest have the destination ports with which packets arrived there.
	Pod, Peer, Guest map[uint16][]uint16
}

// witness has two sets. A packet gets into the first one ahead of all other rules, into the second where it is received. Nothing but the
// pod has rules, and its kernel may drop a packet as one from itself if it receives one from its own address: there the first
// hook counts.
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

// Look reads what has been counted.
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

// Acquaint gives all hosts their neighbours, so that no rule that drops the search for these drops other packets as well.
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
	know(end{l.pod, "eth1"}, end{l.peer, "eth1"}, sideGateway, Side)
	know(end{l.pod, "vm0"}, end{l.guest, "eth0"}, Guest)
	know(end{l.peer, "eth0"}, end{l.pod, "eth0"}, Pod)
	know(end{l.peer, "eth1"}, end{l.pod, "eth1"}, PodSide)
	know(end{l.guest, "eth0"}, end{l.pod, "vm0"}, PodInside)
}

// Collect makes a set of addresses for iptables, as "ipset create" does, for each family that the addresses are of.
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
