// Package referencetest writes the rules of a Spec as the reference implementation does: in the order in which it emits
// them, and in its spelling, as text for iptables-restore or for nft.
//
// It promises to share nothing with the code that it checks: one rule of the reference is one call here, with its text for iptables and
// for nft, under the name that its row has in the description of the reference's rules (E1, K1, D1 …). It neither sorts the
// rules by their evaluation nor prints them as the kernel's tools do: tests pass the text to the tools and read the result.
//
// Start at Restore and Script. It is for tests only.
package referencetest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Restore returns the input that the reference gives "iptables-restore --noflush" for one family, if it programs that
// family at all.
func Restore(s redirect.Spec, f ruleset.Family) string {
	return emit(&document{Spec: s, families: []ruleset.Family{f}}).restore()
}

// Script returns the input that the reference gives nft.
func Script(s redirect.Spec, ipv6 bool) string {
	d := &document{Spec: s, families: []ruleset.Family{ruleset.IPv4}, native: true}
	if ipv6 {
		d.families = append(d.families, ruleset.IPv6)
	}
	return emit(d).script()
}

func emit(d *document) *document {
	d.interfaces()
	d.inbound()
	d.outboundStart()
	d.identities(d.identity)
	d.ownerGroups()
	d.dns()
	d.outboundEnd()
	d.tproxy()
	return d
}

// document is a text on its way: of one family, or of native tables for all of its families.
type document struct {
	redirect.Spec
	families []ruleset.Family
	native   bool
	rules    []rule
}

// rule is one emitted line. At position 0 it is appended, otherwise inserted there.
type rule struct {
	table, chain string
	position     int
	text         string
}

// add appends a rule to "TABLE CHAIN", of which both texts have the arguments.
func (d *document) add(at, iptables, nft string, args ...any) {
	d.insert(0, at, iptables, nft, args...)
}

func (d *document) insert(position int, at, iptables, nft string, args ...any) {
	table, chain, _ := strings.Cut(at, " ")
	d.rules = append(d.rules, rule{table, chain, position, fmt.Sprintf(d.either(iptables, nft), args...)})
}

func (d *document) either(iptables, nft string) string {
	if d.native {
		return nft
	}
	return iptables
}

// each calls back with each family: the pod's own addresses, the proxy's source, and nft's word for the family.
func (d *document) each(do func(loopback, six, ip string)) {
	for _, f := range d.families {
		if f == ruleset.IPv6 {
			do("::1/128", "::6/128", "ip6")
		} else {
			do(d.Loopback.String(), "127.0.0.6/32", "ip")
		}
	}
}

// networks calls back with the networks of the families, IPv4 first, as matches of the destination and of the source. An IPv4 network
// written as IPv6 is IPv6.
func (d *document) networks(list []netip.Prefix, do func(destination, source string)) {
	for _, f := range d.families {
		for _, p := range list {
			switch ip := map[ruleset.Family]string{ruleset.IPv4: "ip", ruleset.IPv6: "ip6"}[f]; {
			case p.Addr().Is4() != (f == ruleset.IPv4):
			case d.native:
				do(fmt.Sprintf("%s daddr %s ", ip, p), fmt.Sprintf("%s saddr %s ", ip, p))
			default:
				do(fmt.Sprintf("-d %s ", p), fmt.Sprintf("-s %s ", p))
			}
		}
	}
}

// dports is a port or a range of ports, which the reference does not have.
func (d *document) dports(p ruleset.PortRange) string {
	return strings.Replace(p.String(), "-", d.either(":", "-"), 1)
}

