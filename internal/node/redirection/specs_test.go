package redirection_test

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
)

// named is a Spec with what is special about it.
type named struct {
	name string
	spec redirect.Spec
}

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func addrs(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, text := range texts {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

// features switch on, alone, whatever makes a row of the reference's rules appear, go or change.
func features() map[string]func(*redirect.Spec) {
	type spec = redirect.Spec
	servers := func(texts ...string) func(*spec) {
		return func(s *spec) { s.DNS, s.DNSServers = redirect.DNSServers, addrs(texts...) }
	}
	outbound := func(texts ...string) func(*spec) {
		return func(s *spec) { s.Outbound = redirect.Networks{List: prefixes(texts...)} }
	}
	return map[string]func(*spec){
		"nothing set":                         func(*spec) {},
		"one excluded interface":              func(s *spec) { s.ExcludeInterfaces = []string{"net1"} },
		"lo excluded":                         func(s *spec) { s.ExcludeInterfaces = []string{"lo"} },
		"one rerouted interface":              func(s *spec) { s.RerouteInterfaces = []string{"k6t-eth0"} },
		"interfaces excluded and rerouted":    func(s *spec) { s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1", "v2"} },
		"one interface excluded and rerouted": func(s *spec) { s.ExcludeInterfaces, s.RerouteInterfaces = []string{"net1"}, []string{"net1"} },
		"a list of inbound ports":             func(s *spec) { s.Inbound = redirect.Ports{List: []uint16{80, 8080, 0, 65535, 80}} },
		"no inbound exclude":                  func(s *spec) { s.InboundExclude = nil },
		"many inbound excludes":               func(s *spec) { s.InboundExclude = []uint16{22, 0, 65535, 15008, 15020, 22} },
		"no outbound network":                 outbound(),
		"no outbound network but a port":      func(s *spec) { s.Outbound, s.OutboundPorts = redirect.Networks{}, []uint16{3306, 0, 65535, 3306} },
		"outbound ports":                      func(s *spec) { s.OutboundPorts = []uint16{443} },
		"outbound networks of both families":  outbound("10.0.0.0/8", "2001:db8::/32", "172.16.0.0/12", "fd00::/8"),
		"outbound networks with host bits":    outbound("10.1.2.3/8", "2001:db8::1/32", "192.168.7.9/31", "fe80::ffff:1/127"),
		"outbound networks of IPv4":           outbound("10.0.0.0/8"),
		"outbound networks of IPv6":           outbound("2001:db8::/32"),
		"everything written with an address":  outbound("10.0.0.1/0", "2001:db8::1/0"),
		"single addresses":                    outbound("10.0.0.1/32", "2001:db8::1/128"),
		"IPv4 written as IPv6":                outbound("::ffff:10.1.2.3/104", "::ffff:0.0.0.0/96", "::ffff:1.2.3.4/128"),
		"IPv6 with zeros in many places":      outbound("1:0:0:2:0:0:0:3/128", "1:0:2:0:3:0:4:0/128", "0:0:1::/48", "::2:0:0:0/80"),
		"IPv4 loopback outbound":              outbound("127.0.0.0/8"),
		"IPv6 loopback outbound":              outbound("::1/128"),
		"a network that begins at loopback":   outbound("127.0.0.1/1"),
		"loopback written as IPv6":            outbound("::ffff:127.0.0.1/128"),
		"a network that covers loopback":      outbound("0.0.0.0/1", "::/64"),
		"outbound networks and rerouting": func(s *spec) {
			s.RerouteInterfaces = []string{"v1", "v2"}
			outbound("10.0.0.0/8", "fd00::/8", "0.0.0.0/0", "::/0")(s)
		},
		"excluded networks": func(s *spec) {
			s.OutboundExclude = prefixes("10.1.2.3/16", "fd00::1/64", "0.0.0.0/0", "::/0", "127.0.0.0/8", "::1/128")
		},
		"excluded IPv4 written as IPv6":         func(s *spec) { s.OutboundExclude = prefixes("::ffff:10.0.0.0/104", "::a00:1/128") },
		"no excluded outbound port":             func(s *spec) { s.OutboundPortsExclude = nil },
		"many excluded outbound ports":          func(s *spec) { s.OutboundPortsExclude = []uint16{53, 0, 65535, 443, 53} },
		"several proxies":                       func(s *spec) { s.UIDs, s.GIDs = []uint32{1337, 0, 4294967294}, []uint32{4294967294, 1337} },
		"no group of the proxy":                 func(s *spec) { s.GIDs = nil },
		"several proxies and loopback outbound": func(s *spec) { s.UIDs, s.GIDs = []uint32{1, 2}, []uint32{3, 4}; outbound("127.0.0.1/32")(s) },
		"excluded groups":                       func(s *spec) { s.OwnerGroupsExclude = []uint32{0, 1000, 4294967294} },
		"one owner group":                       func(s *spec) { s.OwnerGroups = redirect.Groups{List: []uint32{1000}} },
		"three owner groups":                    func(s *spec) { s.OwnerGroups = redirect.Groups{List: []uint32{1000, 0, 4294967294}} },
		"no owner group":                        func(s *spec) { s.OwnerGroups = redirect.Groups{} },
		"owner groups with excluded ones":       func(s *spec) { s.OwnerGroups, s.OwnerGroupsExclude = redirect.Groups{List: []uint32{5}}, []uint32{6} },
		"all DNS":                               func(s *spec) { s.DNS = redirect.DNSAll },
		"all DNS and several proxies":           func(s *spec) { s.DNS, s.UIDs, s.GIDs = redirect.DNSAll, []uint32{1, 2}, []uint32{3, 4} },
		"all DNS and loopback outbound":         func(s *spec) { s.DNS = redirect.DNSAll; outbound("::1/128")(s) },
		"all DNS though servers are known":      func(s *spec) { s.DNS, s.DNSServers = redirect.DNSAll, addrs("10.0.0.10") },
		"a DNS server of IPv4":                  servers("10.0.0.10"),
		"a DNS server of IPv6":                  servers("fd00::a"),
		"DNS servers of both families":          servers("10.0.0.10", "fd00::a", "10.0.0.11", "::1.2.3.4", "127.0.0.53"),
		"DNS servers and several proxies":       func(s *spec) { servers("10.0.0.10", "fd00::a")(s); s.UIDs, s.GIDs = []uint32{1, 2}, []uint32{3, 4} },
		"DNS servers of which none is known":    servers(),
		"servers known though DNS is off":       func(s *spec) { s.DNSServers = addrs("10.0.0.10", "fd00::a") },
		"invalid packets dropped":               func(s *spec) { s.DropInvalid = true },
		"invalid packets and interfaces": func(s *spec) {
			s.DropInvalid, s.ExcludeInterfaces, s.RerouteInterfaces = true, []string{"x1", "x2"}, []string{"v1"}
		},
		"invalid packets, no inbound port": func(s *spec) { s.DropInvalid, s.Inbound = true, redirect.Ports{} },
		"a loopback network":               func(s *spec) { s.Loopback = netip.MustParsePrefix("127.0.0.0/8") },
		"a loopback network by address":    func(s *spec) { s.Loopback = netip.MustParsePrefix("127.1.2.3/16") },
		"another mark and table":           func(s *spec) { s.Mark, s.Table = 1, 100 },
		"other ports of the proxy":         func(s *spec) { s.OutboundPort, s.InboundPort, s.TunnelPort = 1, 65535, 53 },
		"everything at once": func(s *spec) {
			s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1", "v2"}
			s.DropInvalid, s.DNS = true, redirect.DNSAll
			s.UIDs, s.GIDs, s.OwnerGroupsExclude = []uint32{1, 2}, []uint32{3, 4}, []uint32{5}
			s.OutboundPorts, s.OutboundPortsExclude = []uint16{3306}, []uint16{9, 10}
			s.OutboundExclude = prefixes("10.9.0.0/16", "fd09::/16")
			outbound("10.0.0.0/8", "fd00::/8")(s)
		},
	}
}

// table is every feature with both modes, and the Specs that are special in other ways.
func table() []named {
	var out []named
	all := features()
	for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
		for name, set := range all {
			s := redirect.Default()
			s.Mode = mode
			set(&s)
			out = append(out, named{mode.String() + ", " + name, s})
		}
	}
	for name, s := range spectest.Special() {
		out = append(out, named{"special: " + name, s})
	}
	slices.SortFunc(out, func(a, b named) int {
		return slices.Compare([]string{a.name}, []string{b.name})
	})
	return out
}

// random are Specs of the given number of seeds; a failing one is named by its test.
func random(seeds uint64) []named {
	var out []named
	for seed := range seeds {
		out = append(out, named{fmt.Sprintf("random, seed %d", seed), spectest.Random(seed)})
	}
	return out
}
