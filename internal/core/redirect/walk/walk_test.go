package walk_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

type change func(*walk.Packet)

// out returns a first TCP packet from uid and gid 1000 to 10.0.0.7:80 by eth0, with changes.
func out(changes ...change) walk.Packet {
	p := walk.Packet{
		Outgoing: true, Out: "eth0", Protocol: ruleset.TCP, UID: 1000, GID: 1000,
		Src: netip.MustParseAddrPort("10.0.0.5:40000"), Dst: netip.MustParseAddrPort("10.0.0.7:80"),
	}
	for _, c := range changes {
		c(&p)
	}
	return p
}

// in returns the same packet as an incoming one.
func in(changes ...change) walk.Packet {
	return out(append([]change{func(p *walk.Packet) { p.Outgoing, p.In, p.Out, p.UID, p.GID = false, "eth0", "", 0, 0 }}, changes...)...)
}

func to(text string) change { return func(p *walk.Packet) { p.Dst = netip.MustParseAddrPort(text) } }

func from(text string) change       { return func(p *walk.Packet) { p.Src = netip.MustParseAddrPort(text) } }
func byLo(p *walk.Packet)           { p.Out = "lo" }
func state(s ruleset.States) change { return func(p *walk.Packet) { p.State = s } }
func byProxy(gid uint32) change     { return func(p *walk.Packet) { p.UID, p.GID = 1337, gid } }
func proxied(p *walk.Packet)        { p.Outgoing, p.Out, p.Mark = true, "lo", 1337 }

// short prints the result of a walk: the verdict, the port, and the rule that decided.
func short(r walk.Result) string {
	text := r.Verdict.String()
	if r.To.Port() != 0 {
		text += fmt.Sprintf(" %d", r.To.Port())
	}
	if r.Decided != nil {
		text += fmt.Sprintf(" by %s/%s %d", r.Decided.Table, r.Decided.Chain, r.Decided.Number)
	}
	return text
}

