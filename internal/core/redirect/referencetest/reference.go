// Package referencetest writes the rules of a Spec as the reference implementation does: in the order in which it emits
// them, and in its spelling, as text for iptables-restore.
//
// It promises to share nothing with the code that it checks: one rule of the reference is one line here, under the name
// that its row has in the description of the reference's rules (E1, K1, D1 …). It neither sorts the
// rules by their evaluation nor prints them as the kernel's tools do: tests pass the text to the tools and read the result.
//
// Start at Restore. It is for tests only.
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
	d := &document{Spec: s, family: f, loopback: s.Loopback.String(), six: "127.0.0.6/32", hostBits: "/32"}
	if f == ruleset.IPv6 {
		d.loopback, d.six, d.hostBits = "::1/128", "::6/128", "/128"
	}
	d.excludedInterfaces()
	d.reroutedInterfaces()
	d.dropInvalid()
	d.proxyChains()
	d.inbound()
	d.outboundStart()
	d.identities(d.identity)
	d.ownerGroups()
	d.dns()
	d.outboundEnd()
	d.tproxy()
	return d.text()
}

// document is one family's text on its way. LO, SIX and the length of a host's prefix are those of the family.
type document struct {
	redirect.Spec
	family                  ruleset.Family
	loopback, six, hostBits string
	rules                   []rule
}

// rule is one emitted line. At position 0 it is appended, otherwise inserted there.
type rule struct {
	table, chain string
	position     int
	text         string
}

func (d *document) add(table, chain, format string, args ...any) {
	d.insert(table, chain, 0, format, args...)
}

func (d *document) insert(table, chain string, position int, format string, args ...any) {
	d.rules = append(d.rules, rule{table, chain, position, fmt.Sprintf(format, args...)})
}

func (d *document) excludedInterfaces() {
	for _, x := range d.ExcludeInterfaces {
		d.add("nat", "PREROUTING", "-i %s -j RETURN", x) // E1
		d.add("nat", "OUTPUT", "-o %s -j RETURN", x)     // E2
		if d.Mode == redirect.TPROXY {
			d.add("mangle", "PREROUTING", "-i %s -j RETURN", x) // E3
			d.add("mangle", "OUTPUT", "-o %s -j RETURN", x)     // E4
		}
	}
}

func (d *document) reroutedInterfaces() {
	for _, v := range d.RerouteInterfaces {
		d.insert("nat", "PREROUTING", 1, "-i %s -j RETURN", v) // K1
	}
}

func (d *document) dropInvalid() {
	if d.DropInvalid {
		d.add("mangle", "PREROUTING", "-m conntrack --ctstate INVALID -j ISTIO_DROP") // D1
		d.add("mangle", "ISTIO_DROP", "-j DROP")                                      // D2
	}
}

func (d *document) proxyChains() {
	d.add("nat", "ISTIO_INBOUND", "-p tcp --dport %d -j RETURN", d.TunnelPort)           // N1
	d.add("nat", "ISTIO_REDIRECT", "-p tcp -j REDIRECT --to-ports %d", d.OutboundPort)   // N2
	d.add("nat", "ISTIO_IN_REDIRECT", "-p tcp -j REDIRECT --to-ports %d", d.InboundPort) // N3
}

