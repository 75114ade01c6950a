package rulesettest_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

func parse(t *testing.T, f ruleset.Family, text string) ruleset.Set {
	t.Helper()
	set, err := ruleset.Parse(f, text)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

type packet = rulesettest.Packet

// out is a packet of uid and gid 1000 from 10.0.0.5:40000 to 10.0.0.7:80 by eth0, changed as the test needs it.
func out(change ...func(*packet)) packet {
	p := packet{
		Hook: rulesettest.Outgoing, Out: "eth0", Proto: rulesettest.TCP, UID: 1000, GID: 1000,
		Src: netip.MustParseAddr("10.0.0.5"), Sport: 40000, Dst: netip.MustParseAddr("10.0.0.7"), Dport: 80,
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

// in is the same packet arriving.
func in(change ...func(*packet)) packet {
	p := out()
	p.Hook, p.In, p.Out, p.UID, p.GID = rulesettest.Incoming, "eth0", "", 0, 0
	for _, c := range change {
		c(&p)
	}
	return p
}

// table has rules in its chains: that of the packets' hook, A and B.
func table(name, hook string, rules []ruleset.Rule, own ...[]ruleset.Rule) ruleset.Table {
	t := ruleset.Table{Name: name, Chains: []ruleset.Chain{{Name: hook, Policy: "ACCEPT", Rules: rules}}}
	for i, r := range own {
		t.Chains = append(t.Chains, ruleset.Chain{Name: string(rune('A' + i)), Policy: ruleset.NoPolicy, Rules: r})
	}
	return t
}

func does(target ruleset.Target, matches ...ruleset.Match) ruleset.Rule {
	return ruleset.IPTables("", target, matches...)
}

var (
	tcp    = ruleset.Protocol{Number: ruleset.TCP}
	toPort = table("nat", "OUTPUT", []ruleset.Rule{does(ruleset.RedirectTo(15001), tcp)})
)

// TestMatches drops what meets one match.
func TestMatches(t *testing.T) {
	network := netip.MustParsePrefix("10.0.0.4/30")
	far := netip.MustParsePrefix("10.0.0.8/29")
	noSocket := func(p *packet) { p.NoSocket, p.UID = true, 0 }
	for _, tt := range []struct {
		match ruleset.Match
		p     packet
		want  bool
	}{
		{ruleset.Interface{Name: "eth0", Out: true}, out(), true},
		{ruleset.Interface{Name: "eth1", Out: true}, out(), false},
		{ruleset.Interface{Name: "eth0"}, in(), true},
		{ruleset.Interface{Name: "eth"}, in(), false},
		{ruleset.Interface{Name: "eth1", Not: true}, in(), true},
		{ruleset.Network{Prefix: network, Source: true}, out(), true},
		{ruleset.Network{Prefix: far, Source: true}, out(), false},
		{ruleset.Network{Prefix: network}, out(), true},
		{ruleset.Network{Prefix: far}, out(), false},
		{ruleset.Network{Prefix: network, Not: true}, out(), false},
		{ruleset.Network{Prefix: far, Not: true}, out(), true},
		{tcp, out(), true},
		{ruleset.Protocol{Number: ruleset.UDP}, out(), false},
		{ruleset.Protocol{Number: ruleset.UDP, Not: true}, out(), true},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 80}, out(), true},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 81}, out(), false},
		{ruleset.Port{Protocol: ruleset.UDP, Number: 80}, out(), false},
		{ruleset.Port{Protocol: ruleset.UDP, Number: 81, Not: true}, out(), false},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 80, Not: true}, out(), false},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 81, Not: true}, out(), true},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 40000, Source: true}, out(), true},
		{ruleset.Port{Protocol: ruleset.TCP, Number: 80, Source: true}, out(), false},
		{ruleset.Ports{Protocol: ruleset.TCP, List: [2]uint16{53, 80}}, out(), true},
		{ruleset.Ports{Protocol: ruleset.TCP, List: [2]uint16{53, 80}, Not: true}, out(), false},
		{ruleset.Ports{Protocol: ruleset.TCP, List: [2]uint16{53, 15008}, Not: true}, out(), true},
		{ruleset.Reset{}, out(func(p *packet) { p.RST = true }), true},
		{ruleset.Reset{}, out(), false},
		{ruleset.Owner{ID: 1000}, out(), true},
		{ruleset.Owner{ID: 1337}, out(), false},
		{ruleset.Owner{ID: 1000, Not: true}, out(), false},
		{ruleset.Owner{ID: 7, Group: true}, out(func(p *packet) { p.GID = 7 }), true},
		{ruleset.Owner{ID: 0}, out(noSocket), false},
		{ruleset.Owner{ID: 0, Not: true}, out(noSocket), true},
		{ruleset.Mark{Value: 5}, out(func(p *packet) { p.Mark = 5 }), true},
		{ruleset.Mark{Value: 5, Not: true}, out(), true},
		{ruleset.Mark{Value: 5, Connection: true}, out(func(p *packet) { p.Connmark = 5 }), true},
		{ruleset.Mark{Value: 5, Connection: true}, out(func(p *packet) { p.Mark = 5 }), false},
		{ruleset.StateRelated | ruleset.StateEstablished, out(func(p *packet) { p.State = rulesettest.Established }), true},
		{ruleset.StateRelated | ruleset.StateEstablished, out(), false},
		{ruleset.OfFamily(ruleset.IPv4), out(), true},
		{ruleset.OfFamily(ruleset.IPv6), out(), false},
	} {
		hook := map[rulesettest.Hook]string{rulesettest.Outgoing: "OUTPUT", rulesettest.Incoming: "PREROUTING"}[tt.p.Hook]
		rules := ruleset.New(ruleset.IPv4, table("mangle", hook, []ruleset.Rule{{Target: ruleset.Drop, Matches: []ruleset.Match{tt.match}}}))
		v, err := rulesettest.Trace(rules, tt.p)
		if err != nil || (v.Action == rulesettest.Drop) != tt.want {
			t.Errorf("%#v: %s (%v), want it to match: %v", tt.match, v, err, tt.want)
		}
	}
}