// TestWalk_Rules covers rules that the random packets of node/redirection rarely or never meet.
func TestWalk_Rules(t *testing.T) {
	const (
		a, b       = "nat A:", "nat B:"
		toProxy    = "nat OUTPUT -p tcp -j REDIRECT --to-ports 15001"
		redirected = "redirected 15001 by nat/OUTPUT 1"
		opaque     = "[a match that is not known]"
		untracked  = "raw OUTPUT -j CT --notrack"
	)
	for _, tt := range []struct {
		name, want string
		p          walk.Packet
		rules      []string
	}{
		{"no rules", "passed", out(), nil},
		{"a redirect", redirected, out(), []string{toProxy}},
		{"of another protocol", "passed", out(func(p *walk.Packet) { p.Protocol = ruleset.UDP }), []string{toProxy}},
		{"of a packet that arrives", "passed", in(), []string{toProxy}},
		{
			"of a packet without a source address", "cannot-tell by nat/OUTPUT 1", out(func(p *walk.Packet) { p.Src = netip.AddrPort{} }),
			[]string{"nat OUTPUT -m addrtype ! --src-type LOCAL -j ACCEPT", toProxy},
		},
		{"of a known connection", "passed", out(state(ruleset.StateEstablished)), []string{toProxy}},
		{"of an invalid packet", "passed", out(state(ruleset.StateInvalid)), []string{toProxy}},
		{"of a related one", redirected, out(state(ruleset.StateRelated)), []string{toProxy}},
		{"of one that is not tracked", "passed by raw/OUTPUT 1", out(), []string{"raw OUTPUT -j CT --notrack", toProxy}},
		{"raw: no connection yet", redirected, out(), []string{"raw OUTPUT -m conntrack --ctstate NEW,ESTABLISHED -j DROP", "raw OUTPUT -m connmark ! --mark 0x1 -j DROP", toProxy}},
		{"raw: which is invalid", "dropped by raw/PREROUTING 1", in(), []string{"raw PREROUTING -m conntrack --ctstate INVALID -j DROP"}},
		{"raw: no connection to mark", "dropped by filter/OUTPUT 1", out(), []string{"raw OUTPUT -j CONNMARK --set-xmark 0x1/0xffffffff", "filter OUTPUT -m connmark --mark 0x0 -j DROP"}},
		{"raw: but by lo from the pod", "dropped by raw/PREROUTING 1", out(), []string{toProxy, "raw PREROUTING -m conntrack --ctstate NEW -j DROP"}},
		{"raw: but in a zone", "dropped by raw/OUTPUT 2", out(), []string{"raw OUTPUT -j CT --zone 2", "raw OUTPUT -m conntrack --ctstate NEW -j DROP"}},
		{"in a zone it is tracked", redirected, out(), []string{"raw OUTPUT -j CT --zone 2", untracked, toProxy}},
		{"from inside, then by lo: nat is not asked again", redirected, out(), []string{toProxy, "nat PREROUTING -j DROP", "nat INPUT -j DROP"}},
		{"then by lo: dropped by its new port", "dropped by filter/INPUT 1", out(), []string{toProxy, "filter INPUT -i lo -d 127.0.0.1/32 -p tcp -m tcp --dport 15001 -j DROP"}},
		{"in OUTPUT it leaves by its first interface", "dropped by filter/OUTPUT 1", out(), []string{toProxy, "filter OUTPUT -o eth0 -p tcp -m tcp --dport 15001 -j DROP"}},
		{"behind OUTPUT by lo", "dropped by mangle/POSTROUTING 1", out(), []string{toProxy, "mangle POSTROUTING -o lo -j DROP"}},
		{"an excluded port", "passed by nat/A 1", out(), []string{a, "nat OUTPUT -j A", "nat A -p tcp -m tcp --dport 80 -j RETURN", "nat A -p tcp -j REDIRECT --to-ports 15001"}},
		{"RETURN goes back to the calling chain", "dropped by nat/OUTPUT 2", out(), []string{a, "nat OUTPUT -j A", "nat OUTPUT -j DROP", "nat A -j RETURN", "nat A -j ACCEPT"}},
		{"so does the end of a chain", "dropped by nat/OUTPUT 2", out(), []string{a, "nat OUTPUT -j A", "nat OUTPUT -j DROP"}},
		{"but from behind goto to the caller's caller", "dropped by nat/OUTPUT 2", out(), []string{a, b, "nat OUTPUT -j A", "nat OUTPUT -j DROP", "nat A -g B", "nat A -j ACCEPT", "nat B -j RETURN"}},
		{"goto from a base chain ends in its policy", "dropped by filter/OUTPUT 0", out(), []string{"filter OUTPUT DROP", "filter A:", "filter OUTPUT -g A", "filter OUTPUT -j ACCEPT"}},
		{"a policy decides after RETURN", "dropped by filter/OUTPUT 0", out(), []string{"filter OUTPUT DROP", "filter OUTPUT -j RETURN"}},
		{"ACCEPT ends its table only", redirected, out(), []string{"mangle OUTPUT -j ACCEPT", toProxy}},
		{"raw comes first", "dropped by raw/OUTPUT 1", out(), []string{"raw OUTPUT -j DROP", toProxy}},
		{"the jump is what decided", "redirected 15006 by nat/PREROUTING 1", in(), []string{a, "nat PREROUTING -p tcp -m tcp --dport 80 -j A", "nat A -p tcp -j REDIRECT --to-ports 15006"}},
		{"a range of ports", "rejected by filter/OUTPUT 1", out(), []string{"filter OUTPUT -p tcp -m multiport --dports 22,70:90 -j REJECT --reject-with tcp-reset"}},
		{"a port that is not known", "cannot-tell by filter/OUTPUT 1", out(from("10.0.0.5:0")), []string{"filter OUTPUT -p tcp -m tcp --sport 22 -j DROP"}},
		{"a mark with a mask", "dropped by mangle/OUTPUT 2", out(), []string{"mangle OUTPUT -j MARK --set-xmark 0x500/0xff00", "mangle OUTPUT -m mark --mark 0x500/0xf00 -j DROP"}},
		{"a mark through the connection", "dropped by mangle/OUTPUT 4", out(), []string{
			"mangle OUTPUT -j MARK --set-xmark 0x7/0xffffffff", "mangle OUTPUT -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"mangle OUTPUT -j CONNMARK --set-xmark 0x8/0x8", "mangle OUTPUT -m connmark --mark 0xf -j DROP",
		}},
		{"TPROXY", "handed-over 15006 by mangle/PREROUTING 1", in(), []string{"mangle PREROUTING -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff", "mangle PREROUTING -j DROP"}},
		{"TPROXY of what is not for the pod, with the route", "handed-over 15006 by mangle/PREROUTING 1", in(func(p *walk.Packet) { p.Type = "UNICAST" }), []string{"mangle PREROUTING -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff"}},
		{"and without", "dropped by mangle/PREROUTING 1", in(func(p *walk.Packet) { p.Type = "UNICAST" }), []string{"mangle PREROUTING -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff"}},
		{"an answer goes back to the proxy by its mark", "dropped by mangle/INPUT 1", out(state(ruleset.StateEstablished), func(p *walk.Packet) { p.ConnMark = 1337 }), []string{
			"mangle OUTPUT -p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff", "mangle INPUT -i lo -m mark --mark 0x539 -j DROP",
		}},
		{"what arrives has no sender", "passed", in(), []string{"mangle PREROUTING -m owner ! --uid-owner 5 -j DROP", "mangle PREROUTING -m owner --uid-owner 0 -j DROP"}},
		{"a broadcast", "dropped by filter/OUTPUT 1", out(to("255.255.255.255:67")), []string{"filter OUTPUT -m addrtype --dst-type BROADCAST -j DROP"}},
		{"multicast", "dropped by filter/OUTPUT 1", out(to("224.0.0.7:67")), []string{"filter OUTPUT -m addrtype --dst-type MULTICAST -j DROP"}},
		{"the older DNAT", "redirected 15053 by nat/OUTPUT 1", out(), []string{"nat OUTPUT -p tcp -j DNAT --to-destination 127.0.0.1:15053"}},
		{"a comment is no target", redirected, out(), []string{"filter OUTPUT -m comment --comment -j -p udp -j DROP", `filter OUTPUT ! -o eth0 -m comment --comment "a \" -j DROP" -j DROP`, toProxy}},

		{"what may match and changes nothing", redirected, out(), []string{"nat OUTPUT -p tcp -j REDIRECT --to-ports 15001", "filter OUTPUT -m quota --quota 5 -j LOG"}},
		{"what may match and leads to the same end", "passed by nat/OUTPUT 2", out(), []string{"nat OUTPUT -m quota --quota 5 -j ACCEPT", "nat OUTPUT -j RETURN"}},
		{"what may match and leads to another end", "cannot-tell by nat/OUTPUT 1", out(), []string{"nat OUTPUT -m quota --quota 5 -j ACCEPT", "nat OUTPUT -p tcp -j REDIRECT --to-ports 15001"}},
		{"what cannot match for one of its conditions", redirected, out(), []string{toProxy, "filter OUTPUT -p udp -m quota --quota 5 -j DROP"}},
		{"an unknown match that leads to a harmless chain", "redirected 15001 by nat/OUTPUT 2", out(), []string{a, "nat OUTPUT " + opaque + " -j A", "nat OUTPUT -p tcp -j REDIRECT --to-ports 15001", "nat A -p udp -j DROP"}},
		{"an unknown match behind the decision", "dropped by mangle/OUTPUT 1", out(), []string{"mangle OUTPUT -j DROP", "nat OUTPUT " + opaque}},
		{"a target that is not known", "cannot-tell by nat/OUTPUT 1", out(), []string{"nat OUTPUT -p tcp -j NFQUEUE --queue-num 1"}},
		{"two readings that meet again", "dropped by filter/OUTPUT 1", out(), []string{"mangle OUTPUT -m quota --quota 5 -j MARK --set-xmark 0x1/0xffffffff", "filter OUTPUT -p tcp -j DROP"}},
		{"the mark of a reading decides", "cannot-tell by mangle/OUTPUT 1", out(), []string{"mangle OUTPUT -m quota --quota 5 -j MARK --set-xmark 0x1/0xffffffff", "filter OUTPUT -m mark --mark 0x1 -j DROP"}},
	} {
		n := walk.Namespace{Live: []ruleset.Set{rulesettest.Set(tt.rules...)}, Delivered: map[ruleset.Family][]ruleset.Mark{ruleset.IPv4: {{Value: 1337}}}}
		if r := n.Walk(tt.p); short(r) != tt.want {
			t.Errorf("%s: %s, want %s\n%s\n%+v", tt.name, short(r), tt.want, r.Summary, r.Hops)
		}
	}
}

