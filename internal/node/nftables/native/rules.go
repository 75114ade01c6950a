package native

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Conntrack zones of DNS over UDP, as package redirect has them.
const (
	zoneAgent = 1
	zoneApp   = 2
)

// Rules gives the tables that capture a pod as the Spec says. They differ from the reference's in what lets its rules
// fail or packets pass: packets that fit no connection are dropped whatever their protocol; so are connections that TPROXY
// cannot hand over, as by iptables' target of that name; no rule jumps to a chain that is not there; and a family that is
// to be refused is.
//
// Rules that name no address are met by both families. Where IPv6 is to pass the mesh by, it leaves the tables at once;
// the reference captures it there all the same.
func Rules(s redirect.Spec, f redirect.Families) ruleset.Set {
	b := builder{Spec: s, ipv6: f.IPv6 == redirect.Captured}
	b.servers()
	set := ruleset.Set{Family: Inet}
	for _, t := range []ruleset.Table{
		table(NAT, chain{prerouting, b.natPrerouting()}, chain{output, b.natOutput()}, chain{inbound, b.natInbound()},
			chain{toProxy, b.redirectTo("outbound TCP goes to the proxy's outbound listener", s.OutboundPort)},
			chain{toInbound, b.redirectTo("inbound TCP goes to the proxy's inbound listener", s.InboundPort)},
			chain{outbound, b.istioOutput()}, chain{outputDNS, b.natOutputDNS()}),
		table(Mangle, chain{prerouting, b.manglePrerouting()}, chain{output, b.mangleOutput()}, chain{divert, b.divert()},
			chain{tproxy, b.tproxy()}, chain{inbound, b.mangleInbound()}, chain{dropChain, b.drop()}),
		table(Raw, chain{prerouting, b.rawPrerouting()}, chain{output, b.rawOutput()}, chain{inbound, b.rawInbound()},
			chain{outputDNS, b.rawOutputDNS()}),
		rejected(f.IPv6 == redirect.Rejected),
	} {
		if len(t.Chains) == 0 {
			continue
		}
		if f.IPv6 == redirect.Bypassed {
			passIPv6(t)
		}
		set.Tables = append(set.Tables, t)
	}
	return set
}

// passIPv6 makes the chains that packets come by let IPv6 pass.
func passIPv6(t ruleset.Table) {
	for i, c := range t.Chains {
		if c.Name == prerouting || c.Name == output {
			pass := rule("IPv6 bypasses the mesh", "meta nfproto ipv6 counter return")
			t.Chains[i].Rules = append([]ruleset.Rule{pass}, c.Rules...)
		}
	}
}

type chain struct {
	name  string
	rules []ruleset.Rule
}

// table holds the chains that have rules.
func table(name string, chains ...chain) ruleset.Table {
	t := ruleset.Table{Name: name}
	for _, c := range chains {
		if len(c.rules) > 0 {
			t.Chains = append(t.Chains, ruleset.Chain{Name: c.name, Policy: ruleset.NoPolicy, Rules: c.rules})
		}
	}
	return t
}

func rule(why, format string, args ...any) ruleset.Rule {
	return ruleset.Rule{Spec: fmt.Sprintf(format, args...), Why: why}
}

type builder struct {
	redirect.Spec
	ipv6 bool
	// dns says that DNS is captured at all; queries are the matches that select it, "" for all.
	dns     bool
	queries []string // with %s for daddr or saddr
}

// servers finds out which DNS queries are captured. Servers of a family that is not captured are not asked by anybody.
func (b *builder) servers() {
	b.dns = b.DNS == redirect.DNSAll || b.DNS == redirect.DNSServers && len(b.DNSServers) > 0
	switch b.DNS {
	case redirect.DNSAll:
		b.queries = []string{""}
	case redirect.DNSServers:
		var hosts []netip.Prefix
		for _, a := range b.DNSServers {
			hosts = append(hosts, netip.PrefixFrom(a, a.BitLen()))
		}
		for _, p := range b.networks(hosts) {
			b.queries = append(b.queries, address(p, "%s")+" ")
		}
	case redirect.DNSOff:
	}
}

