// Package spectest makes Specs for tests of rules and of the packages that write and read rules.
//
// It promises that Random covers every setting that changes a rule, and returns the same Spec for the same seed. It never
// makes a Spec that redirect.Parse would refuse. Start at Random.
package spectest

import (
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Special returns Specs with rules that Random seldom draws.
func Special() map[string]redirect.Spec {
	out := map[string]redirect.Spec{}
	add := func(name string, set func(*redirect.Spec)) {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			s := redirect.Default()
			s.Mode = mode
			set(&s)
			out[name+", "+mode.String()] = s
		}
	}
	networks(add)
	extremes(add)
	return out
}

// Many yields the special Specs and random ones, the same in every run. Each has a name for messages.
func Many(random uint64) iter.Seq2[string, redirect.Spec] {
	return func(yield func(string, redirect.Spec) bool) {
		special := Special()
		for _, name := range slices.Sorted(maps.Keys(special)) {
			if !yield(name, special[name]) {
				return
			}
		}
		for seed := range random {
			if !yield(fmt.Sprintf("seed %d", seed), Random(seed)) {
				return
			}
		}
	}
}

// networks adds Specs by ports and networks.
func networks(add func(string, func(*redirect.Spec))) {
	outbound := func(texts ...string) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: Prefixes(texts...)} }
	}
	add("default", func(*redirect.Spec) {})
	add("nothing inbound", func(s *redirect.Spec) { s.Inbound = redirect.Ports{} })
	add("a list of inbound ports", func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(80, 8080, 0, 65535, 80)} })
	add("many excluded ports", func(s *redirect.Spec) {
		s.InboundExclude, s.OutboundPortsExclude = ruleset.PortList(22, 0, 65535, 15008, 15020, 22), ruleset.PortList(53, 0, 65535, 443, 53)
	})
	add("no outbound network but ports", func(s *redirect.Spec) {
		s.Outbound, s.OutboundPorts = redirect.Networks{}, ruleset.PortList(3306, 0, 65535, 3306)
	})
	add("everything as a network", outbound("0.0.0.0/0", "::/0"))
	add("everything written with an address", outbound("10.0.0.1/0", "2001:db8::1/0"))
	add("IPv4 written as IPv6", outbound("::ffff:10.1.2.3/104", "::ffff:0.0.0.0/96", "::ffff:1.2.3.4/128"))
	add("IPv6 with zeros in many places", outbound("1:0:0:2:0:0:0:3/128", "1:0:2:0:3:0:4:0/128", "0:0:1::/48", "::2:0:0:0/80"))
	add("IPv4 loopback outbound", outbound("127.0.0.0/8"))
	add("IPv6 loopback outbound", outbound("::1/128"))
	add("a network that begins at loopback", outbound("127.0.0.1/1"))
	add("loopback written as IPv6", outbound("::ffff:127.0.0.1/128"))
	add("a network that covers loopback", outbound("0.0.0.0/1", "::/64"))
	add("outbound networks and rerouting", func(s *redirect.Spec) {
		s.RerouteInterfaces = []string{"v1", "v2"}
		outbound("10.0.0.0/8", "fd00::/8", "0.0.0.0/0", "::/0")(s)
	})
	add("excluded networks", func(s *redirect.Spec) {
		s.OutboundExclude = Prefixes("10.1.2.3/16", "fd00::1/64", "0.0.0.0/0", "::/0", "127.0.0.0/8", "::1/128", "::ffff:10.0.0.0/104", "::a00:1/128")
	})
	add("several proxies and loopback outbound", func(s *redirect.Spec) {
		s.UIDs, s.GIDs = []uint32{1, 2}, []uint32{3, 4}
		outbound("127.0.0.1/32")(s)
	})
	add("all DNS and loopback outbound", func(s *redirect.Spec) { s.DNS = redirect.DNSAll; outbound("::1/128")(s) })
}

