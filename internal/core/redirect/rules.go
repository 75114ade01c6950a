package redirect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Names of our chains. The prefix is what marks a chain as the mesh's; all are protocol.
const (
	chainPrefix = "ISTIO_"

	inbound    = "ISTIO_INBOUND"
	output     = "ISTIO_OUTPUT"
	outputDNS  = "ISTIO_OUTPUT_DNS"
	toProxy    = "ISTIO_REDIRECT"
	toInbound  = "ISTIO_IN_REDIRECT"
	divert     = "ISTIO_DIVERT"
	tproxy     = "ISTIO_TPROXY"
	dropChain  = "ISTIO_DROP"
	rejectAll  = "ISTIO_REJECT"
	prerouting = "PREROUTING"
	outHook    = "OUTPUT"
)

// Conntrack zones of DNS over UDP: one for the agent's own queries to the real resolver, one for the app's queries to
// the agent. Without them both flows could share a conntrack entry and race.
const (
	zoneAgent = 1
	zoneApp   = 2
)

// Rules gives the rules that capture one family as the Spec says. The functions below are one per chain, each with the
// rules in the order in which a packet meets them.
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
func Rules(s Spec, f ruleset.Family) ruleset.Set {
	b := builder{Spec: s, family: f, dns: s.dnsFor(f)}
	return ruleset.New(f, slices.DeleteFunc([]ruleset.Table{
		table("mangle", map[string][]ruleset.Rule{
			prerouting: b.manglePrerouting(), outHook: b.mangleOutput(), inbound: b.mangleInbound(),
			divert: b.divert(), tproxy: b.tproxy(), dropChain: b.drop(),
		}),
		table("nat", map[string][]ruleset.Rule{
			prerouting: b.natPrerouting(), outHook: b.natOutput(), inbound: b.natInbound(), output: b.istioOutput(),
			outputDNS: b.natOutputDNS(), toProxy: b.toProxy(), toInbound: b.toInbound(),
		}),
		table("raw", map[string][]ruleset.Rule{
			prerouting: b.rawPrerouting(), outHook: b.rawOutput(), inbound: b.rawInbound(), outputDNS: b.rawOutputDNS(),
		}),
	}, func(t ruleset.Table) bool { return len(t.Chains) == 0 })...)
}

// RejectAll refuses TCP and UDP of a family that the pod has and the mesh does not capture. Loopback stays, and so does
// ICMP, which IPv6 cannot work without.
func RejectAll(f ruleset.Family) ruleset.Set {
	refuse := "icmp6-port-unreachable"
	if f == ruleset.IPv4 {
		refuse = "icmp-port-unreachable"
	}
	jump := []ruleset.Rule{rule("this family is not captured: it must not run past the mesh", "-j %s", rejectAll)}
	return ruleset.New(f, table("filter", map[string][]ruleset.Rule{
		"INPUT": jump, outHook: jump,
		rejectAll: {
			rule("what comes in over loopback stays in the pod", "-i lo -j RETURN"),
			rule("what goes out over loopback stays in the pod", "-o lo -j RETURN"),
			rule("the refusal of an incoming connection gets out", "-p tcp -m tcp --tcp-flags RST RST -j RETURN"),
			rule("TCP is refused at once, so that clients try the other family", "-p tcp -j REJECT --reject-with tcp-reset"),
			rule("UDP is refused", "-p udp -j REJECT --reject-with %s", refuse),
		},
	}))
}

func table(name string, chains map[string][]ruleset.Rule) ruleset.Table {
	t := ruleset.Table{Name: name}
	for chain, rules := range chains {
		if len(rules) == 0 {
			continue
		}
		policy := ruleset.NoPolicy
		if ruleset.Builtin(name, chain) {
			policy = "ACCEPT"
		}
		t.Chains = append(t.Chains, ruleset.Chain{Name: chain, Policy: policy, Rules: rules})
	}
	return t
}

func rule(why, format string, args ...any) ruleset.Rule {
	return ruleset.Rule{Spec: fmt.Sprintf(format, args...), Why: why}
}

// builder is a Spec seen from one family.
type builder struct {
	Spec
	family ruleset.Family
	dns    dnsView
}

