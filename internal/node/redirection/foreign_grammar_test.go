package redirection_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// The grammar of foreign rules. The kernel and the tools must accept everything that it makes.

var foreignPorts = []string{"80", "80", "443", "53", "8080", "9000", "81", "15001", "15006", "15008", "15020", "5000", "22", "3306"}

// sets makes the sets of iptables' rules: sets with places of the packets, sets without them, and sets to which rules add.
func (w *walked) sets(t *testing.T) {
	t.Helper()
	for _, f := range families {
		w.Collect(t, "have"+familyNumber(f), labtest.Far.Addr(f), labtest.Peer.Addr(f), labtest.Pod.Addr(f))
		w.Collect(t, "lack"+familyNumber(f), elsewhere(f))
		w.Collect(t, "fill"+familyNumber(f), elsewhere(f))
	}
}

// familyNumber returns the number of a family.
func familyNumber(f ruleset.Family) string { return fmt.Sprintf("%d", f) }

// elsewhere returns an address that no packet has.
func elsewhere(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.MustParseAddr("fd00:99::1")
	}
	return netip.MustParseAddr("203.0.113.5")
}

// items returns the items of one namespace.
func (w *walked) items() (all []item) {
	for range 1 + w.IntN(*foreignItems) {
		switch n := w.IntN(20); {
		case n < 8:
			all = append(all, w.nft())
		case n < 14:
			all = append(all, w.xtables("nft"))
		case n < 16:
			all = append(all, w.xtables("legacy"))
		case n < 17:
			all = append(all, w.routes())
		default:
			all = append(all, pick(w, recorded()...))
		}
	}
	return all
}

// ofTheMesh returns a rule in a chain of the mesh's native table.
func (w *walked) ofTheMesh() item {
	match := pick(w, "tcp dport 80", "tcp dport != { 80, 443 }", "tcp dport 80-90", "udp dport 53", "meta l4proto tcp", "ct state new meta l4proto tcp",
		"meta mark 0x53a meta l4proto tcp", "meta nfproto ipv6 meta l4proto tcp", "ip daddr "+w.network(ruleset.IPv4)+" meta l4proto tcp")
	chain := pick(w, "output", "istio-output", "prerouting")
	if chain != "prerouting" {
		match = pick(w, match, `oifname "lo" meta l4proto tcp`, "meta skuid 1000 meta l4proto tcp", "meta skgid != 3000 meta l4proto tcp")
	}
	target := pick(w, "return", "accept", "counter return", "redirect to :8080", "jump istio-redirect", "counter")
	return item{"nft in the mesh's table", "nft -f -", fmt.Sprintf("%s rule inet istio-proxy-nat %s %s %s\n", pick(w, "insert", "add"), chain, match, target)}
}

// place returns an address that packets may have, or one that they never have.
func (w *walked) place(f ruleset.Family) string {
	if w.IntN(3) == 0 {
		return elsewhere(f).String()
	}
	return pick(w, labtest.Far, labtest.Peer, labtest.Pod, labtest.Private, labtest.Loopback, labtest.Resolver, labtest.Side).Addr(f).String()
}

func (w *walked) network(f ruleset.Family) string {
	if w.IntN(3) == 0 {
		return map[ruleset.Family]string{ruleset.IPv4: pick(w, "203.0.113.0/24", "172.17.0.0/16", "10.96.0.0/12"), ruleset.IPv6: "fd00:99::/32"}[f]
	}
	return pick(w, labtest.Far, labtest.Peer, labtest.Private, labtest.Loopback, labtest.Side).Network(f).String()
}

func (w *walked) port() string { return pick(w, foreignPorts...) }

func (w *walked) portRange(dash string) string {
	return pick(w, "80"+dash+"90", "1"+dash+"1023", "8000"+dash+"8999", "15000"+dash+"15100", "30000"+dash+"32767", "1"+dash+"65535")
}

// sources returns ranges of ports that contain either all client ports or none.
func (w *walked) sources(dash string) string {
	return pick(w, "1024"+dash+"65535", "1"+dash+"1023", "53", "15020", "10000"+dash+"65535")
}

