package nftables_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// nftReference writes the input that the reference gives nft, in the order in which it emits its rules and in its spelling. It
// shares nothing with the code under test. Each rule has the name of its row in the description of the reference.
type nftReference struct {
	redirect.Spec
	ipv6   bool
	chains map[string][]string // rules by "table chain"
}

// at puts a rule where the reference inserts it: at a place counted from 0, or at the end if there is none such.
func (r *nftReference) at(place int, table, chain, format string, args ...any) {
	key := "istio-proxy-" + table + " " + chain
	rules := r.chains[key]
	if place >= len(rules) {
		place = len(rules)
	}
	r.chains[key] = slices.Insert(rules, place, fmt.Sprintf(format, args...))
}

func (r *nftReference) add(table, chain, format string, args ...any) {
	r.at(1<<20, table, chain, format, args...)
}

// add6 adds a rule that is for IPv6 alone.
func (r *nftReference) add6(table, chain, format string, args ...any) {
	if r.ipv6 {
		r.add(table, chain, format, args...)
	}
}

// cidrs returns those of both families, IPv4 first, each with the word for its family.
func (r *nftReference) cidrs(list []netip.Prefix) (out []string) {
	var six []string
	for _, p := range list {
		if p.Addr().Is4() {
			out = append(out, "ip %s "+p.String())
		} else if r.ipv6 {
			six = append(six, "ip6 %s "+p.String()) // nft takes no dotted address of IPv6 but a mapped one
		}
	}
	return append(out, six...)
}

func nftScript(s redirect.Spec, ipv6 bool) string {
	r := &nftReference{Spec: s, ipv6: ipv6, chains: map[string][]string{}}
	r.interfaces()
	r.inbound()
	r.outbound()
	r.dns()
	r.outboundEnd()
	r.tproxy()
	return r.script()
}

func (r *nftReference) script() string {
	bases := map[string]string{
		"istio-proxy-nat prerouting": "nat hook prerouting priority -100", "istio-proxy-nat output": "nat hook output priority -100",
		"istio-proxy-mangle prerouting": "filter hook prerouting priority -150", "istio-proxy-mangle output": "route hook output priority -150",
		"istio-proxy-raw prerouting": "filter hook prerouting priority -300", "istio-proxy-raw output": "filter hook output priority -300",
	}
	order := map[string]string{
		"nat":    "prerouting output istio-inbound istio-redirect istio-in-redirect istio-output istio-output-dns",
		"mangle": "prerouting output istio-divert istio-tproxy istio-inbound istio-drop",
		"raw":    "prerouting output istio-inbound istio-output-dns",
	}
	var b strings.Builder
	for _, table := range []string{"nat", "mangle", "raw"} {
		var chains, rules strings.Builder
		for name := range strings.FieldsSeq(order[table]) {
			key := "istio-proxy-" + table + " " + name
			if len(r.chains[key]) == 0 {
				continue
			}
			base := ""
			if hook, ok := bases[key]; ok {
				base = "{ type " + hook + " ; }"
			}
			fmt.Fprintf(&chains, "add chain inet %s %s\n", key, base)
			for _, rule := range r.chains[key] {
				fmt.Fprintf(&rules, "add rule inet %s %s\n", key, rule)
			}
		}
		if chains.Len() > 0 {
			fmt.Fprintf(&b, "add table inet istio-proxy-%s\nflush table inet istio-proxy-%s\n%s%s", table, table, &chains, &rules)
		}
	}
	return b.String()
}

func (r *nftReference) interfaces() {
	for _, x := range r.ExcludeInterfaces {
		r.add("nat", "prerouting", "iifname %s counter return", x) // E1
		r.add("nat", "output", "oifname %s counter return", x)     // E2
		if r.Mode == redirect.TPROXY {
			r.add("mangle", "prerouting", "iifname %s counter return", x) // E3
			r.add("mangle", "output", "oifname %s counter return", x)     // E4
		}
	}
	for _, v := range r.RerouteInterfaces {
		r.at(0, "nat", "prerouting", "iifname %s counter return", v) // K1
	}
	if r.DropInvalid {
		r.add("mangle", "prerouting", "ct state invalid counter jump istio-drop") // D1, as with iptables
		r.add("mangle", "istio-drop", "counter drop")                             // D2
	}
}