func (d *document) interfaces() {
	for _, x := range d.ExcludeInterfaces {
		d.add("nat PREROUTING", "-i %s -j RETURN", "iifname %s counter return", x) // E1
		d.add("nat OUTPUT", "-o %s -j RETURN", "oifname %s counter return", x)     // E2
		if d.Mode == redirect.TPROXY {
			d.add("mangle PREROUTING", "-i %s -j RETURN", "iifname %s counter return", x) // E3
			d.add("mangle OUTPUT", "-o %s -j RETURN", "oifname %s counter return", x)     // E4
		}
	}
	for _, v := range d.RerouteInterfaces {
		d.insert(1, "nat PREROUTING", "-i %s -j RETURN", "iifname %s counter return", v) // K1
	}
	if d.DropInvalid {
		d.add("mangle PREROUTING", "-m conntrack --ctstate INVALID -j ISTIO_DROP", "ct state invalid counter jump istio-drop") // D1, as with iptables
		d.add("mangle ISTIO_DROP", "-j DROP", "counter drop")                                                                  // D2
	}
}

func (d *document) inbound() {
	d.add("nat ISTIO_INBOUND", "-p tcp --dport %d -j RETURN", "meta l4proto tcp tcp dport %d counter return", d.TunnelPort)       // N1
	d.add("nat ISTIO_REDIRECT", "-p tcp -j REDIRECT --to-ports %d", "meta l4proto tcp counter redirect to :%d", d.OutboundPort)   // N2
	d.add("nat ISTIO_IN_REDIRECT", "-p tcp -j REDIRECT --to-ports %d", "meta l4proto tcp counter redirect to :%d", d.InboundPort) // N3
	if !d.Inbound.All && len(d.Inbound.List) == 0 {
		return
	}
	table, to, tproxy := "nat", d.either("ISTIO_IN_REDIRECT", "istio-in-redirect"), d.Mode == redirect.TPROXY
	if tproxy {
		table, to = "mangle", d.either("ISTIO_TPROXY", "istio-tproxy")
		d.add("mangle ISTIO_DIVERT", "-j MARK --set-mark %d", "counter meta mark set %d", d.Mark) // T1
		d.add("mangle ISTIO_DIVERT", "-j ACCEPT", "counter accept")                               // T2
		d.each(func(loopback, _, ip string) {
			d.add("mangle ISTIO_TPROXY", "! -d %[2]s -p tcp -j TPROXY --tproxy-mark %[3]d/0xffffffff --on-port %[4]d",
				"meta l4proto tcp %[1]s daddr != %[2]s tproxy %[1]s to :%[4]d meta mark set %[3]d counter accept", ip, loopback, d.Mark, d.InboundPort) // T3
			if d.native { // as iptables' target does
				d.add("mangle ISTIO_TPROXY", "", "meta l4proto tcp %s daddr != %s counter drop", ip, loopback)
			}
		})
	}
	d.add(table+" PREROUTING", "-p tcp -j ISTIO_INBOUND", "meta l4proto tcp counter jump istio-inbound") // I1
	var ports []string
	if d.Inbound.All {
		ports = []string{""}
		for _, p := range d.InboundExclude {
			d.add(table+" ISTIO_INBOUND", "-p tcp --dport %s -j RETURN", "meta l4proto tcp tcp dport %s counter return", d.dports(p)) // I2
		}
	}
	for _, p := range d.Inbound.List {
		ports = append(ports, d.either("--dport ", "tcp dport ")+d.dports(p)+" ")
	}
	for _, p := range ports {
		if tproxy {
			d.add(table+" ISTIO_INBOUND", "-p tcp %s-m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT",
				"meta l4proto tcp ct state related,established %scounter jump istio-divert", p) // I4, I7
		}
		d.add(table+" ISTIO_INBOUND", "-p tcp %s-j %s", "meta l4proto tcp %scounter jump %s", p, to) // I3, I5, I6, I8
	}
}

func (d *document) outboundStart() {
	d.add("nat OUTPUT", "-j ISTIO_OUTPUT", "counter jump istio-output") // O1
	for _, p := range d.OutboundPortsExclude {
		d.add("nat ISTIO_OUTPUT", "-p tcp --dport %s -j RETURN", "tcp dport %s counter return", d.dports(p)) // O2
		d.add("nat ISTIO_OUTPUT", "-p udp --dport %s -j RETURN", "udp dport %s counter return", d.dports(p))
	}
	d.each(func(_, six, ip string) {
		d.add("nat ISTIO_OUTPUT", "-o lo -s %[2]s -j RETURN", "oifname lo %s saddr %s counter return", ip, six) // O3
	})
}