// TestWalk_Zones: the first zone stays, also for packets that come back by lo.
func TestWalk_Zones(t *testing.T) {
	set := rulesettest.Set("raw OUTPUT -j CT --zone 2", "raw OUTPUT -j CT --zone 1", "raw PREROUTING -j CT --zone 3")
	for want, p := range map[ruleset.Zone]walk.Packet{2: out(byLo), 3: in()} {
		check.Equal(t, walk.Namespace{Live: []ruleset.Set{set}}.Walk(p).Zone, want)
	}
}

// reasonCase has a Spec, a packet, and the expected summary.
type reasonCase struct {
	set  func(*redirect.Spec)
	p    walk.Packet
	want string
}

func reasonCases() []reasonCase {
	const (
		annotation = " (annotation traffic.sidecar.istio.io/"
		past       = "goes out unredirected, because "
		pastIn     = "comes in unredirected, because "
		always     = "goes out unredirected, as in every pod: "
		udp        = always + "the mesh captures TCP, and of UDP only DNS where DNS capture is on"
	)
	ofUDP := func(p *walk.Packet) { p.Protocol = ruleset.UDP }
	return []reasonCase{
		{func(*redirect.Spec) {}, out(), "is redirected to port 15001: all other TCP is captured"},
		{func(s *redirect.Spec) { s.OutboundPortsExclude = ruleset.PortList(5432, 80) }, out(), past + "excludeOutboundPorts=80" + annotation + "excludeOutboundPorts)"},
		{func(s *redirect.Spec) {
			s.OutboundPortsExclude = []ruleset.PortRange{{First: 81, Last: 90}, {First: 70, Last: 80}, {First: 1, Last: 2}}
			s.Annotations = map[redirect.Field]string{redirect.FieldOutboundPortsExclude: "a/b"}
		}, out(), past + "excludeOutboundPorts=70-80 (annotation a/b)"},
		{func(s *redirect.Spec) { s.OutboundExclude = spectest.Prefixes("10.1.0.0/16", "10.0.0.0/8") }, out(), past + "excludeOutboundIPRanges=10.0.0.0/8" + annotation + "excludeOutboundIPRanges)"},
		{func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: spectest.Prefixes("10.0.0.0/8")} }, out(), "is redirected to port 15001: this network is captured"},
		{func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: spectest.Prefixes("10.1.0.0/16")} }, out(), past + "includeOutboundIPRanges=10.1.0.0/16" + annotation + "includeOutboundIPRanges)"},
		{func(s *redirect.Spec) { s.Outbound = redirect.Networks{} }, out(), past + `includeOutboundIPRanges=""` + annotation + "includeOutboundIPRanges)"},
		{func(s *redirect.Spec) {
			s.OutboundPortsExclude, s.OutboundExclude = ruleset.PortList(80), spectest.Prefixes("10.0.0.0/8")
		}, out(), past + "excludeOutboundIPRanges=10.0.0.0/8" + annotation + "excludeOutboundIPRanges) and excludeOutboundPorts=80" + annotation + "excludeOutboundPorts)"},
		{func(s *redirect.Spec) { s.UIDs = []uint32{1000} }, out(), always + "the proxy itself is never captured: no loops"},
		{func(*redirect.Spec) {}, out(byProxy(5)), always + "the proxy itself is never captured: no loops"},
		{func(*redirect.Spec) {}, out(ofUDP), udp},
		{func(*redirect.Spec) {}, out(ofUDP, to("10.0.0.7:53")), udp},
		{func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{List: []uint32{1}} }, out(), past + "the captured groups=1"},
		{func(s *redirect.Spec) { s.ExcludeInterfaces = []string{"eth0"} }, out(), past + "excludeInterfaces=eth0" + annotation + "excludeInterfaces)"},
		{func(s *redirect.Spec) { s.DNS = redirect.DNSAll }, out(to("10.0.0.7:53")), "is redirected to port 15053: DNS goes to the sidecar agent"},
		{func(s *redirect.Spec) { s.DNS = redirect.DNSAll }, out(ofUDP, to("10.0.0.7:53")), "is redirected to port 15053: DNS goes to the sidecar agent"},
		{func(s *redirect.Spec) { s.DNS, s.OutboundPortsExclude = redirect.DNSAll, ruleset.PortList(53) }, out(ofUDP, to("10.0.0.7:53")), past + "excludeOutboundPorts=53" + annotation + "excludeOutboundPorts)"},
		{func(s *redirect.Spec) { s.OutboundPortsExclude = ruleset.PortList(53) }, out(ofUDP, to("10.0.0.7:53")), udp},
		{func(s *redirect.Spec) { s.DNS = redirect.DNSAll }, out(ofUDP, to("10.0.0.7:53"), byProxy(5)), always + "the proxy itself is never captured: no loops"},
		{func(*redirect.Spec) {}, in(), "is redirected to port 15006: every other inbound port is captured"},
		{func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(80)} }, in(), "is redirected to port 15006: this inbound port is captured"},
		{func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(81, 82, 83, 84)} }, in(), pastIn + "includeInboundPorts=81,82,83,… (1 more)" + annotation + "includeInboundPorts)"},
		{func(s *redirect.Spec) { s.InboundExclude = ruleset.PortList(80) }, in(), pastIn + "excludeInboundPorts=80" + annotation + "excludeInboundPorts)"},
		{func(*redirect.Spec) {}, in(to("10.0.0.7:15008")), "comes in unredirected, as in every pod: HBONE tunnels go straight to the proxy's own port"},
		{func(*redirect.Spec) {}, in(to("10.0.0.7:15020")), "comes in unredirected, as in every pod: this inbound port is excluded by default"},
		{func(s *redirect.Spec) { s.Mode = redirect.TPROXY }, in(), "is handed over by TPROXY to port 15006: a new connection: hand it to the proxy"},
		{func(s *redirect.Spec) { s.Mode = redirect.TPROXY }, out(proxied), always + "the app calls its own pod: directly"},
		{func(s *redirect.Spec) { s.DropInvalid = true }, in(state(ruleset.StateInvalid)), "is dropped: packets that fit no connection are dropped"},
		{func(*redirect.Spec) {}, out(byLo, from("127.0.0.6:1")), always + "the proxy hands an inbound connection to the app"},
		{func(*redirect.Spec) {}, out(byLo, byProxy(1337)), "is redirected to port 15006: the proxy calls its own pod: through the inbound listener"},
	}
}