// loopback is the address that stands for the pod itself on lo.
func (b builder) loopback() string {
	if b.family == ruleset.IPv6 {
		return "::1/128"
	}
	return network(b.Loopback)
}

// passthrough is the source address of Envoy's connections to the app behind it.
func (b builder) passthrough() string {
	a := PassthroughAddress(b.family)
	return network(netip.PrefixFrom(a, a.BitLen()))
}

// networks are those of a list that belong to the family. An IPv4-mapped IPv6 network is IPv6.
func (b builder) networks(list []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(list), func(p netip.Prefix) bool {
		return p.Addr().Is4() != (b.family == ruleset.IPv4)
	})
}

// network prints a prefix as iptables does: masked.
func network(p netip.Prefix) string {
	p = p.Masked()
	return ruleset.Address(p.Addr()) + fmt.Sprintf("/%d", p.Bits())
}

// match gives "-d NET " (or -s), or nothing for a network that is everything: iptables does not print that.
func match(option string, p netip.Prefix) string {
	if p.Bits() == 0 {
		return ""
	}
	return option + " " + network(p) + " "
}

// not is the negated match on loopback. iptables prints even everything when it is negated.
func (b builder) notLoopback() string { return "! -d " + b.loopback() + " " }

// natPrerouting is where connections from outside enter: those of virtual machines first, which the reference inserts at
// the head one by one, so the last one named stands first.
func (b builder) natPrerouting() []ruleset.Rule {
	var rules, late []ruleset.Rule
	for _, v := range b.RerouteInterfaces {
		late = append(late, rule("other traffic of virtual interface "+v+" is not inbound", "-i %s -j RETURN", v))
	}
	late = append(late, b.vmRedirects()...)
	slices.Reverse(late)
	rules = append(rules, late...)
	for _, x := range b.ExcludeInterfaces {
		rules = append(rules, rule("interface "+x+" is excluded", "-i %s -j RETURN", x))
	}
	if !b.Inbound.Empty() && b.Mode == Redirect {
		rules = append(rules, rule("incoming TCP is looked at by the mesh", "-p tcp -j %s", inbound))
	}
	return rules
}

// vmRedirects send what virtual machines send out through the proxy, in the order of their insertion.
func (b builder) vmRedirects() []ruleset.Rule {
	var rules []ruleset.Rule
	if b.Outbound.All {
		for _, v := range b.RerouteInterfaces {
			rules = append(rules, rule("what virtual interface "+v+" sends is outbound", "-i %s -j %s", v, toProxy))
		}
		return rules
	}
	for _, p := range b.networks(b.Outbound.List) {
		for _, v := range b.RerouteInterfaces {
			rules = append(rules, rule("what virtual interface "+v+" sends to a captured network is outbound",
				"%s-i %s -j %s", match("-d", p), v, toProxy))
		}
	}
	return rules
}

func (b builder) natOutput() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, x := range b.ExcludeInterfaces {
		rules = append(rules, rule("interface "+x+" is excluded", "-o %s -j RETURN", x))
	}
	return append(rules, rule("everything the pod sends is looked at by the mesh", "-j %s", output))
}

// natInbound decides about incoming TCP under REDIRECT. Its first rule is there in TPROXY mode too, though nothing jumps
// here then.
func (b builder) natInbound() []ruleset.Rule {
	why := "HBONE tunnels go straight to the proxy's own port"
	if b.Mode == TPROXY {
		why = "nothing jumps here with TPROXY; the reference has the rule all the same"
	}
	rules := []ruleset.Rule{rule(why, "-p tcp -m tcp --dport %d -j RETURN", b.TunnelPort)}
	if b.Mode == TPROXY {
		return rules
	}
	if !b.Inbound.All {
		for _, p := range b.Inbound.List {
			rules = append(rules, rule("this inbound port is captured", "-p tcp -m tcp --dport %d -j %s", p, toInbound))
		}
		return rules
	}
	rules = append(rules, b.inboundExcluded()...)
	return append(rules, rule("every other inbound port is captured", "-p tcp -j %s", toInbound))
}

func (b builder) inboundExcluded() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.InboundExclude {
		rules = append(rules, rule("this inbound port is excluded", "-p tcp -m tcp --dport %d -j RETURN", p))
	}
	return rules
}