// networks are those of the captured families, IPv4 first.
func (b *builder) networks(list []netip.Prefix) []netip.Prefix {
	ordered := slices.Clone(list)
	slices.SortStableFunc(ordered, func(x, y netip.Prefix) int { return x.Addr().BitLen() - y.Addr().BitLen() })
	return slices.DeleteFunc(ordered, func(p netip.Prefix) bool { return p.Addr().Is6() && !b.ipv6 })
}

// address is a match on a network; side is daddr or saddr, with != behind it if the match is negated.
func address(p netip.Prefix, side string) string {
	family, p := "ip", p.Masked()
	if p.Addr().Is6() {
		family = "ip6"
	}
	text := family + " " + side + " " + ruleset.Address(p.Addr())
	if !p.IsSingleIP() {
		text += fmt.Sprintf("/%d", p.Bits())
	}
	return text
}

// loopbacks are the pod's own addresses on lo.
func (b *builder) loopbacks() []netip.Prefix {
	return b.networks([]netip.Prefix{b.Loopback, netip.MustParsePrefix("::1/128")})
}

// passthroughs are the source addresses of Envoy's connections to the app behind it.
func (b *builder) passthroughs() []netip.Prefix {
	var all []netip.Prefix
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		a := redirect.PassthroughAddress(f)
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return b.networks(all)
}

// tproxyInbound reports whether incoming connections are handed over by TPROXY.
func (b *builder) tproxyInbound() bool { return b.Mode == redirect.TPROXY && !b.Inbound.Empty() }

func (b *builder) natPrerouting() []ruleset.Rule {
	var late []ruleset.Rule
	for _, v := range b.RerouteInterfaces {
		late = append(late, rule("other traffic of virtual interface "+v+" is not inbound", `iifname "%s" counter return`, v))
	}
	late = append(late, b.vmRedirects()...)
	slices.Reverse(late) // the reference inserts them at the head one by one
	rules := append(late, b.excluded("iifname")...)
	if !b.Inbound.Empty() && b.Mode == redirect.Redirect {
		rules = append(rules, rule("incoming TCP is looked at by the mesh", "meta l4proto tcp counter jump %s", inbound))
	}
	return rules
}

// excluded lets what passes excluded interfaces alone.
func (b *builder) excluded(direction string) []ruleset.Rule {
	var rules []ruleset.Rule
	for _, x := range b.ExcludeInterfaces {
		rules = append(rules, rule("interface "+x+" is excluded", `%s "%s" counter return`, direction, x))
	}
	return rules
}

// vmRedirects send what virtual machines send out through the proxy, in the order of their insertion.
func (b *builder) vmRedirects() []ruleset.Rule {
	var rules []ruleset.Rule
	if b.Outbound.All {
		for _, v := range b.RerouteInterfaces {
			rules = append(rules, rule("what virtual interface "+v+" sends is outbound", `iifname "%s" counter jump %s`, v, toProxy))
		}
		return rules
	}
	for _, p := range b.networks(b.Outbound.List) {
		for _, v := range b.RerouteInterfaces {
			rules = append(rules, rule("what virtual interface "+v+" sends to a captured network is outbound",
				`iifname "%s" %s counter jump %s`, v, address(p, "daddr"), toProxy))
		}
	}
	return rules
}

func (b *builder) natOutput() []ruleset.Rule {
	return append(b.excluded("oifname"), rule("everything the pod sends is looked at by the mesh", "counter jump %s", outbound))
}

func (b *builder) natInbound() []ruleset.Rule {
	rules := []ruleset.Rule{rule("HBONE tunnels go straight to the proxy's own port", "tcp dport %d counter return", b.TunnelPort)}
	if b.Mode == redirect.TPROXY {
		return rules
	}
	if !b.Inbound.All {
		for _, p := range b.Inbound.List {
			rules = append(rules, rule("this inbound port is captured", "tcp dport %d counter jump %s", p, toInbound))
		}
		return rules
	}
	rules = append(rules, b.inboundExcluded()...)
	return append(rules, rule("every other inbound port is captured", "meta l4proto tcp counter jump %s", toInbound))
}