// asRead returns rules as they are read back from the kernel: iptables rules keep only their text and its meaning.
func asRead(sets []ruleset.Set) []ruleset.Set {
	for _, s := range sets {
		for _, t := range s.Tables {
			for _, c := range t.Chains {
				for i, r := range c.Rules {
					if c.Rules[i].Why = ""; s.Family != ruleset.Inet {
						c.Rules[i] = ruleset.Read(r.String())
					}
				}
			}
		}
	}
	return sets
}

// TestWalk_Reasons holds both dialects to the same sentences.
func TestWalk_Reasons(t *testing.T) {
	for _, native := range []bool{false, true} {
		for _, c := range reasonCases() {
			w := walk.Wanted{Spec: redirect.Default(), Families: redirect.Families{IPv6: redirect.Captured}, Native: native}
			c.set(&w.Spec)
			n := walk.Namespace{Owner: redirect.Sidecar(), Live: asRead(w.Sets()), Wanted: &w, Delivered: map[ruleset.Family][]ruleset.Mark{ruleset.IPv4: {{Value: 1337}}}}
			r := n.Walk(c.p)
			if diff := cmp.Diff(c.want, r.Summary); diff != "" || r.Verdict != r.Expected || r.To != r.ExpectedTo {
				t.Errorf("native %t: %s\nexpected %s\n%+v", native, diff, r.Expected, r.Hops)
			}
		}
	}
}