func TestTrace(t *testing.T) {
	state := func(s rulesettest.State) packet { return out(func(p *packet) { p.State = s }) }
	jump := func(to string) ruleset.Rule { return does(ruleset.Jump{Chain: to}) }
	drop, accept, back := does(ruleset.Drop), does(ruleset.Accept), does(ruleset.Return)
	type rules = []ruleset.Rule
	policy := table("filter", "OUTPUT", rules{back})
	policy.Chains[0].Policy = "DROP"
	for _, tt := range []struct {
		name   string
		tables []ruleset.Table
		p      packet
		want   string
	}{
		{"no rules accept", nil, out(), "accepted"},
		{"a redirect in nat rewrites the port", []ruleset.Table{toPort}, out(), "redirected to 15001"},
		{"what comes in does not meet OUTPUT", []ruleset.Table{toPort}, in(), "accepted"},
		{"nat is asked about a related connection", []ruleset.Table{toPort}, state(rulesettest.Related), "redirected to 15001"},
		{"nat is not asked about a known connection", []ruleset.Table{toPort}, state(rulesettest.Established), "accepted"},
		{"nat is not asked about an invalid packet", []ruleset.Table{toPort}, state(rulesettest.Invalid), "accepted"},
		{
			"nat is not asked again about what comes in by lo",
			[]ruleset.Table{table("nat", "PREROUTING", rules{drop})},
			in(func(p *packet) { p.In = "lo" }), "accepted",
		},
		{"RETURN goes back to the calling chain", []ruleset.Table{table("nat", "OUTPUT", rules{jump("A"), drop}, rules{back, accept})}, out(), "dropped"},
		{"the end of a chain goes back as well", []ruleset.Table{table("nat", "OUTPUT", rules{jump("A"), drop}, nil)}, out(), "dropped"},
		{
			"ACCEPT ends the table from any depth",
			[]ruleset.Table{table("nat", "OUTPUT", rules{jump("A"), drop}, rules{jump("B"), drop}, rules{accept})},
			out(), "accepted",
		},
		{"ACCEPT ends its table only", []ruleset.Table{table("mangle", "OUTPUT", rules{accept}), toPort}, out(), "redirected to 15001"},
		{"a policy decides after RETURN", []ruleset.Table{policy}, out(), "dropped"},
		{
			"a redirected packet may still be dropped, by its new port",
			[]ruleset.Table{toPort, table("filter", "OUTPUT", rules{does(ruleset.Drop, ruleset.Port{Protocol: ruleset.TCP, Number: 15001})})},
			out(), "dropped",
		},
		{"what is dropped in raw never reaches nat", []ruleset.Table{table("raw", "OUTPUT", rules{drop}), toPort}, out(), "dropped"},
		{"filter sees incoming packets in INPUT", []ruleset.Table{table("filter", "INPUT", rules{does(ruleset.TCPReset, tcp)})}, in(), "rejected with tcp-reset"},
		{"MARK goes on", []ruleset.Table{table("mangle", "OUTPUT", rules{does(ruleset.SetMark(1338))}), toPort}, out(), "redirected to 15001, mark 1338"},
		{"a saved mark can be restored", []ruleset.Table{table("mangle", "OUTPUT", rules{
			does(ruleset.SetMark(1337)), does(ruleset.SaveMark{}), does(ruleset.SetMark(1)), does(ruleset.RestoreMark{}),
		})}, out(), "accepted, mark 1337"},
		{
			"TPROXY hands over and marks",
			[]ruleset.Table{table("mangle", "PREROUTING", rules{does(ruleset.TProxy{Port: 15006, Mark: 1337}, tcp), drop})},
			in(), "handed to 15006, mark 1337",
		},
		{"the first zone stays", []ruleset.Table{table("raw", "OUTPUT", rules{does(ruleset.Zone(2)), does(ruleset.Zone(1))})}, out(), "accepted, zone 2"},
		{"lo has no zone", []ruleset.Table{table("raw", "PREROUTING", rules{does(ruleset.Zone(2))})}, in(func(p *packet) { p.In = "lo" }), "accepted"},
	} {
		v, err := rulesettest.Trace(ruleset.New(ruleset.IPv4, tt.tables...), tt.p)
		if err != nil || v.String() != tt.want {
			t.Errorf("%s: %s (%v), want %s", tt.name, v, err, tt.want)
		}
	}
}