func (b *builder) inboundExcluded() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.InboundExclude {
		rules = append(rules, rule("this inbound port is excluded", "tcp dport %d counter return", p))
	}
	return rules
}

func (b *builder) redirectTo(why string, port uint16) []ruleset.Rule {
	return []ruleset.Rule{rule(why, "meta l4proto tcp counter redirect to :%d", port)}
}

// istioOutput decides about everything the pod sends; the order is the policy, as with iptables.
func (b *builder) istioOutput() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.OutboundPortsExclude {
		rules = append(rules, rule("this outbound port is excluded", "tcp dport %d counter return", p),
			rule("this outbound port is excluded", "udp dport %d counter return", p))
	}
	for _, p := range b.passthroughs() {
		rules = append(rules, rule("the proxy hands an inbound connection to the app", `oifname "lo" %s counter return`, address(p, "saddr")))
	}
	for _, u := range b.UIDs {
		rules = append(rules, b.proxyOwner("skuid", u)...)
	}
	for _, g := range b.GIDs {
		rules = append(rules, b.proxyOwner("skgid", g)...)
	}
	rules = append(rules, b.ownerGroups()...)
	if len(b.queries) > 0 {
		rules = append(rules, rule("DNS goes to the sidecar agent", "counter jump %s", outputDNS))
	}
	for _, p := range b.loopbacks() {
		rules = append(rules, rule("the pod talks to itself", "%s counter return", address(p, "daddr")))
	}
	for _, p := range b.networks(b.OutboundExclude) {
		rules = append(rules, rule("this network is excluded", "%s counter return", address(p, "daddr")))
	}
	return append(rules, b.captured()...)
}

// proxyOwner gives the rules for one identity of the proxy; kind is skuid or skgid.
func (b *builder) proxyOwner(kind string, id uint32) []ruleset.Rule {
	ports := fmt.Sprintf("tcp dport != %d", b.TunnelPort)
	if b.dns && kind == "skuid" {
		// A set of one port is none: nft, too, makes a comparison of it.
		p := portTerm{protocol: tcp, negated: true, ports: []uint16{53, b.TunnelPort}}.canonical()
		p.set = len(p.ports) > 1
		ports = p.String()
	}
	notDNS := ""
	if b.dns {
		notDNS = "tcp dport != 53 "
	}
	var rules []ruleset.Rule
	for _, p := range b.loopbacks() {
		rules = append(rules, rule("the proxy calls its own pod: through the inbound listener",
			`oifname "lo" meta l4proto tcp %s %s meta %s %d counter jump %s`, address(p, "daddr !="), ports, kind, id, toInbound))
	}
	if !b.CapturesLoopback() {
		rules = append(rules, rule("the app calls its own pod: directly",
			`oifname "lo" %smeta %s != %d counter return`, notDNS, kind, id))
	}
	return append(rules, rule("the proxy itself is never captured: no loops", "meta %s %d counter return", kind, id))
}

func (b *builder) ownerGroups() []ruleset.Rule {
	if !b.OwnerGroups.All {
		var spec strings.Builder
		for _, g := range b.OwnerGroups.List {
			fmt.Fprintf(&spec, "meta skgid != %d ", g)
		}
		return []ruleset.Rule{rule("only the listed groups are captured", "%scounter return", &spec)}
	}
	var rules []ruleset.Rule
	for _, g := range b.OwnerGroupsExclude {
		rules = append(rules, rule("this group is excluded", "meta skgid %d counter return", g))
	}
	return rules
}