func (d *document) inbound() {
	if !d.Inbound.All && len(d.Inbound.List) == 0 {
		return
	}
	table, to, tproxy := "nat", "ISTIO_IN_REDIRECT", d.Mode == redirect.TPROXY
	if tproxy {
		table, to = "mangle", "ISTIO_TPROXY"
		d.add("mangle", "ISTIO_DIVERT", "-j MARK --set-mark %d", d.Mark) // T1
		d.add("mangle", "ISTIO_DIVERT", "-j ACCEPT")                     // T2
		d.add("mangle", "ISTIO_TPROXY", "! -d %s -p tcp -j TPROXY --tproxy-mark %d/0xffffffff --on-port %d",
			d.loopback, d.Mark, d.InboundPort) // T3
	}
	d.add(table, "PREROUTING", "-p tcp -j ISTIO_INBOUND") // I1
	var ports []string
	if d.Inbound.All {
		ports = []string{""}
		for _, p := range d.InboundExclude {
			d.add(table, "ISTIO_INBOUND", "-p tcp --dport %s -j RETURN", dports(p)) // I2
		}
	} else {
		for _, p := range d.Inbound.List {
			ports = append(ports, fmt.Sprintf("--dport %s ", dports(p)))
		}
	}
	for _, p := range ports {
		if tproxy {
			d.add(table, "ISTIO_INBOUND", "-p tcp %s-m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT", p) // I4, I7
		}
		d.add(table, "ISTIO_INBOUND", "-p tcp %s-j %s", p, to) // I3, I5, I6, I8
	}
}

func (d *document) outboundStart() {
	d.add("nat", "OUTPUT", "-j ISTIO_OUTPUT") // O1
	for _, p := range d.OutboundPortsExclude {
		d.add("nat", "ISTIO_OUTPUT", "-p tcp --dport %s -j RETURN", dports(p)) // O2
		d.add("nat", "ISTIO_OUTPUT", "-p udp --dport %s -j RETURN", dports(p))
	}
	d.add("nat", "ISTIO_OUTPUT", "-o lo -s %s -j RETURN", d.six) // O3
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
	ports, notDNS := fmt.Sprintf("! --dport %d", d.TunnelPort), ""
	if d.dnsOn() {
		notDNS = "-p tcp ! --dport 53 "
		if kind == "uid" {
			ports = fmt.Sprintf("-m multiport ! --dports 53,%d", d.TunnelPort)
		}
	}
	d.add("nat", "ISTIO_OUTPUT", "-o lo ! -d %s -p tcp %s -m owner --%s-owner %d -j ISTIO_IN_REDIRECT", d.loopback, ports, kind, id) // U1, G1
	if !slices.ContainsFunc(d.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() }) {
		d.add("nat", "ISTIO_OUTPUT", "-o lo %s-m owner ! --%s-owner %d -j RETURN", notDNS, kind, id) // U2, G2
	}
	d.add("nat", "ISTIO_OUTPUT", "-m owner --%s-owner %d -j RETURN", kind, id) // U3, G3
}

func (d *document) ownerGroups() {
	if d.OwnerGroups.All {
		for _, g := range d.OwnerGroupsExclude {
			d.add("nat", "ISTIO_OUTPUT", "-m owner --gid-owner %d -j RETURN", g) // W1
		}
		return
	}
	var matches strings.Builder
	for _, g := range d.OwnerGroups.List {
		fmt.Fprintf(&matches, "-m owner ! --gid-owner %d ", g)
	}
	d.add("nat", "ISTIO_OUTPUT", "%s-j RETURN", matches.String()) // W2
}

func (d *document) dns() {
	if !d.dnsOn() {
		return
	}
	// The matches of destination and of source, once for all or once for each server of this family.
	to, from := []string{""}, []string{""}
	if d.DNS == redirect.DNSServers {
		to, from = nil, nil
		for _, a := range d.DNSServers {
			if a.Is4() == (d.family == ruleset.IPv4) {
				to, from = append(to, fmt.Sprintf("-d %s%s ", a, d.hostBits)), append(from, fmt.Sprintf("-s %s%s ", a, d.hostBits))
			}
		}
	}
	d.add("raw", "OUTPUT", "-j ISTIO_OUTPUT_DNS") // DR1
	if len(to) > 0 {
		d.add("nat", "ISTIO_OUTPUT", "-j ISTIO_OUTPUT_DNS") // DN1
	}
	for _, s := range to {
		d.add("nat", "ISTIO_OUTPUT_DNS", "-p tcp --dport 53 %s-j REDIRECT --to-ports 15053", s) // DN2
	}
	for _, s := range to {
		d.add("nat", "ISTIO_OUTPUT_DNS", "-p udp --dport 53 %s-j REDIRECT --to-port 15053", s) // DN3
	}
	d.identities(func(kind string, id uint32) { // DZ1, DZ2
		d.add("raw", "ISTIO_OUTPUT_DNS", "-p udp --dport 53 -m owner --%s-owner %d -j CT --zone 1", kind, id)
		d.add("raw", "ISTIO_OUTPUT_DNS", "-p udp --sport 15053 -m owner --%s-owner %d -j CT --zone 2", kind, id)
	})
	if len(to) > 0 {
		d.add("raw", "PREROUTING", "-j ISTIO_INBOUND") // DZ3
	}
	for i := range to {
		d.add("raw", "ISTIO_OUTPUT_DNS", "-p udp --dport 53 %s-j CT --zone 2", to[i]) // DZ4
		d.add("raw", "ISTIO_INBOUND", "-p udp --sport 53 %s-j CT --zone 1", from[i])  // DZ5
	}
}