// TestWalk_Deviations: where the live rules differ from the wanted rules, the sentence names the rule.
func TestWalk_Deviations(t *testing.T) {
	const though = ", though the wanted rules redirect it to port 15001: "
	const past = "goes out unredirected" + though
	for _, c := range []struct{ chain, added, deleted, want string }{
		{"OUTPUT", "-p tcp -m tcp --dport 80 -j RETURN", "", past + `rule 1 of nat OUTPUT ("-p tcp -m tcp --dport 80 -j RETURN") is not the mesh's`},
		{"OUTPUT", "-p tcp -j REDIRECT --to-ports 8080", "", "is redirected to port 8080" + though + `rule 1 of nat OUTPUT ("-p tcp -j REDIRECT --to-ports 8080") is not the mesh's`},
		{"OUTPUT", "", "-j ISTIO_OUTPUT", past + `rule 1 of nat OUTPUT ("-j ISTIO_OUTPUT") is missing or out of order`},
		{"ISTIO_OUTPUT", "", "-j ISTIO_REDIRECT", past + `rule 11 of nat ISTIO_OUTPUT ("-j ISTIO_REDIRECT") is missing or out of order`},
		{"", "", "", past + `rule 1 of nat OUTPUT ("-j ISTIO_OUTPUT") is missing or out of order`},
	} {
		w := walk.Wanted{Spec: redirect.Default()}
		n := walk.Namespace{Owner: redirect.Sidecar(), Live: asRead(w.Sets()), Wanted: &w}
		for _, table := range n.Live[0].Tables {
			for i := range table.Chains {
				chain := &table.Chains[i]
				if table.Name == "nat" && chain.Name == c.chain && c.added != "" {
					chain.Rules = append([]ruleset.Rule{ruleset.Read(c.added)}, chain.Rules...)
				}
				chain.Rules = slices.DeleteFunc(chain.Rules, func(r ruleset.Rule) bool {
					return c.chain == "" || chain.Name == c.chain && r.String() == c.deleted
				})
			}
		}
		check.Diff(t, "Summary", c.want, n.Walk(out()).Summary)
	}
}