func (b builder) toProxy() []ruleset.Rule {
	return []ruleset.Rule{rule("outbound TCP goes to the proxy's outbound listener",
		"-p tcp -j REDIRECT --to-ports %d", b.OutboundPort)}
}

func (b builder) toInbound() []ruleset.Rule {
	return []ruleset.Rule{rule("inbound TCP goes to the proxy's inbound listener",
		"-p tcp -j REDIRECT --to-ports %d", b.InboundPort)}
}

// istioOutput decides about everything the pod sends. The order is the policy: excluded ports, the proxy's calls to the
// app, the proxy itself, owner groups, DNS, loopback, excluded networks, and then what is captured.
func (b builder) istioOutput() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.OutboundPortsExclude {
		rules = append(rules,
			rule("this outbound port is excluded", "-p tcp -m tcp --dport %d -j RETURN", p),
			rule("this outbound port is excluded", "-p udp -m udp --dport %d -j RETURN", p))
	}
	rules = append(rules, rule("the proxy hands an inbound connection to the app",
		"-s %s -o lo -j RETURN", b.passthrough()))
	for _, u := range b.UIDs {
		rules = append(rules, b.proxyOwner("uid", u)...)
	}
	for _, g := range b.GIDs {
		rules = append(rules, b.proxyOwner("gid", g)...)
	}
	rules = append(rules, b.ownerGroups()...)
	if b.dns.jump {
		rules = append(rules, rule("DNS goes to the sidecar agent", "-j %s", outputDNS))
	}
	rules = append(rules, rule("the pod talks to itself", "-d %s -j RETURN", b.loopback()))
	for _, p := range b.networks(b.OutboundExclude) {
		rules = append(rules, rule("this network is excluded", "%s-j RETURN", match("-d", p)))
	}
	return append(rules, b.captured()...)
}

// proxyOwner gives the rules for one identity of the proxy; kind is uid or gid. The exception of port 53 keeps the app's
// DNS queries to a resolver on lo out of Envoy's inbound listener; for a gid the reference has it in the second rule
// only.
func (b builder) proxyOwner(kind string, id uint32) []ruleset.Rule {
	ports := fmt.Sprintf("-m tcp ! --dport %d", b.TunnelPort)
	if b.dns.on() && kind == "uid" {
		ports = fmt.Sprintf("-m multiport ! --dports 53,%d", b.TunnelPort)
	}
	notDNS := ""
	if b.dns.on() {
		notDNS = "-p tcp -m tcp ! --dport 53 "
	}
	rules := []ruleset.Rule{rule("the proxy calls its own pod: through the inbound listener",
		"%s-o lo -p tcp %s -m owner --%s-owner %d -j %s", b.notLoopback(), ports, kind, id, toInbound)}
	if !b.CapturesLoopback() {
		rules = append(rules, rule("the app calls its own pod: directly",
			"-o lo %s-m owner ! --%s-owner %d -j RETURN", notDNS, kind, id))
	}
	return append(rules, rule("the proxy itself is never captured: no loops",
		"-m owner --%s-owner %d -j RETURN", kind, id))
}

func (b builder) ownerGroups() []ruleset.Rule {
	if !b.OwnerGroups.All {
		var spec strings.Builder
		for _, g := range b.OwnerGroups.List {
			fmt.Fprintf(&spec, "-m owner ! --gid-owner %d ", g)
		}
		why := "only the listed groups are captured"
		if len(b.OwnerGroups.List) == 0 {
			why = "nobody is captured: the list of groups is empty"
		}
		return []ruleset.Rule{rule(why, "%s-j RETURN", spec.String())}
	}
	var rules []ruleset.Rule
	for _, g := range b.OwnerGroupsExclude {
		rules = append(rules, rule("this group is excluded", "-m owner --gid-owner %d -j RETURN", g))
	}
	return rules
}

func (b builder) captured() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.OutboundPorts {
		rules = append(rules, rule("this outbound port is captured in all other networks",
			"-p tcp -m tcp --dport %d -j %s", p, toProxy))
	}
	if b.Outbound.All {
		return append(rules, rule("all other TCP is captured", "-j %s", toProxy))
	}
	for _, p := range b.networks(b.Outbound.List) {
		rules = append(rules, rule("this network is captured", "%s-j %s", match("-d", p), toProxy))
	}
	return rules
}
