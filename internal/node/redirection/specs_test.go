package redirection_test

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// named is a Spec with a description.
type named struct {
	name string
	spec redirect.Spec
}

func parsed[T any](parse func(string) T, texts ...string) (all []T) {
	for _, text := range texts {
		all = append(all, parse(text))
	}
	return all
}

func prefixes(texts ...string) []netip.Prefix { return parsed(netip.MustParsePrefix, texts...) }
func addrs(texts ...string) []netip.Addr      { return parsed(netip.MustParseAddr, texts...) }

// features are rare or absent among random Specs: networks on loopback, IPv4 written as IPv6, repetitions. Each other feature
// makes rules that random Specs make too.
func features() map[string]func(*redirect.Spec) {
	type spec = redirect.Spec
	outbound := func(texts ...string) func(*spec) {
		return func(s *spec) { s.Outbound = redirect.Networks{List: prefixes(texts...)} }
	}
	return map[string]func(*spec){
		"nothing set":                  func(*spec) {},
		"a list of inbound ports":      func(s *spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(80, 8080, 0, 65535, 80)} },
		"many inbound excludes":        func(s *spec) { s.InboundExclude = ruleset.PortList(22, 0, 65535, 15008, 15020, 22) },
		"many excluded outbound ports": func(s *spec) { s.OutboundPortsExclude = ruleset.PortList(53, 0, 65535, 443, 53) },
		"no outbound network but ports": func(s *spec) {
			s.Outbound, s.OutboundPorts = redirect.Networks{}, ruleset.PortList(3306, 0, 65535, 3306)
		},
		"everything written with an address": outbound("10.0.0.1/0", "2001:db8::1/0"),
		"IPv4 written as IPv6":               outbound("::ffff:10.1.2.3/104", "::ffff:0.0.0.0/96", "::ffff:1.2.3.4/128"),
		"IPv6 with zeros in many places":     outbound("1:0:0:2:0:0:0:3/128", "1:0:2:0:3:0:4:0/128", "0:0:1::/48", "::2:0:0:0/80"),
		"IPv4 loopback outbound":             outbound("127.0.0.0/8"),
		"IPv6 loopback outbound":             outbound("::1/128"),
		"a network that begins at loopback":  outbound("127.0.0.1/1"),
		"loopback written as IPv6":           outbound("::ffff:127.0.0.1/128"),
		"a network that covers loopback":     outbound("0.0.0.0/1", "::/64"),
		"outbound networks and rerouting": func(s *spec) {
			s.RerouteInterfaces = []string{"v1", "v2"}
			outbound("10.0.0.0/8", "fd00::/8", "0.0.0.0/0", "::/0")(s)
		},
		"excluded networks": func(s *spec) {
			s.OutboundExclude = prefixes("10.1.2.3/16", "fd00::1/64", "0.0.0.0/0", "::/0", "127.0.0.0/8", "::1/128")
		},
		"excluded IPv4 written as IPv6": func(s *spec) { s.OutboundExclude = prefixes("::ffff:10.0.0.0/104", "::a00:1/128") },
		"several proxies and loopback outbound": func(s *spec) {
			s.UIDs, s.GIDs = []uint32{1, 2}, []uint32{3, 4}
			outbound("127.0.0.1/32")(s)
		},
		"all DNS and loopback outbound": func(s *spec) { s.DNS = redirect.DNSAll; outbound("::1/128")(s) },
		"DNS servers of both families": func(s *spec) {
			s.DNS, s.DNSServers = redirect.DNSServers, addrs("10.0.0.10", "fd00::a", "10.0.0.11", "::1.2.3.4", "127.0.0.53")
		},
		"other ports of the proxy": func(s *spec) { s.OutboundPort, s.InboundPort, s.TunnelPort = 1, 65535, 53 },
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
