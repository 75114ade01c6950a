package redirect

import (
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Names of our chains in iptables; dialect.go derives the native names. All are protocol.
const (
	inbound     = chainPrefix + "INBOUND"
	output      = chainPrefix + "OUTPUT"
	outputDNS   = chainPrefix + "OUTPUT_DNS"
	toProxy     = chainPrefix + "REDIRECT"
	toInbound   = chainPrefix + "IN_REDIRECT"
	divert      = chainPrefix + "DIVERT"
	tproxy      = chainPrefix + "TPROXY"
	dropInvalid = chainPrefix + "DROP"
	rejectAll   = chainPrefix + "REJECT"
	prerouting  = "PREROUTING"
	outHook     = "OUTPUT"
)

// tables returns the rules that capture a pod. Each method below has the rules of one chain, in the order of evaluation.
//
//	            ┌─ raw ──────────────┐ ┌─ mangle ──────────────┐ ┌─ nat ───────────────────────────────────────┐
//	incoming →  PREROUTING             PREROUTING                PREROUTING
//	              └ ISTIO_INBOUND        ├ ISTIO_DROP              ├ (virtual machines) ISTIO_REDIRECT → 15001
//	                (DNS zones)          └ ISTIO_INBOUND           └ ISTIO_INBOUND
//	                                       (TPROXY)  → 15006           └ ISTIO_IN_REDIRECT → 15006
//	outgoing →  OUTPUT                 OUTPUT                    OUTPUT
//	              └ ISTIO_OUTPUT_DNS     (TPROXY marks)            └ ISTIO_OUTPUT
//	                (DNS zones)                                        ├ ISTIO_IN_REDIRECT → 15006 (proxy to its own pod)
//	                                                                   ├ ISTIO_OUTPUT_DNS  → 15053
//	                                                                   └ ISTIO_REDIRECT    → 15001
func (b builder) tables() []ruleset.Table {
	return []ruleset.Table{
		b.table("nat", chain{prerouting, b.natPrerouting()}, chain{outHook, b.natOutput()}, chain{inbound, b.natInbound()},
			chain{toProxy, b.toProxy()}, chain{toInbound, b.toInbound()}, chain{output, b.istioOutput()}, chain{outputDNS, b.natOutputDNS()}),
		b.table("mangle", chain{prerouting, b.manglePrerouting()}, chain{outHook, b.mangleOutput()}, chain{divert, b.divert()},
			chain{tproxy, b.tproxy()}, chain{inbound, b.mangleInbound()}, chain{dropInvalid, b.dropInvalid()}),
		b.table("raw", chain{prerouting, b.rawPrerouting()}, chain{outHook, b.rawOutput()}, chain{inbound, b.rawInbound()},
			chain{outputDNS, b.rawOutputDNS()}),
	}
}

// rejected refuses TCP and UDP of a family that the mesh does not capture. Loopback stays, and so does ICMP: IPv6
// cannot work without ICMP.
func (b builder) rejected(f ruleset.Family) ruleset.Table {
	answer, family := ruleset.PortUnreachable, ruleset.OfFamily(f)
	if f == ruleset.IPv6 {
		answer = ruleset.PortUnreachableV6
	}
	jump := []ruleset.Rule{b.rule("this family is not captured: it must not run past the mesh", b.jump(rejectAll), family)}
	return b.table("filter", chain{"INPUT", jump}, chain{outHook, jump}, chain{rejectAll, []ruleset.Rule{
		b.rule("incoming loopback traffic stays in the pod", ruleset.Return, in("lo")),
		b.rule("outgoing loopback traffic stays in the pod", ruleset.Return, out("lo")),
		b.rule("the refusal of an incoming connection gets out", ruleset.Return, ruleset.Reset),
		b.rule("TCP is refused at once, so that clients try the other family", ruleset.TCPReset, tcp),
		b.rule("UDP is refused", answer, family, ruleset.Protocol{Number: ruleset.UDP}),
	}})
}

// tcp matches all TCP.
var tcp = ruleset.Protocol{Number: ruleset.TCP} //nolint:gochecknoglobals // a constant

func in(name string) ruleset.Interface  { return ruleset.Interface{Name: name} }
func out(name string) ruleset.Interface { return ruleset.Interface{Name: name, Out: true} }

func from(p netip.Prefix) ruleset.Network  { return ruleset.Network{Prefix: p, Source: true} }
func to(p netip.Prefix) ruleset.Network    { return ruleset.Network{Prefix: p} }
func notTo(p netip.Prefix) ruleset.Network { return ruleset.Network{Prefix: p, Not: true} }

func dport(protocol uint8, ports ruleset.PortRange) ruleset.Port {
	return ruleset.Port{Protocol: protocol, Range: ports}
}

// networks returns the networks of the builder's families, IPv4 first. An IPv4-mapped IPv6 network is IPv6.
func (b builder) networks(list ...netip.Prefix) []netip.Prefix {
	var networks []netip.Prefix
	for _, f := range b.families {
		for _, p := range list {
			if p.Addr().Is4() == (f == ruleset.IPv4) {
				networks = append(networks, p)
			}
		}
	}
	return networks
}

// loopbacks returns the pod's own addresses on lo.
func (b builder) loopbacks() []netip.Prefix {
	return b.networks(b.Loopback, single(netip.IPv6Loopback()))
}

// passthroughs returns the source addresses of Envoy's connections to the app.
func (b builder) passthroughs() []netip.Prefix {
	return b.networks(single(PassthroughAddress(ruleset.IPv4)), single(PassthroughAddress(ruleset.IPv6)))
}

// single returns the network of one address.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// each returns one rule for each element of a list.
func each[T any](list []T, rule func(T) ruleset.Rule) []ruleset.Rule {
	rules := make([]ruleset.Rule, 0, len(list))
	for _, e := range list {
		rules = append(rules, rule(e))
	}
	return rules
}

// when returns the rules if they are wanted.
func when(wanted bool, rules ...ruleset.Rule) []ruleset.Rule {
	if wanted {
		return rules
	}
	return nil
}

// excludedInterfaces returns RETURN rules for the packets that enter, or leave, by excluded interfaces.
func (b builder) excludedInterfaces(direction func(string) ruleset.Interface) []ruleset.Rule {
	return each(b.ExcludeInterfaces, func(x string) ruleset.Rule {
		return b.rule("interface "+x+" is excluded", ruleset.Return, direction(x))
	})
}

// natPrerouting returns the rules for connections from outside. The rules of virtual machines come first; the reference
// inserts them at the head one by one, so the last machine's rules lead.
func (b builder) natPrerouting() []ruleset.Rule {
	rules := each(b.RerouteInterfaces, func(v string) ruleset.Rule {
		return b.rule("other traffic of virtual interface "+v+" is not inbound", ruleset.Return, in(v))
	})
	rules = append(rules, b.virtualMachines()...)
	slices.Reverse(rules)
	return slices.Concat(rules, b.excludedInterfaces(in),
		when(!b.Inbound.Empty() && b.Mode == Redirect, b.rule("incoming TCP goes to the rules of the mesh", b.jump(inbound), tcp)))
}

// virtualMachines returns the rules that send virtual machines' outgoing packets to the proxy, in the order of insertion.
func (b builder) virtualMachines() []ruleset.Rule {
	if b.Outbound.All {
		return each(b.RerouteInterfaces, func(v string) ruleset.Rule {
			return b.rule("traffic from virtual interface "+v+" is outbound", b.jump(toProxy), in(v))
		})
	}
	var rules []ruleset.Rule
	for _, p := range b.networks(b.Outbound.List...) {
		rules = append(rules, each(b.RerouteInterfaces, func(v string) ruleset.Rule {
			return b.rule("traffic from virtual interface "+v+" to a captured network is outbound", b.jump(toProxy), in(v), to(p))
		})...)
	}
	return rules
}

func (b builder) natOutput() []ruleset.Rule {
	return append(b.excludedInterfaces(out), b.rule("everything the pod sends goes to the rules of the mesh", b.jump(output)))
}

// natInbound decides about incoming TCP under REDIRECT. In TPROXY mode the chain has its first rule too, although no
// rule jumps to the chain.
func (b builder) natInbound() []ruleset.Rule {
	why := "HBONE tunnels go straight to the proxy's own port"
	if b.Mode == TPROXY {
		why = "nothing jumps here with TPROXY; the reference has the rule all the same"
	}
	rules := []ruleset.Rule{b.rule(why, ruleset.Return, dport(ruleset.TCP, ruleset.OnePort(b.TunnelPort)))}
	if b.Mode == TPROXY {
		return rules
	}
	if !b.Inbound.All {
		return append(rules, each(b.Inbound.List, func(p ruleset.PortRange) ruleset.Rule {
			return b.rule("this inbound port is captured", b.jump(toInbound), dport(ruleset.TCP, p))
		})...)
	}
	rules = append(rules, b.inboundExcluded()...)
	return append(rules, b.rule("every other inbound port is captured", b.jump(toInbound), tcp))
}

func (b builder) inboundExcluded() []ruleset.Rule {
	return each(b.InboundExclude, func(p ruleset.PortRange) ruleset.Rule {
		return b.rule(excluded("inbound", p, AlwaysExcluded()), ruleset.Return, dport(ruleset.TCP, p))
	})
}

// excluded is the reason of the rule that excludes a port; the ports in always are excluded in every pod.
func excluded(direction string, p ruleset.PortRange, always []ruleset.PortRange) string {
	why := "this " + direction + " port is excluded"
	if slices.Contains(always, p) {
		why += " by default"
	}
	return why
}

func (b builder) toProxy() []ruleset.Rule {
	return []ruleset.Rule{b.rule("outbound TCP goes to the proxy's outbound listener", ruleset.RedirectTo(b.OutboundPort), tcp)}
}

func (b builder) toInbound() []ruleset.Rule {
	return []ruleset.Rule{b.rule("inbound TCP goes to the proxy's inbound listener", ruleset.RedirectTo(b.InboundPort), tcp)}
}

// istioOutput decides about all packets that the pod sends. The order is the policy: excluded ports, the proxy's calls to
// the app, the proxy itself, owner groups, DNS, loopback, excluded networks, and then the captured networks and ports.
func (b builder) istioOutput() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.OutboundPortsExclude {
		why := excluded("outbound", p, ruleset.PortList(statusPort))
		rules = append(rules, b.rule(why, ruleset.Return, dport(ruleset.TCP, p)), b.rule(why, ruleset.Return, dport(ruleset.UDP, p)))
	}
	for _, p := range b.passthroughs() {
		rules = append(rules, b.rule("the proxy hands an inbound connection to the app", ruleset.Return, out("lo"), from(p)))
	}
	for _, o := range b.Identities() {
		rules = append(rules, b.proxyOwner(o)...)
	}
	rules = append(rules, b.ownerGroups()...)
	if len(b.dnsServers(to)) > 0 {
		rules = append(rules, b.rule("DNS goes to the sidecar agent", b.jump(outputDNS)))
	}
	for _, p := range b.loopbacks() {
		rules = append(rules, b.rule("the pod talks to itself", ruleset.Return, to(p)))
	}
	for _, p := range b.networks(b.OutboundExclude...) {
		rules = append(rules, b.rule("this network is excluded", ruleset.Return, to(p)))
	}
	return append(rules, b.captured()...)
}