func (b *builder) captured() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range b.OutboundPorts {
		rules = append(rules, rule("this outbound port is captured in all other networks", "tcp dport %d counter jump %s", p, toProxy))
	}
	if b.Outbound.All {
		return append(rules, rule("all other TCP is captured", "counter jump %s", toProxy))
	}
	for _, p := range b.networks(b.Outbound.List) {
		rules = append(rules, rule("this network is captured", "%s counter jump %s", address(p, "daddr"), toProxy))
	}
	return rules
}

// natOutputDNS sends queries to the agent: TCP first, then UDP.
func (b *builder) natOutputDNS() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, proto := range []string{"tcp", "udp"} {
		for _, q := range b.queries {
			rules = append(rules, rule("DNS goes to the sidecar agent",
				"%s%s dport 53 counter redirect to :%d", side(q, "daddr"), proto, redirect.DNSPort))
		}
	}
	return rules
}

// side puts daddr or saddr into a match on a server.
func side(query, name string) string {
	if query == "" {
		return ""
	}
	return fmt.Sprintf(query, name)
}

func (b *builder) rawOutput() []ruleset.Rule {
	if len(b.rawOutputDNS()) == 0 {
		return nil
	}
	return []ruleset.Rule{rule("DNS gets conntrack zones", "counter jump %s", outputDNS)}
}

func (b *builder) rawPrerouting() []ruleset.Rule {
	if len(b.queries) == 0 {
		return nil
	}
	return []ruleset.Rule{rule("answers of the real resolver get their zone", "counter jump %s", inbound)}
}

func (b *builder) rawOutputDNS() []ruleset.Rule {
	if !b.dns {
		return nil
	}
	var rules []ruleset.Rule
	owner := func(kind string, id uint32) {
		rules = append(rules,
			rule("the agent asks the real resolver", "udp dport 53 meta %s %d counter ct zone set %d", kind, id, zoneAgent),
			rule("the agent answers the app", "udp sport %d meta %s %d counter ct zone set %d", redirect.DNSPort, kind, id, zoneApp))
	}
	for _, u := range b.UIDs {
		owner("skuid", u)
	}
	for _, g := range b.GIDs {
		owner("skgid", g)
	}
	for _, q := range b.queries {
		rules = append(rules, rule("the app asks", "udp dport 53 %scounter ct zone set %d", side(q, "daddr"), zoneApp))
	}
	return rules
}

func (b *builder) rawInbound() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, q := range b.queries {
		rules = append(rules, rule("the real resolver answers the agent",
			"udp sport 53 %scounter ct zone set %d", side(q, "saddr"), zoneAgent))
	}
	return rules
}

func (b *builder) manglePrerouting() []ruleset.Rule {
	var rules []ruleset.Rule
	if b.Mode == redirect.TPROXY {
		rules = b.excluded("iifname")
	}
	if b.DropInvalid {
		rules = append(rules, rule("packets that fit no connection are dropped", "ct state invalid counter jump %s", dropChain))
	}
	if b.tproxyInbound() {
		rules = append(rules, rule("incoming TCP is looked at by the mesh", "meta l4proto tcp counter jump %s", inbound))
	}
	if b.Mode == redirect.TPROXY {
		rules = append(rules, rule("the proxy's mark is kept with the connection",
			"meta l4proto tcp meta mark 0x%08x counter ct mark set meta mark", b.Mark))
	}
	return rules
}

func (b *builder) mangleOutput() []ruleset.Rule {
	if b.Mode != redirect.TPROXY {
		return nil
	}
	rules := append(b.excluded("oifname"), rule("the proxy's connection to the app is marked already",
		`oifname "lo" meta l4proto tcp meta mark 0x%08x counter return`, b.Mark))
	self := func(kind string, id uint32) {
		for _, p := range b.loopbacks() {
			rules = append(rules, rule("the proxy calls its own pod: the inbound listener must see it",
				`oifname "lo" meta l4proto tcp %s meta %s %d counter meta mark set 0x%08x`,
				address(p, "daddr !="), kind, id, redirect.SelfMark))
		}
	}
	for _, u := range b.UIDs {
		self("skuid", u)
	}
	for _, g := range b.GIDs {
		self("skgid", g)
	}
	return append(rules, rule("the app's replies get the connection's mark back and return to the proxy",
		"meta l4proto tcp ct mark 0x%08x counter meta mark set ct mark", b.Mark))
}