// TestWalk_AnotherInterfaceNamedLo: it is not the loopback device, so the proxy's packets should pass, but its name redirects them.
func TestWalk_AnotherInterfaceNamedLo(t *testing.T) {
	w := walk.Wanted{Spec: redirect.Default()}
	n := walk.Namespace{Owner: redirect.Sidecar(), Live: asRead(w.Sets()), Wanted: &w, Loopback: "lo0"}
	r := n.Walk(out(byLo, byProxy(1337)))
	check.Equal(t, r.Verdict, walk.Redirected)
	check.Equal(t, r.Expected, walk.Passed)
}

// TestWalk_NativeRulesOfOthers: an unknown rule in a native table may do anything, wherever it stands ahead of the end.
func TestWalk_NativeRulesOfOthers(t *testing.T) {
	w := walk.Wanted{Spec: redirect.Default(), Native: true}
	n := walk.Namespace{Owner: redirect.Sidecar(), Live: asRead(w.Sets()), Wanted: &w}
	chain := &n.Live[0].Tables[0].Chains[1]
	other := ruleset.Listed([]ruleset.Match{ruleset.Other{Text: "[socket]"}}, ruleset.Drop, []ruleset.Match{ruleset.Other{Text: "[socket]"}, ruleset.Drop})
	chain.Rules = append([]ruleset.Rule{other}, chain.Rules...)
	r := n.Walk(out())
	check.Equal(t, r.Summary, `cannot tell, because rule 1 of istio-proxy-nat output ("[socket] drop") may match`)
	check.Equal(t, n.Walk(in()).Verdict, walk.Redirected)
}

// TestWalk_TwoSets: where two sets of tables have the same hook and priority, the order matters unless both end alike.
func TestWalk_TwoSets(t *testing.T) {
	first := rulesettest.Set("nat OUTPUT -p tcp -j REDIRECT --to-ports 15001")
	for want, rule := range map[string]string{"redirected": "nat OUTPUT -p tcp -j LOG", "cannot-tell": "nat OUTPUT -p tcp -j REDIRECT --to-ports 1"} {
		for _, sets := range [][]ruleset.Set{{first, rulesettest.Set(rule)}, {rulesettest.Set(rule), first}} {
			check.Equal(t, walk.Namespace{Owner: redirect.Sidecar(), Live: sets}.Walk(out()).Verdict.String(), want, rule)
		}
	}
}

