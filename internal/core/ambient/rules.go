package ambient

import (
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// builder is a Spec in one dialect: rules of iptables for one family, or of the native tables for all captured ones.
type builder struct {
	Spec
	families []ruleset.Family
	native   bool
}

// Sets returns the wanted rules of both families. A family that is not captured has an empty Set, so that leftovers are removed.
func (s Spec) Sets(f redirect.Families) []ruleset.Set {
	v6 := ruleset.Set{Family: ruleset.IPv6}
	if f.IPv6 == redirect.Captured {
		v6 = s.rules(ruleset.IPv6)
	}
	return []ruleset.Set{s.rules(ruleset.IPv4), v6}
}

func (s Spec) rules(f ruleset.Family) ruleset.Set {
	return ruleset.New(f, builder{Spec: s, families: []ruleset.Family{f}}.tables()...)
}

// NativeSet returns the native tables. As in the reference, they capture DNS of IPv6, and IPv6 of virtual machines, even if IPv6 is
// Bypassed: rules without an address are for both families.
func (s Spec) NativeSet(f redirect.Families) ruleset.Set {
	b := builder{Spec: s, families: f.Captured(), native: true}
	return ruleset.Set{Family: ruleset.Inet, Tables: b.tables()}
}

// tables returns the rules that capture a pod. In each table PREROUTING jumps to ISTIO_PRERT, and OUTPUT to ISTIO_OUTPUT.
func (b builder) tables() []ruleset.Table {
	all := []ruleset.Table{b.table("nat", b.natIn(), b.natOut()), b.table("mangle", b.mangleIn(), b.mangleOut())}
	if b.DNSCapture {
		all = append(all, b.table("raw", b.rawIn(), b.rawOut()))
	}
	return all
}

func (b builder) table(name string, in, out []ruleset.Rule) ruleset.Table {
	t := ruleset.Table{Name: name}
	names, policy := []string{"PREROUTING", "OUTPUT", "ISTIO_PRERT", "ISTIO_OUTPUT"}, "ACCEPT"
	if b.native {
		t.Name = Owner().NativePrefix + name
		names, policy = []string{"prerouting", "output", "istio-prerouting", "istio-output"}, ruleset.NoPolicy
	}
	jump := func(to, why string) []ruleset.Rule {
		if b.native {
			return []ruleset.Rule{ruleset.Uncounted(why, ruleset.Jump{Chain: to})}
		}
		return []ruleset.Rule{b.rule(why, ruleset.Jump{Chain: to})}
	}
	t.Chains = []ruleset.Chain{
		{Name: names[0], Policy: policy, Rules: jump(names[2], "everything that the pod gets goes to the rules of the mesh")},
		{Name: names[1], Policy: policy, Rules: jump(names[3], "everything that the pod sends goes to the rules of the mesh")},
		{Name: names[2], Policy: ruleset.NoPolicy, Rules: in},
		{Name: names[3], Policy: ruleset.NoPolicy, Rules: out},
	}
	return t
}

// rule makes a rule, with its matches in the given order. iptables-save prints addresses, interfaces and protocol first nevertheless.
func (b builder) rule(why string, target ruleset.Target, matches ...ruleset.Match) ruleset.Rule {
	if b.native {
		return ruleset.NFT(why, target, matches...)
	}
	return ruleset.InOrder(why, target, matches...)
}

// each returns one rule for each family.
func (b builder) each(rule func(f ruleset.Family) ruleset.Rule) []ruleset.Rule {
	rules := make([]ruleset.Rule, len(b.families))
	for i, f := range b.families {
		rules[i] = rule(f)
	}
	return rules
}

// tcp matches all TCP.
var tcp = ruleset.Protocol{Number: ruleset.TCP} //nolint:gochecknoglobals // a constant

// ofProbe matches TCP from or to the probe address. The reference names TCP twice, which only iptables prints.
func (b builder) ofProbe(f ruleset.Family, source bool) []ruleset.Match {
	probe := b.probe(f)
	matches := []ruleset.Match{tcp, ruleset.Network{Prefix: netip.PrefixFrom(probe, probe.BitLen()), Source: source}}
	if b.native {
		return matches
	}
	return append(matches, ruleset.Header(ruleset.TCP))
}

// notLoopback matches all destinations but the loopback address.
func notLoopback(f ruleset.Family) ruleset.Network {
	lo := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if f == ruleset.IPv6 {
		lo = netip.IPv6Loopback()
	}
	return ruleset.Network{Prefix: netip.PrefixFrom(lo, lo.BitLen()), Not: true}
}

// byProxy matches packets of ztunnel, notByProxy all others, delivery packets of its connections to the app.
func byProxy() ruleset.Mark    { return ruleset.Mark{Value: ProxyMark, Mask: MarkMask} }
func notByProxy() ruleset.Mark { return ruleset.Mark{Value: ProxyMark, Mask: MarkMask, Not: true} }
func delivery(connection bool) ruleset.Mark {
	return ruleset.Mark{Value: ConnectionMark, Mask: MarkMask, Connection: connection}
}

const dnsPort = 53

func dns(protocol uint8) ruleset.Port {
	return ruleset.Port{Protocol: protocol, Range: ruleset.OnePort(dnsPort)}
}

func (b builder) natIn() (rules []ruleset.Rule) {
	for _, name := range b.Interfaces {
		in := ruleset.Interface{Name: name}
		rules = append(rules,
			b.rule("TCP from virtual interface "+name+" is outbound", ruleset.RedirectTo(redirect.OutboundPort), in, tcp),
			b.rule("TCP from virtual interface "+name+" is not inbound", ruleset.Return, in, tcp))
	}
	if b.Ingress {
		return rules
	}
	return slices.Concat(rules, b.each(func(f ruleset.Family) ruleset.Rule {
		return b.rule("the node's own connections, such as the kubelet's probes, reach the app directly", ruleset.Accept, b.ofProbe(f, true)...)
	}), b.each(func(f ruleset.Family) ruleset.Rule {
		tunnel := ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(redirect.TunnelPort), Not: true}
		return b.rule("incoming TCP outside of a tunnel goes to ztunnel's inbound listener", ruleset.RedirectTo(redirect.InboundPort),
			notLoopback(f), tunnel, notByProxy())
	}))
}