func (r *nftReference) inbound() {
	r.add("nat", "istio-inbound", "meta l4proto tcp tcp dport %d counter return", r.TunnelPort)  // N1
	r.add("nat", "istio-redirect", "meta l4proto tcp counter redirect to :%d", r.OutboundPort)   // N2
	r.add("nat", "istio-in-redirect", "meta l4proto tcp counter redirect to :%d", r.InboundPort) // N3
	if !r.Inbound.All && len(r.Inbound.List) == 0 {
		return
	}
	table, to, tproxy := "nat", "istio-in-redirect", r.Mode == redirect.TPROXY
	if tproxy {
		table, to = "mangle", "istio-tproxy"
		r.add("mangle", "istio-divert", "counter meta mark set %d", r.Mark) // T1
		r.add("mangle", "istio-divert", "counter accept")                   // T2
		r.add("mangle", "istio-tproxy", "meta l4proto tcp ip daddr != %s tproxy ip to :%d meta mark set %d counter accept",
			r.Loopback, r.InboundPort, r.Mark) // T3
		r.add("mangle", "istio-tproxy", "meta l4proto tcp ip daddr != %s counter drop", r.Loopback) // as iptables' target does
		r.add6("mangle", "istio-tproxy", "meta l4proto tcp ip6 daddr != ::1/128 tproxy ip6 to :%d meta mark set %d counter accept",
			r.InboundPort, r.Mark)
		r.add6("mangle", "istio-tproxy", "meta l4proto tcp ip6 daddr != ::1/128 counter drop")
	}
	r.add(table, "prerouting", "meta l4proto tcp counter jump istio-inbound") // I1
	if r.Inbound.All {
		for _, p := range r.InboundExclude {
			r.add(table, "istio-inbound", "meta l4proto tcp tcp dport %s counter return", p) // I2
		}
		if tproxy {
			r.add(table, "istio-inbound", "meta l4proto tcp ct state related,established counter jump istio-divert") // I4
		}
		r.add(table, "istio-inbound", "meta l4proto tcp counter jump %s", to) // I3, I5
	}
	for _, p := range r.Inbound.List {
		if tproxy {
			r.add(table, "istio-inbound", "meta l4proto tcp ct state related,established tcp dport %s counter jump istio-divert", p) // I7
		}
		r.add(table, "istio-inbound", "meta l4proto tcp tcp dport %s counter jump %s", p, to) // I6, I8
	}
}

func (r *nftReference) dnsOn() bool {
	return r.DNS == redirect.DNSAll || r.DNS == redirect.DNSServers && len(r.DNSServers) > 0
}

func (r *nftReference) outbound() {
	const chain = "istio-output"
	r.add("nat", "output", "counter jump istio-output") // O1
	for _, p := range r.OutboundPortsExclude {
		r.add("nat", chain, "tcp dport %s counter return", p) // O2
		r.add("nat", chain, "udp dport %s counter return", p)
	}
	r.add("nat", chain, "oifname lo ip saddr 127.0.0.6/32 counter return") // O3
	r.add6("nat", chain, "oifname lo ip6 saddr ::6/128 counter return")
	r.identities(r.identity)
	if r.OwnerGroups.All {
		for _, g := range r.OwnerGroupsExclude {
			r.add("nat", chain, "skgid %d counter return", g) // W1
		}
		return
	}
	all := ""
	for _, g := range r.OwnerGroups.List {
		all += fmt.Sprintf("skgid != %d ", g)
	}
	r.add("nat", chain, "%scounter return", all) // W2
}

// identities calls back with each identity of the proxy: users, then groups.
func (r *nftReference) identities(do func(kind string, id uint32)) {
	for _, id := range r.UIDs {
		do("skuid", id)
	}
	for _, id := range r.GIDs {
		do("skgid", id)
	}
}

func (r *nftReference) identity(kind string, id uint32) {
	const chain = "istio-output"
	ports, notDNS := fmt.Sprintf("!= %d", r.TunnelPort), ""
	if r.dnsOn() {
		notDNS = "meta l4proto tcp tcp dport != 53 "
		switch {
		case kind == "skuid" && r.TunnelPort == 53: // the reference writes { 53, 53 }, which means the same
			ports = "!= 53"
		case kind == "skuid":
			ports = fmt.Sprintf("!= { 53, %d }", r.TunnelPort)
		}
	}
	r.add("nat", chain, "oifname lo meta l4proto tcp ip daddr != %s tcp dport %s %s %d counter jump istio-in-redirect", r.Loopback, ports, kind, id) // U1, G1
	r.add6("nat", chain, "oifname lo meta l4proto tcp ip6 daddr != ::1/128 tcp dport %s %s %d counter jump istio-in-redirect", ports, kind, id)
	if !slices.ContainsFunc(r.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() }) {
		r.add("nat", chain, "oifname lo %s%s != %d counter return", notDNS, kind, id) // U2, G2
	}
	r.add("nat", chain, "%s %d counter return", kind, id) // U3, G3
}