// TestRedirectedPacketsGoToLoopback: what the pod sends gets a new destination, what comes in keeps its own.
func TestRedirectedPacketsGoToLoopback(t *testing.T) {
	v, err := rulesettest.Trace(ruleset.New(ruleset.IPv4, toPort), out())
	if err != nil || v.Packet.Dst != netip.MustParseAddr("127.0.0.1") || v.Packet.Out != "lo" || v.Packet.Dport != 15001 {
		t.Errorf("%+v (%v)", v.Packet, err)
	}
	if again := v.Packet.Loop(); again.Hook != rulesettest.Incoming || again.In != "lo" || again.Out != "" || again.UID != 0 {
		t.Errorf("by lo it is %+v", again)
	}
	if !strings.Contains(v.Explain(), "nat/OUTPUT: -p tcp -j REDIRECT --to-ports 15001") {
		t.Errorf("explained as %q", v.Explain())
	}
}

// TestTraceRefusesWhatItDoesNotKnow: an answer never rests on a rule that was skipped, or on a packet that cannot be.
func TestTraceRefusesWhatItDoesNotKnow(t *testing.T) {
	type rules = []ruleset.Rule
	jump := func(to string) ruleset.Rule { return does(ruleset.Jump{Chain: to}) }
	for _, tt := range []struct {
		table ruleset.Table
		p     packet
		want  string
	}{
		{table("nat", "OUTPUT", rules{ruleset.Opaque("-m quota --quota 5 -j DROP")}), out(), `rule "-m quota --quota 5 -j DROP" of nat/OUTPUT: target <nil> is not known here`},
		{table("nat", "OUTPUT", rules{does(ruleset.DNAT{})}), out(), "is not known here"},
		{table("nat", "OUTPUT", rules{{Target: ruleset.Drop, Matches: []ruleset.Match{nil}}}), out(), "match <nil> is not known here"},
		{table("nat", "OUTPUT", rules{does(ruleset.Drop, ruleset.Interface{Name: "lo"})}), out(), "in chain OUTPUT"},
		{table("nat", "PREROUTING", rules{does(ruleset.Drop, ruleset.Interface{Name: "lo", Out: true})}), out(), "in chain PREROUTING"},
		{table("nat", "PREROUTING", rules{does(ruleset.Drop, ruleset.Owner{})}), out(), "refuses an owner in chain PREROUTING"},
		{table("nat", "PREROUTING", rules{jump("A")}, rules{does(ruleset.Drop, ruleset.Owner{})}), in(), "asks an incoming packet for its sender"},
		{table("mangle", "OUTPUT", rules{jump("A")}, rules{does(ruleset.TProxy{Port: 1}, tcp)}), out(), "was reached by an outgoing packet"},
		{table("nat", "OUTPUT", rules{jump("NOWHERE")}), out(), `target "NOWHERE" is no chain of the table`},
		{table("nat", "OUTPUT", rules{jump("PREROUTING")}), out(), `target "PREROUTING" is no chain of the table`},
		{table("nat", "OUTPUT", rules{jump("A")}, rules{jump("B")}, rules{jump("A")}), out(), "chains lead in a circle"},
		{table("mangle", "OUTPUT", rules{does(ruleset.RedirectTo(1), tcp)}), out(), "table nat only"},
		{table("nat", "OUTPUT", rules{does(ruleset.RedirectTo(1))}), out(), "with a protocol only"},
		{table("nat", "OUTPUT", rules{does(ruleset.TProxy{}, tcp)}), out(), "table mangle only"},
		{table("nat", "OUTPUT", rules{does(ruleset.Zone(1))}), out(), "table raw only"},
		{table("nat", "OUTPUT", rules{does(ruleset.TCPReset, tcp)}), out(), "table filter only"},
		{table("nat", "POSTROUTING", rules{does(ruleset.Accept)}), out(), "reading chain nat/POSTROUTING: rules here are not known to Trace"},
		{ruleset.Table{Name: "nat"}, out(func(p *packet) { p.Dst = netip.MustParseAddr("fd00::1") }), "is not IPv4"},
		{ruleset.Table{Name: "nat"}, out(func(p *packet) { p.Dst = netip.Addr{} }), "no destination"},
		{ruleset.Table{Name: "nat"}, out(func(p *packet) { p.In = "eth0" }), "want exactly the one of its hook"},
		{ruleset.Table{Name: "nat"}, in(func(p *packet) { p.In = "" }), "want exactly the one of its hook"},
		{ruleset.Table{Name: "nat"}, out(func(p *packet) { p.Proto = "" }), `packet has protocol ""`},
		{ruleset.Table{Name: "nat"}, out(func(p *packet) { p.Proto = rulesettest.ICMP }), "packet of protocol icmp has ports"},
	} {
		v, err := rulesettest.Trace(ruleset.New(ruleset.IPv4, tt.table), tt.p)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("error is %v (verdict %s), want %q in it", err, v, tt.want)
		}
	}
	both := ruleset.New(ruleset.IPv4, table("mangle", "PREROUTING", rules{does(ruleset.TProxy{Port: 1, Mark: 1}, tcp)}),
		table("nat", "PREROUTING", rules{does(ruleset.RedirectTo(1), tcp)}))
	if _, err := rulesettest.Trace(both, in()); err == nil || !strings.Contains(err.Error(), "handed over by TPROXY and is redirected as well") {
		t.Errorf("error is %v", err)
	}
}