// extremes adds Specs with unusual addresses, long lists and the largest numbers.
func extremes(add func(string, func(*redirect.Spec))) {
	add("DNS servers of both families", func(s *redirect.Spec) {
		s.DNS = redirect.DNSServers
		for _, p := range Prefixes("10.0.0.10/32", "fd00::a/128", "10.0.0.11/32", "::1.2.3.4/128", "127.0.0.53/32") {
			s.DNSServers = append(s.DNSServers, p.Addr())
		}
	})
	add("other ports of the proxy", func(s *redirect.Spec) { s.OutboundPort, s.InboundPort, s.TunnelPort = 1, 65535, 53 })
	add("addresses with a dotted end", func(s *redirect.Spec) {
		s.OutboundExclude = Prefixes("::1.2.3.4/128", "::a00:0/104", "::1:0/112", "::ffff:10.1.2.3/104", "64:ff9b::1.2.3.4/128")
	})
	add("networks of every length", func(s *redirect.Spec) {
		for bits := 1; bits <= 128; bits++ {
			s.OutboundExclude = append(s.OutboundExclude, netip.PrefixFrom(netip.MustParseAddr("fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), bits))
			if bits <= 32 {
				s.OutboundExclude = append(s.OutboundExclude, netip.PrefixFrom(netip.MustParseAddr("254.255.255.255"), bits))
			}
		}
	})
	add("the largest numbers", func(s *redirect.Spec) {
		s.Mark, s.UIDs, s.GIDs = 1<<32-1, []uint32{1<<32 - 2, 0}, []uint32{1<<32 - 2}
		s.OutboundPorts, s.InboundExclude = ruleset.PortList(0, 65535), ruleset.PortList(0, 65535)
		s.DNS = redirect.DNSAll
	})
	add("ranges of ports", func(s *redirect.Spec) {
		s.InboundExclude, s.OutboundPortsExclude = []ruleset.PortRange{{First: 1, Last: 65535}, {First: 8000, Last: 8001}}, []ruleset.PortRange{{First: 1, Last: 2}}
		s.OutboundPorts = []ruleset.PortRange{{First: 65534, Last: 65535}, {First: 8000, Last: 8100}}
	})
	add("ranges of inbound ports", func(s *redirect.Spec) {
		s.Inbound = redirect.Ports{List: []ruleset.PortRange{{First: 8000, Last: 8100}}}
	})
	add("many owner groups", func(s *redirect.Spec) { // the most that iptables reads in one rule
		s.OwnerGroups = redirect.Groups{}
		for i := range uint32(49) {
			s.OwnerGroups.List = append(s.OwnerGroups.List, 1<<32-2-i)
		}
	})
	add("long names of interfaces", func(s *redirect.Spec) {
		s.ExcludeInterfaces, s.RerouteInterfaces = []string{"abcdefghijklmno", "a_B-c.d"}, []string{"abcdefghijklmno"}
	})
	add("DNS at the tunnel port", func(s *redirect.Spec) { s.DNS, s.TunnelPort = redirect.DNSAll, 53 })
	add("many ports", func(s *redirect.Spec) {
		for i := range uint16(500) {
			s.OutboundPortsExclude = append(s.OutboundPortsExclude, ruleset.OnePort(i))
		}
	})
}

// Prefixes parses networks and keeps their host bits.
func Prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// Random draws a Spec.
func Random(seed uint64) redirect.Spec {
	d := dice{rand.New(rand.NewPCG(seed, 0))} //nolint:gosec // the same seed must give the same Spec
	s := redirect.Default()
	s.Mode, s.DNS = redirect.Mode(d.octet()%2), redirect.DNSCapture(d.octet()%3)
	s.UIDs, s.GIDs = some(d, 1, 3, d.Uint32), some(d, 0, 3, d.Uint32)
	s.Mark = 1 + d.Uint32N(1<<32-1)
	s.DNSServers = some(d, 0, 3, d.address)
	s.DropInvalid = d.IntN(2) == 0
	d.scope(&s)
	s.ExcludeInterfaces, s.RerouteInterfaces = some(d, 0, 2, d.link), some(d, 0, 2, d.link)
	s.OwnerGroupsExclude = some(d, 0, 2, d.Uint32)
	s.Loopback = netip.PrefixFrom(netip.AddrFrom4([4]byte{127, d.octet(), d.octet(), d.octet()}), 8+d.IntN(25))
	if d.IntN(4) == 0 {
		s.OutboundPort, s.InboundPort, s.TunnelPort = 1+d.port()/2, 1+d.port()/2, 1+d.port()/2
	}
	return s
}

// scope draws the captured traffic.
func (d dice) scope(s *redirect.Spec) {
	s.InboundExclude, s.OutboundExclude = some(d, 0, 4, d.ports), some(d, 0, 4, d.prefix)
	s.OutboundPorts, s.OutboundPortsExclude = some(d, 0, 3, d.ports), some(d, 0, 3, d.ports)
	if d.IntN(2) == 0 {
		s.Inbound = redirect.Ports{List: some(d, 0, 4, d.ports)}
	}
	if d.IntN(3) > 0 {
		s.Outbound = redirect.Networks{List: some(d, 0, 5, d.prefix)}
	}
	if d.IntN(3) == 0 {
		s.OwnerGroups = redirect.Groups{List: some(d, 0, 4, d.Uint32)}
	}
}

type dice struct{ *rand.Rand }

// some draws between least and most values.
func some[T any](d dice, least, most int, draw func() T) []T {
	var out []T
	for range least + d.IntN(most-least+1) {
		out = append(out, draw())
	}
	return out
}

func (d dice) octet() byte { return byte(d.UintN(1 << 8)) } //nolint:gosec // it is below

func (d dice) port() uint16 { return uint16(d.UintN(1 << 16)) } //nolint:gosec // it is below

// ports draws one port or a range.
func (d dice) ports() ruleset.PortRange {
	first := d.port()
	if first == 0 || d.IntN(3) > 0 {
		return ruleset.OnePort(first)
	}
	return ruleset.PortRange{First: first, Last: max(first, d.port())}
}

func (d dice) link() string {
	return []string{"eth0", "net1", "lo", "k6t-0", "tap.100", "A_b", "abcdefghijklmno"}[d.IntN(7)]
}

// address draws an address of either family, with many zeros: such an address has several spellings.
func (d dice) address() netip.Addr {
	if d.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte{d.octet(), d.octet(), d.octet(), d.octet()})
	}
	var a [16]byte
	for i := range a {
		a[i] = d.octet() * byte(d.IntN(2)) //nolint:gosec // zero or one
	}
	clear(a[:d.IntN(17)])
	return netip.AddrFrom16(a)
}

// prefix draws a network and keeps its host bits.
func (d dice) prefix() netip.Prefix {
	a := d.address()
	return netip.PrefixFrom(a, d.IntN(a.BitLen()+1))
}