// natOut decides about all packets that the pod sends. The order is the policy.
func (b builder) natOut() []ruleset.Rule {
	rules := b.each(func(f ruleset.Family) ruleset.Rule {
		return b.rule("answers to the node's own connections leave directly", ruleset.Accept, b.ofProbe(f, false)...)
	})
	if b.DNSCapture {
		rules = append(rules, b.rule("DNS over UDP goes to ztunnel", ruleset.RedirectTo(redirect.DNSPort),
			ruleset.Interface{Name: "lo", Out: true, Not: true}, notByProxy(), dns(ruleset.UDP)))
		rules = append(rules, b.each(func(f ruleset.Family) ruleset.Rule {
			return b.rule("DNS over TCP goes to ztunnel", ruleset.RedirectTo(redirect.DNSPort), notLoopback(f), dns(ruleset.TCP), notByProxy())
		})...)
	}
	rules = append(rules, b.rule("the app's answers to ztunnel return to ztunnel", ruleset.Accept, tcp, delivery(false)))
	return slices.Concat(rules, b.each(func(f ruleset.Family) ruleset.Rule {
		return b.rule("the app calls its own pod: directly", ruleset.Accept, ruleset.Interface{Name: "lo", Out: true}, notLoopback(f))
	}), b.each(func(f ruleset.Family) ruleset.Rule {
		return b.rule("all other TCP goes to ztunnel's outbound listener, except ztunnel's own", ruleset.RedirectTo(redirect.OutboundPort),
			tcp, notLoopback(f), notByProxy())
	}))
}

func (b builder) mangleIn() []ruleset.Rule {
	return []ruleset.Rule{b.rule("ztunnel's connection to the app is marked",
		ruleset.SetMark{Value: ConnectionMark, Mask: MarkMask, Connection: true}, byProxy())}
}

func (b builder) mangleOut() []ruleset.Rule {
	return []ruleset.Rule{b.rule("the app's answers get the connection's mark, which routes them to ztunnel",
		ruleset.CopyMark{Restore: true}, delivery(true))}
}

// zone keeps ztunnel's own queries apart from the app's. iptables prints the mark before the port, nft behind it.
func (b builder) zone(why string, mark ruleset.Mark, source bool) []ruleset.Rule {
	port := dns(ruleset.UDP)
	port.Source = source
	matches := []ruleset.Match{mark, port}
	if b.native {
		slices.Reverse(matches)
	}
	return []ruleset.Rule{b.rule(why, ruleset.Zone(1), matches...)}
}

func (b builder) rawIn() []ruleset.Rule {
	return b.zone("a resolver answers ztunnel", notByProxy(), true)
}

func (b builder) rawOut() []ruleset.Rule {
	return b.zone("ztunnel queries a resolver", byProxy(), false)
}