// dnsOn reports whether DNS is captured at all: everything, or some server of either family.
func (d *document) dnsOn() bool {
	return d.DNS == redirect.DNSAll || d.DNS == redirect.DNSServers && len(d.DNSServers) > 0
}

// identities calls back with each identity of the proxy: users, then groups.
func (d *document) identities(do func(kind string, id uint32)) {
	for _, id := range d.UIDs {
		do("uid", id)
	}
	for _, id := range d.GIDs {
		do("gid", id)
	}
}

// identity adds U1 to U3, or G1 to G3, of which the first has no form of its own for DNS.
func (d *document) identity(kind string, id uint32) {
	ports, notDNS := fmt.Sprintf(d.either("! --dport %d", "!= %d"), d.TunnelPort), ""
	if d.dnsOn() {
		notDNS = d.either("-p tcp ! --dport 53 ", "meta l4proto tcp tcp dport != 53 ")
		if kind == "uid" && (!d.native || d.TunnelPort != 53) { // the reference writes { 53, 53 }, which means the same as 53
			ports = fmt.Sprintf(d.either("-m multiport ! --dports 53,%d", "!= { 53, %d }"), d.TunnelPort)
		}
	}
	d.each(func(loopback, _, ip string) {
		d.add("nat ISTIO_OUTPUT", "-o lo ! -d %[2]s -p tcp %[3]s -m owner --%[4]s-owner %[5]d -j ISTIO_IN_REDIRECT",
			"oifname lo meta l4proto tcp %s daddr != %s tcp dport %s sk%s %d counter jump istio-in-redirect", ip, loopback, ports, kind, id) // U1, G1
	})
	if !slices.ContainsFunc(d.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() }) {
		d.add("nat ISTIO_OUTPUT", "-o lo %s-m owner ! --%s-owner %d -j RETURN", "oifname lo %ssk%s != %d counter return", notDNS, kind, id) // U2, G2
	}
	d.add("nat ISTIO_OUTPUT", "-m owner --%s-owner %d -j RETURN", "sk%s %d counter return", kind, id) // U3, G3
}

func (d *document) ownerGroups() {
	if d.OwnerGroups.All {
		for _, g := range d.OwnerGroupsExclude {
			d.add("nat ISTIO_OUTPUT", "-m owner --gid-owner %d -j RETURN", "skgid %d counter return", g) // W1
		}
		return
	}
	var matches strings.Builder
	for _, g := range d.OwnerGroups.List {
		fmt.Fprintf(&matches, d.either("-m owner ! --gid-owner %d ", "skgid != %d "), g)
	}
	d.add("nat ISTIO_OUTPUT", "%s-j RETURN", "%scounter return", matches.String()) // W2
}

func (d *document) dns() {
	if !d.dnsOn() {
		return
	}
	// The matches of destination and of source, once for all or once for each server of the families.
	to, from := []string{""}, []string{""}
	if d.DNS == redirect.DNSServers {
		var hosts []netip.Prefix
		for _, a := range d.DNSServers {
			hosts = append(hosts, netip.PrefixFrom(a, a.BitLen()))
		}
		to, from = nil, nil
		d.networks(hosts, func(destination, source string) { to, from = append(to, destination), append(from, source) })
	}
	d.add("raw OUTPUT", "-j ISTIO_OUTPUT_DNS", "counter jump istio-output-dns") // DR1
	if len(to) > 0 {
		d.add("nat ISTIO_OUTPUT", "-j ISTIO_OUTPUT_DNS", "counter jump istio-output-dns") // DN1, only if the chain is there
		d.add("raw PREROUTING", "-j ISTIO_INBOUND", "counter jump istio-inbound")         // DZ3
	}
	for _, s := range to {
		d.add("nat ISTIO_OUTPUT_DNS", "-p tcp --dport 53 %s-j REDIRECT --to-ports 15053", "%stcp dport 53 counter redirect to :15053", s) // DN2
	}
	for _, s := range to {
		d.add("nat ISTIO_OUTPUT_DNS", "-p udp --dport 53 %s-j REDIRECT --to-port 15053", "%sudp dport 53 counter redirect to :15053", s) // DN3
	}
	d.identities(func(kind string, id uint32) { // DZ1, DZ2
		d.add("raw ISTIO_OUTPUT_DNS", "-p udp --dport 53 -m owner --%s-owner %d -j CT --zone 1",
			"udp dport 53 meta sk%s %d counter ct zone set 1", kind, id)
		d.add("raw ISTIO_OUTPUT_DNS", "-p udp --sport 15053 -m owner --%s-owner %d -j CT --zone 2",
			"udp sport 15053 meta sk%s %d counter ct zone set 2", kind, id)
	})
	for i := range to {
		d.add("raw ISTIO_OUTPUT_DNS", "-p udp --dport 53 %s-j CT --zone 2", "udp dport 53 %scounter ct zone set 2", to[i]) // DZ4
		d.add("raw ISTIO_INBOUND", "-p udp --sport 53 %s-j CT --zone 1", "udp sport 53 %scounter ct zone set 1", from[i])  // DZ5
	}
}