// proxyOwner returns the rules for one identity of the proxy. The exception of port 53 keeps the app's DNS queries to a
// resolver on lo out of Envoy's inbound listener; for a gid the reference has this exception in the second rule only.
func (b builder) proxyOwner(o ruleset.Owner) []ruleset.Rule {
	var ports ruleset.Match = ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(b.TunnelPort), Not: true}
	other := []ruleset.Match{out("lo")}
	if b.capturesDNS() {
		other = append(other, ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(dnsPort), Not: true})
		if !o.Group {
			ports = ruleset.AnyPort{Protocol: ruleset.TCP, List: ruleset.PortList(dnsPort, b.TunnelPort), Not: true}
		}
	}
	var rules []ruleset.Rule
	for _, p := range b.loopbacks() {
		rules = append(rules, b.rule("the proxy calls its own pod: through the inbound listener",
			b.jump(toInbound), out("lo"), tcp, notTo(p), ports, o))
	}
	if !b.CapturesLoopback() {
		notProxy := o
		notProxy.Not = true
		rules = append(rules, b.rule("the app calls its own pod: directly", ruleset.Return, append(other, notProxy)...))
	}
	return append(rules, b.rule("the proxy itself is never captured: no loops", ruleset.Return, o))
}

func (b builder) ownerGroups() []ruleset.Rule {
	if b.OwnerGroups.All {
		return each(b.OwnerGroupsExclude, func(g uint32) ruleset.Rule {
			return b.rule("this group is excluded", ruleset.Return, ruleset.Owner{ID: g, Group: true})
		})
	}
	why := "only the listed groups are captured"
	if len(b.OwnerGroups.List) == 0 {
		why = "no process is captured: the list of groups is empty"
	}
	var groups []ruleset.Match
	for _, g := range b.OwnerGroups.List {
		groups = append(groups, ruleset.Owner{ID: g, Group: true, Not: true})
	}
	return []ruleset.Rule{b.rule(why, ruleset.Return, groups...)}
}

// Reasons of rules that match all protocols before a rule that captures TCP.
const (
	allOther    = "all other TCP is captured"
	thisNetwork = "this network is captured"
)

// Reason returns the reason why a rule applies to a packet of the protocol.
func Reason(why string, protocol uint8) string {
	if protocol != ruleset.TCP && (why == allOther || why == thisNetwork) {
		return "only TCP is captured here"
	}
	return why
}

func (b builder) captured() []ruleset.Rule {
	rules := each(b.OutboundPorts, func(p ruleset.PortRange) ruleset.Rule {
		return b.rule("this outbound port is captured in all other networks", b.jump(toProxy), dport(ruleset.TCP, p))
	})
	if b.Outbound.All {
		return append(rules, b.rule(allOther, b.jump(toProxy)))
	}
	return append(rules, each(b.networks(b.Outbound.List...), func(p netip.Prefix) ruleset.Rule {
		return b.rule(thisNetwork, b.jump(toProxy), to(p))
	})...)
}