// ofFamily reports whether a network is of this family. An IPv4 network written as IPv6 is IPv6.
func (d *document) ofFamily(p netip.Prefix) bool { return p.Addr().Is4() == (d.family == ruleset.IPv4) }

func (d *document) outboundEnd() {
	d.add("nat", "ISTIO_OUTPUT", "-d %s -j RETURN", d.loopback) // L1
	for _, p := range d.OutboundExclude {
		if d.ofFamily(p) {
			d.add("nat", "ISTIO_OUTPUT", "-d %s -j RETURN", p) // X1
		}
	}
	for _, p := range d.OutboundPorts {
		d.add("nat", "ISTIO_OUTPUT", "-p tcp --dport %s -j ISTIO_REDIRECT", dports(p)) // P1
	}
	if d.Outbound.All {
		d.add("nat", "ISTIO_OUTPUT", "-j ISTIO_REDIRECT") // R1
		for _, v := range d.RerouteInterfaces {
			d.insert("nat", "PREROUTING", 1, "-i %s -j ISTIO_REDIRECT", v) // R2
		}
		return
	}
	for _, p := range d.Outbound.List {
		if !d.ofFamily(p) {
			continue
		}
		for _, v := range d.RerouteInterfaces {
			d.insert("nat", "PREROUTING", 1, "-i %s -d %s -j ISTIO_REDIRECT", v, p) // R3
		}
		d.add("nat", "ISTIO_OUTPUT", "-d %s -j ISTIO_REDIRECT", p) // R4
	}
}

func (d *document) tproxy() {
	if d.Mode != redirect.TPROXY {
		return
	}
	d.add("mangle", "PREROUTING", "-p tcp -m mark --mark %d -j CONNMARK --save-mark", d.Mark) // M1
	d.add("mangle", "OUTPUT", "-p tcp -o lo -m mark --mark %d -j RETURN", d.Mark)             // M2
	d.identities(func(kind string, id uint32) {                                               // M3
		d.add("mangle", "OUTPUT", "! -d %s -p tcp -o lo -m owner --%s-owner %d -j MARK --set-mark 1338", d.loopback, kind, id)
	})
	d.add("mangle", "OUTPUT", "-p tcp -m connmark --mark %d -j CONNMARK --restore-mark", d.Mark) // M4
	d.insert("mangle", "ISTIO_INBOUND", 1, "-p tcp -m mark --mark %d -j RETURN", d.Mark)         // M5
	d.insert("mangle", "ISTIO_INBOUND", 2, "-p tcp -s %s -i lo -j RETURN", d.six)                // M6
	d.insert("mangle", "ISTIO_INBOUND", 3, "-p tcp -i lo -m mark ! --mark 1338 -j RETURN")       // M7
}

// dports is a port or a range of ports, which the reference does not have, as iptables takes it.
func dports(p ruleset.PortRange) string { return strings.Replace(p.String(), "-", ":", 1) }