// nftBase is a base chain of nft.
type nftBase struct {
	family, name, kind, hook string
	priority                 int
}

func (b nftBase) early() bool {
	return b.priority < -200 && (b.hook == "prerouting" || b.hook == "output")
}

// nft returns a table with one to three base chains.
func (w *walked) nft() item {
	family := pick(w, "ip", "ip", "ip6", "inet", "inet", "inet", "netdev")
	table := pick(w, "nat", "mangle", "raw", "filter", "mine", "cni", "security", "foreign", "istio-cni-trace-1", "istio-proxy-nat")
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n", family, table)
	if w.IntN(20) == 0 {
		b.WriteString("\tflags dormant\n")
	}
	for _, f := range families {
		kind := map[ruleset.Family]string{ruleset.IPv4: "ipv4_addr", ruleset.IPv6: "ipv6_addr"}[f]
		have := fmt.Sprintf("%s, %s", labtest.Far.Addr(f), labtest.Peer.Addr(f))
		fmt.Fprintf(&b, "\tset have%s { type %s; elements = { %s }; }\n", familyNumber(f), kind, have)
		fmt.Fprintf(&b, "\tset lack%s { type %s; flags interval; elements = { %s/32 }; }\n", familyNumber(f), kind, elsewhere(f))
		fmt.Fprintf(&b, "\tset nets%s { type %s; flags interval; elements = { %s }; }\n", familyNumber(f), kind, labtest.Far.Network(f))
		fmt.Fprintf(&b, "\tset dyn%s { type %s; flags dynamic; size 128; }\n", familyNumber(f), kind)
	}
	b.WriteString("\tset ports { type inet_service; flags interval; elements = { 80, 443, 9000-9010 }; }\n" +
		"\tchain empty { }\n\tchain logs { counter; log prefix \"x \"; }\n\tchain rets { return; }\n\tchain nested { jump logs; jump empty; }\n" +
		"\tchain drops { drop; }\n\tchain accepts { accept; }\n\tchain some { tcp dport 443 drop; tcp dport 22 accept; }\n" +
		"\tmap ports_verdicts { type inet_service : verdict; elements = { 81 : drop, 22 : jump drops, 9000 : accept }; }\n")
	kind := family
	for range 1 + w.IntN(3) {
		base := w.base(family)
		if base.kind != "filter" || base.hook == "ingress" || base.hook == "egress" {
			kind = family + " " + base.kind + " " + base.hook
		}
		for slices.Contains(w.used, table+" "+base.name) { // of another item
			base.name += "_"
		}
		w.used = append(w.used, table+" "+base.name)
		device := ""
		if base.hook == "ingress" || base.hook == "egress" {
			device = " device " + pick(w, `"eth0"`, `"eth0"`, `"eth1"`, `"lo"`)
		}
		policy := ""
		if w.IntN(12) == 0 {
			policy = " policy drop;"
		}
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype %s hook %s%s priority %d;%s\n", base.name, base.kind, base.hook, device, base.priority, policy)
		if policy != "" && device == "" && w.IntN(2) == 0 {
			b.WriteString("\t\tct state established,related accept\n")
		}
		for range 1 + w.IntN(4) {
			fmt.Fprintf(&b, "\t\t%s\n", w.nftRule(base))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return item{"nft " + kind, "nft -f -", b.String()}
}

func (w *walked) base(family string) nftBase {
	b := nftBase{family: family, name: pick(w, "mine", "output", "in", "out", "prerouting", "input", "INPUT2", "forward", "post", "LOCAL"), kind: "filter"}
	b.priority = pick(w, -310, -300, -300, -200, -150, -150, -101, -100, -100, -99, 0, 0, 0, 10, 100, w.IntN(621)-310)
	b.hook = pick(w, "prerouting", "prerouting", "input", "input", "output", "output", "output", "postrouting", "forward")
	switch {
	case family == "netdev":
		b.hook = pick(w, "ingress", "ingress", "egress")
	case family == "inet" && w.IntN(15) == 0:
		b.hook = "ingress"
	case w.IntN(4) == 0:
		b.kind, b.hook = "nat", pick(w, "prerouting", "output", "output", "input", "postrouting")
		b.priority = max(b.priority, -199)
	case w.IntN(6) == 0:
		b.kind, b.hook = "route", "output"
	}
	return b
}

// nftRule returns a rule of a base chain.
func (w *walked) nftRule(b nftBase) string {
	f := pick(w, families...)
	switch b.family {
	case "ip":
		f = ruleset.IPv4
	case "ip6":
		f = ruleset.IPv6
	}
	protocol, matches := w.nftMatches(b, f)
	verdict := w.nftVerdict(b, f, protocol)
	return strings.Join(append(matches, verdict), " ")
}

// nftMatches returns the matches of a rule, and the protocol that they select, "" for any.
func (w *walked) nftMatches(b nftBase, f ruleset.Family) (protocol string, matches []string) {
	ip := map[ruleset.Family]string{ruleset.IPv4: "ip", ruleset.IPv6: "ip6"}[f]
	n := familyNumber(f)
	switch w.IntN(5) {
	case 0, 1, 2:
		protocol = "tcp"
		matches = append(matches, pick(w, "tcp dport "+w.port(), "tcp dport "+w.port(), "tcp dport { "+w.port()+", 443, 9000 }", "tcp dport "+w.portRange("-"),
			"tcp dport != "+w.port(), "tcp dport != { 80, "+w.port()+" }", "tcp dport @ports", "meta l4proto tcp th dport "+w.port(), "tcp sport "+w.sources("-"),
			"tcp dport < 1024", "tcp flags & (fin|syn|rst|ack) == syn", "tcp flags & (syn|rst) == syn", "tcp flags syn", "tcp flags & (fin|syn) == (fin|syn)", "meta l4proto tcp",
			"tcp dport "+w.port()+" tcp sport "+w.sources("-")))
	case 3:
		protocol = "udp"
		matches = append(matches, pick(w, "udp dport 53", "udp dport "+w.port(), "udp dport { 53, 5000 }", "udp sport "+w.sources("-"), "meta l4proto udp", "udp dport != 53"))
	}
	if protocol == "" && w.IntN(2) == 0 {
		matches = append(matches, pick(w, "meta l4proto { tcp, udp }", "meta l4proto != tcp", "meta l4proto "+pick(w, "icmp", "gre", "sctp")))
	}
	for range w.IntN(3) {
		matches = append(matches, w.nftMatch(b, ip, n, f))
	}
	return protocol, matches
}

func (w *walked) nftMatch(b nftBase, ip, n string, f ruleset.Family) string {
	all := []string{
		ip + " saddr " + w.place(f), ip + " daddr " + w.place(f), ip + " daddr != " + w.place(f), ip + " daddr " + w.network(f), ip + " saddr != " + w.network(f),
		ip + " daddr { " + w.place(f) + ", " + w.network(f) + " }", ip + " daddr @have" + n, ip + " daddr @lack" + n, ip + " daddr @nets" + n, ip + " saddr @lack" + n,
		ip + " daddr != @have" + n,

		"meta mark " + pick(w, "0x0", "0x5", "0x4000"), "meta mark & 0xf0000 == " + pick(w, "0x0", "0x40000"), "meta mark != 0x0",
		ip + " daddr . meta l4proto . th dport { " + w.place(f) + " . tcp . " + w.port() + ", " + w.place(f) + " . udp . 53 }",
		"ct state " + pick(w, "new", "established,related", "invalid", "untracked"), "ct state != new", "ct state { established, related }",
		"ct mark " + pick(w, "0x0", "0x80"), "ct mark & 0x80 == 0x80", "ct direction original", "ct status dnat", "ct state new ct status & (dnat | snat) == 0x0",
		pick(w, "limit rate 10000/second burst 9000 packets", "meta length 1-1500", ip+" "+map[string]string{"ip": "ttl", "ip6": "hoplimit"}[ip]+" > 1", ip+" dscp 0x0"),
	}
	if f == ruleset.IPv4 {
		all = append(all, "ip frag-off & 0x1fff != 0", "ip frag-off & 0x1fff == 0")
	}
	if b.family == "inet" {
		all = append(all, "meta nfproto ipv"+n)
	}
	if b.family == "netdev" {
		return pick(w, all[:14]...)
	}
	if b.hook != "output" && b.hook != "postrouting" {
		all = append(all, "iifname "+pick(w, `"eth0"`, `"lo"`, `"docker0"`, `"cali*"`, `"eth*"`, `{ "eth0", "tun0" }`), `iifname != "lo"`, "iif lo", "meta iiftype loopback",
			`iifname != "docker0"`, "meta pkttype "+pick(w, "unicast", "broadcast"))
	}
	if b.hook == "ingress" {
		return pick(w, all...)
	}
	if b.hook != "prerouting" && b.hook != "input" {
		all = append(all, "oifname "+pick(w, `"eth0"`, `"lo"`, `"tun0"`, `"eth*"`, `{ "eth0", "eth1" }`), `oifname != "lo"`, "oif lo", `oifname != "eth0"`)
	}
	if b.hook == "output" || b.hook == "postrouting" {
		all = append(all, "meta skuid "+pick(w, "1000", "1337", "0", "1000-2000", "{ 0, 1337 }"), "meta skuid != "+pick(w, "1337", "1000"), "meta skgid "+pick(w, "1337", "3000"))
	}
	if b.hook == "prerouting" || b.hook == "input" || b.hook == "output" {
		all = append(all, "fib daddr type "+pick(w, "local", "unicast", "{ broadcast, multicast }"), "fib daddr type != local")
	}
	if b.hook == "prerouting" {
		all = append(all, "fib daddr . iif type "+pick(w, "local", "unicast"), "fib saddr . iif oif "+pick(w, "missing", "exists"), pick(w, "iifname \"eth0\"", "socket transparent 1"))
	}
	return pick(w, all...)
}

// nftVerdict returns the end of a rule for a protocol.
func (w *walked) nftVerdict(b nftBase, f ruleset.Family, protocol string) string {
	ip := map[ruleset.Family]string{ruleset.IPv4: "ip", ruleset.IPv6: "ip6"}[f]
	harmless := []string{"accept", "accept", "return", "counter", `log prefix "p "`, "limit rate 5/minute log", "jump empty", "jump logs", "jump nested", "jump rets", "goto logs", "counter accept"}
	nat := b.kind == "nat"
	if w.IntN(150) == 0 && !nat && b.family != "netdev" { // the effect is not predictable
		return pick(w, "limit rate over 1000/second drop", "limit rate 1/minute drop", "numgen random mod 2 0 drop", "quota over 1 bytes drop", "meta cgroup 1 drop", "ct bytes > 5000 drop")
	}
	some := []string{"drop", "counter drop", "jump drops", "jump some", "jump accepts", "ct mark set 0x80"}
	if protocol == "tcp" && b.family != "netdev" {
		some = append(some, "tcp dport vmap { "+w.port()+" : accept, 444 : drop }", "tcp dport vmap @ports_verdicts", "tcp dport vmap { 80 : jump logs, 443 : drop }")
	}
	if !nat {
		some = append(some, "meta mark set "+pick(w, "0x5", "0x4000", "meta mark or 0x4000", "ct mark"), "ct mark set meta mark", "meta nftrace set 1")
	}
	if b.family == "netdev" {
		return pick(w, append(harmless, "drop", "counter drop", "jump some", "meta mark set 0x5", "drop")...)
	}
	some = append(some, "ct state vmap { established : accept, related : accept, invalid : "+pick(w, "accept", "return")+" }",
		"meta l4proto vmap { udp : jump logs, "+pick(w, "tcp : jump rets", "icmp : accept")+" }",
		ip+" daddr . meta l4proto . th dport vmap { "+w.place(f)+" . tcp . "+w.port()+" : "+pick(w, "drop", "accept", "goto logs", "jump drops")+" }",
		"meta l4proto . th dport vmap { tcp . "+w.port()+" : "+pick(w, "drop", "accept", "goto rets")+", udp . 53 : accept }",
		"numgen random mod 2 vmap { 0 : jump logs, 1 : jump rets }",
		ip+" daddr vmap { "+w.place(f)+" : "+pick(w, "accept", "drop", "jump logs")+" }",
		ip+" daddr vmap { "+w.place(f)+" : accept, * : "+pick(w, "drop", "jump logs", "goto rets")+" }")
	switch b.hook {
	case "prerouting", "input":
		some = append(some, `iifname vmap { "lo" : accept, "eth0" : `+pick(w, "jump logs", "jump rets", "jump some")+` }`)
	case "output", "postrouting":
		some = append(some, `oifname vmap { "lo" : accept, "eth0" : `+pick(w, "jump logs", "jump rets", "jump some")+` }`)
	}
	if nat {
		return w.natVerdict(b, f, protocol, append(harmless, some...))
	}
	if b.hook == "input" || b.hook == "forward" || b.hook == "output" {
		some = append(some, "reject")
		if protocol == "tcp" {
			some = append(some, "reject with tcp reset")
		}
	}
	if b.early() {
		some = append(some, "notrack", "ct zone set 5")
	}
	if b.hook == "ingress" {
		return pick(w, append(harmless, "drop", "meta mark set 0x5")...)
	}
	if b.hook == "forward" {
		return pick(w, append(harmless, some...)...)
	}
	some = append(some, "meta priority set 1:1", "add @dyn"+familyNumber(f)+" { "+ip+" saddr }")
	if protocol == "tcp" {
		some = append(some, "tcp dport set "+w.port(), "tcp option maxseg size set 1200")
	}
	if protocol == "udp" {
		some = append(some, "udp dport set "+w.port())
	}
	if b.family != "inet" {
		some = append(some, "dup to "+pick(w, elsewhere(f).String(), elsewhere(f).String(), labtest.Peer.Addr(f).String()))
		if protocol != "" {
			some = append(some, ip+" daddr set "+labtest.Far.Addr(f).String())
		}
	}
	if f == ruleset.IPv4 {
		some = append(some, "ip ttl set 64", "ip dscp set cs1")
	}
	if protocol == "tcp" && b.hook == "prerouting" {
		some = append(some, "tproxy "+ip+" to :"+pick(w, "15001", "9000"))
	}
	return pick(w, append(harmless, some...)...)
}

func (w *walked) natVerdict(b nftBase, f ruleset.Family, protocol string, more []string) string {
	ip := map[ruleset.Family]string{ruleset.IPv4: "ip", ruleset.IPv6: "ip6"}[f]
	ported := func(a, port string) string {
		return netip.AddrPortFrom(netip.MustParseAddr(a), 0).Addr().String() + port
	}
	to := pick(w, labtest.Far, labtest.Peer, labtest.Pod, labtest.Loopback).Addr(f).String()
	inet := " "
	if b.family == "inet" {
		inet = " " + ip + " "
	}
	switch b.hook {
	case "input":
		more = append(more, "snat"+inet+"to "+labtest.Peer.Addr(f).String())
	case "postrouting":
		more = append(more, "snat"+inet+"to "+labtest.Pod.Addr(f).String(), "masquerade", "masquerade")
	default:
		more = append(more, "dnat"+inet+"to "+to, "dnat"+inet+"to "+to)
		if protocol != "" {
			address := ported(to, ":"+w.port())
			if f == ruleset.IPv6 {
				address = "[" + to + "]:" + w.port()
			}
			more = append(more, "redirect to :"+w.port(), "redirect to :9090", "redirect to :8080", "dnat"+inet+"to "+address, "redirect to :15001",
				"redirect to :"+protocol+" dport map { 80 : 8080, "+pick(w, "443", "81")+" : 9000 }", "dnat"+inet+"to "+protocol+" dport map { 80 : "+to+", 53 : "+labtest.Peer.Addr(f).String()+" }")
		}
	}
	return pick(w, more...)
}

// xtables returns rules of iptables, in its own chains and in a table's chains.
func (w *walked) xtables(variant string) item {
	f := pick(w, families...)
	program := map[ruleset.Family]string{ruleset.IPv4: "iptables-", ruleset.IPv6: "ip6tables-"}[f] + variant + "-restore --noflush"
	table := pick(w, "raw", "mangle", "mangle", "nat", "nat", "nat", "filter", "filter", "filter", "security")
	hooks := map[string][]string{
		"raw": {"PREROUTING", "OUTPUT"}, "mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
		"nat": {"PREROUTING", "OUTPUT", "OUTPUT", "INPUT", "POSTROUTING"}, "filter": {"INPUT", "FORWARD", "OUTPUT"}, "security": {"INPUT", "FORWARD", "OUTPUT"},
	}[table]
	var b strings.Builder
	id := w.IntN(1000)
	fmt.Fprintf(&b, "*%s\n:OWN%d - [0:0]\n:LOGS%d - [0:0]\n:RETS%d - [0:0]\n:VOID%d - [0:0]\n", table, id, id, id, id)
	fmt.Fprintf(&b, "-A LOGS%d -j LOG --log-prefix \"x \"\n-A LOGS%d -j LOG\n-A RETS%d -m comment --comment \"goes back\" -j RETURN\n", id, id, id)
	fmt.Fprintf(&b, "-A OWN%d -p tcp -m multiport --dports 22,3306 -j ACCEPT\n-A OWN%d -j LOGS%d\n", id, id, id)
	if table != "nat" && w.IntN(12) == 0 {
		fmt.Fprintf(&b, ":%s DROP [0:0]\n", pick(w, hooks...))
	}
	for range 1 + w.IntN(4) {
		hook := pick(w, hooks...)
		fmt.Fprintf(&b, "%s %s %s\n", pick(w, "-A", "-I"), hook, w.xtablesRule(f, table, hook, id))
	}
	b.WriteString("COMMIT\n")
	return item{"iptables-" + variant + " " + table, program, b.String()}
}

func (w *walked) xtablesRule(f ruleset.Family, table, hook string, id int) string {
	protocol := pick(w, "", "tcp", "tcp", "tcp", "udp")
	var parts []string
	if protocol != "" {
		parts = append(parts, "-p "+protocol)
		for range w.IntN(2) {
			parts = append(parts, w.xtablesPorts(protocol))
		}
	}
	for range w.IntN(3) {
		more := w.xtablesMatch(f, hook)
		option := strings.Fields(strings.TrimPrefix(more, "! "))[0]
		if option == "-m" || !strings.Contains(strings.Join(parts, " "), option+" ") { // only once
			parts = append(parts, more)
		}
	}
	return strings.Join(append(parts, w.xtablesTarget(f, table, hook, protocol, id)), " ")
}

func (w *walked) xtablesPorts(protocol string) string {
	m := "-m " + protocol + " "
	all := []string{
		m + "--dport " + w.port(), m + "--dport " + w.port(), m + "! --dport " + w.port(), m + "--dport " + w.portRange(":"), m + "--sport " + w.sources(":"),
		"-m multiport --dports 80,443," + w.port(), "-m multiport --dports 22," + w.portRange(":"), "-m multiport ! --dports 80," + w.port(),
		"-m multiport --sports 53,15020", "-m multiport --ports 53," + w.port(), "-m multiport --sports 1024:65535",
	}
	if protocol == "tcp" {
		all = append(all, "--syn", "! --syn", m+"--tcp-flags SYN,RST SYN", m+"--tcp-flags FIN,SYN,RST,ACK SYN", m+"--tcp-flags ALL NONE", m+"! --tcp-flags SYN,ACK SYN")
	}
	return pick(w, all...)
}

func (w *walked) xtablesMatch(f ruleset.Family, hook string) string {
	n := familyNumber(f)
	span := map[ruleset.Family]string{ruleset.IPv4: pick(w, "10.2.0.1-10.2.0.20", "203.0.113.1-203.0.113.9"), ruleset.IPv6: pick(w, "fd00:2::1-fd00:2::20", "fd00:99::1-fd00:99::9")}[f]
	all := []string{
		"-m comment --comment " + pick(w, `"a text -j DROP"`, "word", `"it is \"quoted\""`), "-d " + w.place(f), "-s " + w.place(f), "-d " + w.network(f), "! -d " + w.network(f), "! -s " + w.network(f),
		"-m iprange --dst-range " + span, "-m iprange ! --src-range " + span, "-m addrtype --dst-type " + pick(w, "LOCAL", "UNICAST", "MULTICAST", "LOCAL,MULTICAST"),
		"-m addrtype ! --dst-type LOCAL", "-m addrtype --src-type " + pick(w, "LOCAL", "UNICAST"),
		"-m conntrack --ctstate " + pick(w, "NEW", "RELATED,ESTABLISHED", "INVALID", "DNAT", "NEW,ESTABLISHED", "SNAT"), "-m conntrack ! --ctstate NEW", "-m conntrack ! --ctstate DNAT",
		"-m state --state " + pick(w, "NEW", "RELATED,ESTABLISHED", "INVALID"), "-m mark --mark " + pick(w, "0x0", "0x5", "0x4000/0x4000", "0x0/0xff"), "-m mark ! --mark 0x5",
		"-m connmark --mark " + pick(w, "0x0", "0x80/0x80"), "-m set --match-set " + pick(w, "have", "lack", "lack") + n + " " + pick(w, "src", "dst"), "-m set ! --match-set have" + n + " dst",
		"-m length --length " + pick(w, "0:1500", "2000:65535"), "-m dscp " + pick(w, "--dscp 0x00", "--dscp 0x0a", "! --dscp 0x0a"),
		pick(w, "-m limit --limit 10000/sec --limit-burst 9000", "-m statistic --mode nth --every 1000000 --packet 999999"), "-m pkttype --pkt-type " + pick(w, "unicast", "broadcast"),
	}
	if f == ruleset.IPv4 {
		all = append(all, "-m ttl --ttl-gt 1", "-m ttl --ttl-eq 1")
	} else {
		all = append(all, "-m hl --hl-gt 1")
	}
	if w.IntN(15) == 0 {
		rare := []string{
			"-m tos --tos 0x10", "-m cgroup --cgroup 1", "-m ecn --ecn-ip-ect 2", "-m string --algo bm --string none", "-m connbytes --connbytes 9000: --connbytes-dir both --connbytes-mode bytes", //nolint:misspell // an option of iptables
			"-m connlimit --connlimit-above 9000", "-m time --datestop 2001-01-01", "-m helper --helper ftp", "-m u32 --u32 0&0=1", "-m cpu --cpu 999",
		}
		if hook == "PREROUTING" {
			rare = append(rare, "-m socket --transparent", "-m socket --nowildcard --transparent")
		}
		return pick(w, rare...)
	}
	if w.IntN(150) == 0 {
		return pick(w, "-m statistic --mode random --probability 0.5", "-m limit --limit 1/hour", "-m recent --name x --rcheck --seconds 60", "-m hashlimit --hashlimit-above 9000/sec --hashlimit-mode srcip --hashlimit-name x")
	}
	if hook == "OUTPUT" || hook == "POSTROUTING" {
		all = append(all, "-o "+pick(w, "eth0", "lo", "tun0", "eth+"), "! -o "+pick(w, "lo", "eth0", "docker0"), "-m owner --uid-owner "+pick(w, "1000", "1337", "0-1000", "2000-3000"),
			"-m owner ! --uid-owner "+pick(w, "1337", "0"), "-m owner --gid-owner "+pick(w, "1337", "1000-4000"), "-m owner ! --gid-owner 3000")
	}
	if hook == "PREROUTING" || hook == "INPUT" {
		all = append(all, "-i "+pick(w, "eth0", "lo", "docker0", "cali+", "eth+"), "! -i "+pick(w, "lo", "eth0", "docker0"), "-m mac --mac-source 02:00:00:00:00:01", "-m mac ! --mac-source 02:00:00:00:00:01")
	}
	return pick(w, all...)
}

func (w *walked) xtablesTarget(f ruleset.Family, table, hook, protocol string, id int) string {
	own := func(option, name string) string { return fmt.Sprintf("-%s %s%d", option, name, id) }
	all := []string{
		"-j ACCEPT", "-j ACCEPT", "-j RETURN", "-j LOG --log-prefix \"p \"", "-j NFLOG --nflog-group 5", "", own("j", "OWN"), own("j", "LOGS"), own("j", "RETS"), own("j", "VOID"), own("g", "RETS"), own("j", "OWN"),
		"-j SET --add-set fill" + familyNumber(f) + " src --exist",
	}
	if table == "nat" {
		ports := ""
		if protocol != "" {
			ports = " --to-ports " + w.port()
		}
		to := pick(w, labtest.Far, labtest.Peer, labtest.Pod, labtest.Loopback).Addr(f).String()
		if protocol != "" && w.IntN(2) == 0 {
			if to += ":" + w.port(); f == ruleset.IPv6 {
				to = "[" + strings.Replace(to, to[strings.LastIndex(to, ":"):], "]"+to[strings.LastIndex(to, ":"):], 1)
			}
		}
		switch hook {
		case "OUTPUT", "PREROUTING":
			all = append(all, "-j REDIRECT"+ports, "-j REDIRECT"+ports, "-j NETMAP --to "+labtest.Far.Network(f).String(), "-j DNAT --to-destination "+to, "-j DNAT --to-destination "+to)
		case "INPUT":
			all = append(all, "-j SNAT --to-source "+labtest.Peer.Addr(f).String())
		default:
			all = append(all, "-j MASQUERADE", "-j SNAT --to-source "+labtest.Pod.Addr(f).String())
		}
		return pick(w, all...)
	}
	all = append(all, "-j DROP", "-j DROP", "-j AUDIT --type accept", "-j TEE --gateway "+pick(w, elsewhere(f), elsewhere(f), labtest.Peer.Addr(f)).String())
	switch table {
	case "raw":
		all = append(all, "-j CT --notrack", "-j CT --notrack", "-j CT --zone 5", "-j NOTRACK", "-j TRACE")
	case "mangle":
		all = append(all, "-j MARK --set-xmark "+pick(w, "0x5/0xffffffff", "0x0/0xf0000", "0x4000/0x4000"), "-j MARK --or-mark 0x4000", "-j MARK --and-mark 0xfffeffff",
			"-j CONNMARK --set-xmark "+pick(w, "0x80/0x80", "0x7/0xffffffff"), "-j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff", "-j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80",
			"-j DSCP --set-dscp 0x0a", "-j TOS --set-tos 0x10/0x3f")
		if hook != "PREROUTING" && hook != "INPUT" {
			all = append(all, "-j CLASSIFY --set-class 1:1")
		}
		if protocol == "tcp" && hook != "PREROUTING" && hook != "INPUT" {
			all = append(all, "--tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1200")
		}
		if f == ruleset.IPv4 {
			all = append(all, "-j TTL --ttl-set 64")
		}
	case "filter":
		all = append(all, "-j REJECT", pick(w, "-j NFQUEUE --queue-num 5", "-j NFQUEUE --queue-num 5 --queue-bypass"))
		if protocol == "tcp" {
			all = append(all, "-j REJECT --reject-with tcp-reset")
		}
	}
	return pick(w, all...)
}

// routes returns foreign routes and policy rules.
func (w *walked) routes() item {
	var b strings.Builder
	f := pick(w, families...)
	flag, table := "-"+familyNumber(f), 200+w.IntN(100)
	switch w.IntN(10) {
	case 0:
		return item{"eth0 named lo", "ip -batch -", "link set lo name lo0\nlink set eth0 name lo\n"}
	case 1, 2, 3:
		fmt.Fprintf(&b, "route replace %s %s\n", pick(w, "blackhole", "unreachable", "prohibit"), pick(w, labtest.Far, labtest.Private).Network(f))
	case 4, 5, 6:
		fmt.Fprintf(&b, "route replace default via %s dev eth1 table %d\nrule add %s lookup %d\n", labtest.SideGateway.Addr(f), table,
			pick(w, "uidrange 1000-1000", "ipproto tcp dport 80", "fwmark 0x5", "uidrange 0-999", "ipproto udp dport 53", "to "+labtest.Far.Network(f).String()), table)
	default:
		fmt.Fprintf(&b, "route replace %s default table %d\nrule add %s lookup %d\n", pick(w, "blackhole", "unreachable", "prohibit"), table,
			pick(w, "uidrange 1000-1000", "ipproto tcp dport 80", "fwmark 0x5", "uidrange 2000-2999", "ipproto udp dport 53"), table)
	}
	return item{"routes", "ip " + flag + " -batch -", b.String()}
}