func (d *document) outboundEnd() {
	d.each(func(loopback, _, ip string) {
		d.add("nat ISTIO_OUTPUT", "-d %[2]s -j RETURN", "%s daddr %s counter return", ip, loopback) // L1
	})
	d.networks(d.OutboundExclude, func(to, _ string) { d.add("nat ISTIO_OUTPUT", "%s-j RETURN", "%scounter return", to) }) // X1
	for _, p := range d.OutboundPorts {
		d.add("nat ISTIO_OUTPUT", "-p tcp --dport %s -j ISTIO_REDIRECT", "tcp dport %s counter jump istio-redirect", d.dports(p)) // P1
	}
	all := func(to, _ string) {
		for _, v := range d.RerouteInterfaces {
			d.insert(1, "nat PREROUTING", "-i %s %s-j ISTIO_REDIRECT", "iifname %s %scounter jump istio-redirect", v, to) // R2, R3
		}
		d.add("nat ISTIO_OUTPUT", "%s-j ISTIO_REDIRECT", "%scounter jump istio-redirect", to) // R1, R4
	}
	if d.Outbound.All {
		all("", "")
		return
	}
	d.networks(d.Outbound.List, all)
}

func (d *document) tproxy() {
	if d.Mode != redirect.TPROXY {
		return
	}
	d.add("mangle PREROUTING", "-p tcp -m mark --mark %d -j CONNMARK --save-mark", "meta l4proto tcp mark %d counter ct mark set mark", d.Mark) // M1
	d.add("mangle OUTPUT", "-p tcp -o lo -m mark --mark %d -j RETURN", "oifname lo meta l4proto tcp mark %d counter return", d.Mark)            // M2
	d.identities(func(kind string, id uint32) {                                                                                                 // M3
		d.each(func(loopback, _, ip string) {
			d.add("mangle OUTPUT", "! -d %[2]s -p tcp -o lo -m owner --%[3]s-owner %[4]d -j MARK --set-mark 1338",
				"oifname lo meta l4proto tcp %s daddr != %s sk%s %d counter meta mark set 1338", ip, loopback, kind, id)
		})
	})
	d.add("mangle OUTPUT", "-p tcp -m connmark --mark %d -j CONNMARK --restore-mark",
		"meta l4proto tcp ct mark %d counter meta mark set ct mark", d.Mark) // M4
	d.insert(1, "mangle ISTIO_INBOUND", "-p tcp -m mark --mark %d -j RETURN", "meta l4proto tcp mark %d counter return", d.Mark) // M5
	d.each(func(_, six, ip string) {
		d.insert(2, "mangle ISTIO_INBOUND", "-p tcp -s %[2]s -i lo -j RETURN", "iifname lo meta l4proto tcp %s saddr %s counter return", ip, six) // M6
	})
	d.insert(3, "mangle ISTIO_INBOUND", "-p tcp -i lo -m mark ! --mark 1338 -j RETURN", "iifname lo meta l4proto tcp mark != 1338 counter return") // M7
}