func (r *nftReference) dns() {
	if !r.dnsOn() {
		return
	}
	queries := []string{""}
	if r.DNS == redirect.DNSServers {
		var hosts []netip.Prefix
		for _, a := range r.DNSServers {
			hosts = append(hosts, netip.PrefixFrom(a, a.BitLen()))
		}
		queries = r.cidrs(hosts)
	}
	side := func(q, name string) string {
		if q == "" {
			return ""
		}
		return fmt.Sprintf(q, name) + " "
	}
	if len(queries) > 0 {
		r.add("nat", "istio-output", "counter jump istio-output-dns") // DN1, only if the chain is there
		r.add("raw", "prerouting", "counter jump istio-inbound")      // DZ3
	}
	for _, proto := range []string{"tcp", "udp"} {
		for _, q := range queries {
			r.add("nat", "istio-output-dns", "%s%s dport 53 counter redirect to :15053", side(q, "daddr"), proto) // DN2, DN3
		}
	}
	r.identities(func(kind string, id uint32) {
		r.add("raw", "istio-output-dns", "udp dport 53 meta %s %d counter ct zone set 1", kind, id) // DZ1, DZ2
		r.add("raw", "istio-output-dns", "udp sport 15053 meta %s %d counter ct zone set 2", kind, id)
	})
	for _, q := range queries {
		r.add("raw", "istio-output-dns", "udp dport 53 %scounter ct zone set 2", side(q, "daddr")) // DZ4
		r.add("raw", "istio-inbound", "udp sport 53 %scounter ct zone set 1", side(q, "saddr"))    // DZ5
	}
	r.add("raw", "output", "counter jump istio-output-dns") // DR1
}

func (r *nftReference) outboundEnd() {
	const chain = "istio-output"
	r.add("nat", chain, "ip daddr %s counter return", r.Loopback) // L1
	r.add6("nat", chain, "ip6 daddr ::1/128 counter return")
	for _, c := range r.cidrs(r.OutboundExclude) {
		r.add("nat", chain, c+" counter return", "daddr") // X1
	}
	for _, p := range r.OutboundPorts {
		r.add("nat", chain, "tcp dport %s counter jump istio-redirect", p) // P1
	}
	if r.Outbound.All {
		r.add("nat", chain, "counter jump istio-redirect") // R1
		for _, v := range r.RerouteInterfaces {
			r.at(0, "nat", "prerouting", "iifname %s counter jump istio-redirect", v) // R2
		}
		return
	}
	for _, c := range r.cidrs(r.Outbound.List) {
		for _, v := range r.RerouteInterfaces {
			r.at(0, "nat", "prerouting", "iifname %s "+c+" counter jump istio-redirect", v, "daddr") // R3
		}
		r.add("nat", chain, c+" counter jump istio-redirect", "daddr") // R4
	}
}

func (r *nftReference) tproxy() {
	if r.Mode != redirect.TPROXY {
		return
	}
	r.add("mangle", "prerouting", "meta l4proto tcp mark %d counter ct mark set mark", r.Mark) // M1
	r.add("mangle", "output", "oifname lo meta l4proto tcp mark %d counter return", r.Mark)    // M2
	r.identities(func(kind string, id uint32) {                                                // M3
		r.add("mangle", "output", "oifname lo meta l4proto tcp ip daddr != %s %s %d counter meta mark set 1338", r.Loopback, kind, id)
		r.add6("mangle", "output", "oifname lo meta l4proto tcp ip6 daddr != ::1/128 %s %d counter meta mark set 1338", kind, id)
	})
	r.add("mangle", "output", "meta l4proto tcp ct mark %d counter meta mark set ct mark", r.Mark)         // M4
	r.at(0, "mangle", "istio-inbound", "meta l4proto tcp mark %d counter return", r.Mark)                  // M5
	r.at(1, "mangle", "istio-inbound", "iifname lo meta l4proto tcp ip saddr 127.0.0.6/32 counter return") // M6
	if r.ipv6 {
		r.at(1, "mangle", "istio-inbound", "iifname lo meta l4proto tcp ip6 saddr ::6/128 counter return")
	}
	r.at(2, "mangle", "istio-inbound", "iifname lo meta l4proto tcp mark != 1338 counter return") // M7
}