// mangleInbound begins with what the reference inserts one by one: each family's second rule goes to the second place.
func (b *builder) mangleInbound() []ruleset.Rule {
	if b.Mode != redirect.TPROXY {
		return nil
	}
	rules := []ruleset.Rule{rule("the proxy's own connection to the app", "meta l4proto tcp meta mark 0x%08x counter return", b.Mark)}
	for _, p := range b.passthroughs() {
		rules = slices.Insert(rules, 1, rule("the proxy hands an inbound connection to the app",
			`iifname "lo" meta l4proto tcp %s counter return`, address(p, "saddr")))
	}
	rules = slices.Insert(rules, 2, rule("the app calls its own pod: directly",
		`iifname "lo" meta l4proto tcp meta mark != 0x%08x counter return`, redirect.SelfMark))
	if b.Inbound.All {
		rules = append(rules, b.inboundExcluded()...)
		return append(rules,
			rule("a known connection of the proxy: deliver it locally", "meta l4proto tcp ct state established,related counter jump %s", divert),
			rule("a new connection: hand it to the proxy", "meta l4proto tcp counter jump %s", tproxy))
	}
	for _, p := range b.Inbound.List {
		rules = append(rules,
			rule("a known connection of the proxy: deliver it locally",
				"meta l4proto tcp ct state established,related tcp dport %d counter jump %s", p, divert),
			rule("a new connection: hand it to the proxy", "tcp dport %d counter jump %s", p, tproxy))
	}
	return rules
}

func (b *builder) divert() []ruleset.Rule {
	if !b.tproxyInbound() {
		return nil
	}
	return []ruleset.Rule{
		rule("the mark routes the packet to this pod", "counter meta mark set 0x%08x", b.Mark),
		rule("the packet is accepted, so that no later rule of this table changes it", "counter accept"),
	}
}

func (b *builder) tproxy() []ruleset.Rule {
	if !b.tproxyInbound() {
		return nil
	}
	var rules []ruleset.Rule
	for _, p := range b.loopbacks() {
		family := "ip"
		if p.Addr().Is6() {
			family = "ip6"
		}
		rules = append(rules, rule("the proxy's inbound listener takes the connection, both addresses kept",
			"meta l4proto tcp %s tproxy %s to :%d meta mark set 0x%08x counter accept", address(p, "daddr !="), family, b.InboundPort, b.Mark),
			rule("the proxy does not listen: the connection must not reach the app instead",
				"meta l4proto tcp %s counter drop", address(p, "daddr !=")))
	}
	return rules
}

func (b *builder) drop() []ruleset.Rule {
	if !b.DropInvalid {
		return nil
	}
	return []ruleset.Rule{rule("packets that fit no connection are dropped", "counter drop")}
}

// rejected refuses TCP and UDP of IPv6, if that is wanted. Loopback stays, and so does ICMP, which IPv6 cannot work
// without.
func rejected(wanted bool) ruleset.Table {
	if !wanted {
		return ruleset.Table{}
	}
	jump := []ruleset.Rule{rule("IPv6 is not captured: it must not run past the mesh", "meta nfproto ipv6 counter jump %s", rejectAll)}
	return table(Filter, chain{input, jump}, chain{output, jump}, chain{rejectAll, []ruleset.Rule{
		rule("what comes in over loopback stays in the pod", `iifname "lo" counter return`),
		rule("what goes out over loopback stays in the pod", `oifname "lo" counter return`),
		rule("the refusal of an incoming connection gets out", "tcp flags & rst == rst counter return"),
		rule("TCP is refused at once, so that clients try the other family", "meta l4proto tcp counter reject with tcp reset"),
		rule("UDP is refused", "meta nfproto ipv6 meta l4proto udp counter reject with icmpv6 port-unreachable"),
	}})
}