// TestWalk_HostileRules: walks of tables that a hostile pod can make, or that no kernel accepts, end in time with an answer.
func TestWalk_HostileRules(t *testing.T) {
	const many = 100_000
	repeat := func(format string) []ruleset.Rule {
		rules := make([]ruleset.Rule, many)
		for i := range rules {
			rules[i] = ruleset.Read(strings.ReplaceAll(format, "N", fmt.Sprint(i+1)))
		}
		return rules
	}
	// ladder returns chains that each jump to the next one the given number of times.
	ladder := func(length, width int) []ruleset.Chain {
		var chains []ruleset.Chain
		for i := range length {
			chains = append(chains, ruleset.Chain{Name: fmt.Sprint("C", i), Policy: ruleset.NoPolicy})
			for range width {
				chains[i].Rules = append(chains[i].Rules, ruleset.Read(fmt.Sprintf("-j C%d", i+1)))
			}
		}
		return append(chains, ruleset.Chain{Name: fmt.Sprint("C", length), Policy: ruleset.NoPolicy})
	}
	circle := ladder(2, 1)
	circle[1].Rules = []ruleset.Rule{ruleset.Read("-m quota --quota 5 -j C0"), ruleset.Read("-g C0")}
	start := []ruleset.Rule{ruleset.Read("-j C0")}
	for name, c := range map[string]struct {
		rules  []ruleset.Rule
		chains []ruleset.Chain
		want   string
	}{
		"many rules":                       {repeat("-p udp -m udp --dport N -j DROP"), nil, "passed"},
		"many that match":                  {repeat("-p tcp -j LOG --log-prefix N"), nil, "passed"},
		"many that may drop":               {repeat("-m quota --quota N -j DROP"), nil, "cannot-tell by filter/OUTPUT 1"},
		"many that may accept":             {repeat("-m quota --quota N -j ACCEPT"), nil, "passed"},
		"many that may mark":               {repeat("-m quota --quota N -j MARK --set-xmark N"), nil, "cannot-tell"},
		"a circle":                         {start, circle, "cannot-tell"},
		"chains as deep as a kernel takes": {start, ladder(900, 1), "passed"},
		"deeper chains":                    {start, ladder(many, 1), "cannot-tell"},
		"chains that double":               {start, ladder(60, 2), "cannot-tell"},
		"a chain that is not there":        {[]ruleset.Rule{ruleset.Read("-j NOWHERE")}, nil, "cannot-tell by filter/OUTPUT 1"},
	} {
		table := ruleset.Table{Name: "filter", Chains: append([]ruleset.Chain{{Name: "OUTPUT", Policy: "ACCEPT", Rules: c.rules}}, c.chains...)}
		n := walk.Namespace{Live: []ruleset.Set{{Family: ruleset.IPv4, Tables: []ruleset.Table{table}}}}
		began := time.Now()
		r := n.Walk(out())
		if took := time.Since(began); short(r) != c.want || took > 20*time.Second || len(r.Summary) > 500 {
			t.Errorf("%s: %s after %s, want %s: %s", name, short(r), took, c.want, r.Summary)
		}
	}
}

// FuzzRule: a walk survives a rule of any text.
func FuzzRule(f *testing.F) {
	for _, text := range []string{`! -o lo -m comment --comment "a \`, "-j", "-g", "-m", "! !", "[", "[] -j", "--dport 1:2,3 -j MARK --set-xmark 0x/0x", "-j TPROXY --on-port x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		chains := []ruleset.Chain{{Name: "OUTPUT", Policy: "ACCEPT", Rules: []ruleset.Rule{ruleset.Read(text)}}}
		set := ruleset.Set{Family: ruleset.IPv4, Tables: []ruleset.Table{{Name: "mangle", Chains: chains}}}
		if r := (walk.Namespace{Live: []ruleset.Set{set}}).Walk(out()); r.Summary == "" {
			t.Errorf("%q: no summary", text)
		}
	})
}
