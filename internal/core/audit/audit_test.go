package audit_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

var v4 = redirect.Families{HasIPv4: true, Host: netip.MustParseAddr("10.0.0.5")}

// name names the fields, as package sidecar does by annotations.
func name(f redirect.Field) string {
	return map[redirect.Field]string{
		redirect.FieldInbound: "inbound", redirect.FieldOutbound: "outbound", redirect.FieldOutboundExclude: "outbound-exclude",
		redirect.FieldOutboundPortsExclude: "outbound-ports-exclude", redirect.FieldExcludeInterfaces: "interfaces",
		redirect.FieldOwnerGroups: "groups", redirect.FieldOwnerGroupsExclude: "groups-exclude",
	}[f]
}

// live returns the wanted rules with changes, compared as a namespace's.
func live(spec redirect.Spec, change func(*ruleset.Set)) (diffs []ruleset.Diff, mesh bool) {
	want, have := redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv4)
	change(&have)
	owned := redirect.Owned(want, have)
	if d := ruleset.Compare(want, have, owned); !d.Empty() {
		diffs = append(diffs, d)
	}
	return diffs, len(owned.Chains) > 0
}

// chain returns the rules of a chain of table nat.
func chain(s *ruleset.Set, name string) *[]ruleset.Rule {
	for i := range s.Tables {
		for j := range s.Tables[i].Chains {
			if s.Tables[i].Name == "nat" && s.Tables[i].Chains[j].Name == name {
				return &s.Tables[i].Chains[j].Rules
			}
		}
	}
	panic(name)
}

func TestRules(t *testing.T) {
	t.Parallel()
	ahead := func(rule string) func(*ruleset.Set) {
		return func(s *ruleset.Set) {
			rules := chain(s, "OUTPUT")
			*rules = slices.Insert(*rules, 0, ruleset.Opaque(rule))
		}
	}
	for name, test := range map[string]struct {
		change func(*ruleset.Set)
		want   audit.State
		text   string
	}{
		"as wanted":      {func(*ruleset.Set) {}, audit.Captured, ""},
		"no rules":       {func(s *ruleset.Set) { s.Tables = nil }, audit.Bypassed, "no rule of the mesh"},
		"a rule is gone": {func(s *ruleset.Set) { r := chain(s, "ISTIO_OUTPUT"); *r = (*r)[1:] }, audit.Drifted, "missing \"-A ISTIO_OUTPUT -p tcp -m tcp --dport 15020"},
		"the order": {
			func(s *ruleset.Set) { r := *chain(s, "ISTIO_OUTPUT"); r[0], r[1] = r[1], r[0] }, audit.Drifted, "missing",
		},
		"RETURN ahead":     {ahead("-p tcp -j RETURN"), audit.ForeignRule, "-A OUTPUT -p tcp -j RETURN"},
		"a chain ahead":    {ahead("-g OTHER"), audit.ForeignRule, "-g OTHER"},
		"LOG ahead":        {ahead("-p tcp -j LOG"), audit.Captured, ""},
		"a count ahead":    {ahead("-p tcp"), audit.Captured, ""},
		"the jump is gone": {func(s *ruleset.Set) { *chain(s, "OUTPUT") = nil }, audit.Drifted, "nat/OUTPUT: missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			diffs, mesh := live(redirect.Default(), test.change)
			got := audit.Assess(redirect.Default(), audit.Observation{Mesh: mesh, Rules: audit.Rules(redirect.Default(), mesh, diffs, nil), Families: v4})
			if state := audit.StateOf(got); state != test.want || len(got) == 0 != (test.want == audit.Captured) {
				t.Fatalf("got %v", got)
			}
			if test.text != "" && !strings.Contains(got[0].Detail, test.text) {
				t.Errorf("got %q", got[0].Detail)
			}
		})
	}
}

func TestTheMostSeriousStateCounts(t *testing.T) {
	t.Parallel()
	diffs, _ := live(redirect.Default(), func(s *ruleset.Set) {
		*chain(s, "ISTIO_OUTPUT") = nil
		rules := chain(s, "OUTPUT")
		*rules = slices.Insert(*rules, 0, ruleset.Opaque("-j ACCEPT"))
	})
	o := audit.Observation{
		Mesh: true, Rules: audit.Rules(redirect.Default(), true, diffs, nil), Routing: []string{"policy rule is missing"},
		Families: redirect.Families{HasIPv4: true, HasIPv6: true, Host: v4.Host, IPv6: redirect.Bypassed},
		Listeners: func(to netip.AddrPort) []audit.Listener {
			if to.Port() == redirect.InboundPort {
				return []audit.Listener{{UID: 4711, GIDs: []uint32{0}}}
			}
			return nil
		},
		Collisions: make([]audit.Process, 20),
	}
	got := audit.Assess(redirect.Default(), o)
	var states []audit.State
	for _, p := range got {
		states = append(states, p.State)
	}
	want := []audit.State{
		audit.ForeignRule, audit.Drifted, audit.Drifted, audit.NoListener, audit.ForeignListener,
		audit.UIDCollision, audit.UIDCollision, audit.UIDCollision, audit.UIDCollision, audit.UIDCollision, audit.UIDCollision, audit.IPv6Open,
	}
	if !slices.Equal(states, want) || audit.StateOf(got) != audit.ForeignRule {
		t.Errorf("got %v", got)
	}
	if text := got[10].Detail; text != "and 15 more processes" {
		t.Errorf("got %q", text)
	}
}

func TestAssess_ThreadOfAProcess(t *testing.T) {
	t.Parallel()
	got := audit.Assess(redirect.Default(), audit.Observation{Collisions: []audit.Process{{PID: 7, Thread: 9, Container: "app", UID: 1337, GID: 5}}})
	if len(got) != 1 || got[0].Detail != `thread 9 of process 7 of container "app" runs with uid 1337 and gid 5` {
		t.Errorf("got %v", got)
	}
}

func TestListeners(t *testing.T) {
	t.Parallel()
	none, dns := redirect.Default(), redirect.Default()
	none.Inbound = redirect.Ports{}
	dns.DNS = redirect.DNSAll
	v6 := redirect.Families{HasIPv6: true, Host: netip.MustParseAddr("fd00::5"), IPv6: redirect.Captured}
	dual := redirect.Families{HasIPv4: true, HasIPv6: true, Host: v4.Host, IPv6: redirect.Captured}
	for name, test := range map[string]struct {
		spec     redirect.Spec
		families redirect.Families
		want     []string
	}{
		"IPv4":       {redirect.Default(), v4, []string{"127.0.0.1:15001", "10.0.0.5:15006"}},
		"no inbound": {none, v4, []string{"127.0.0.1:15001"}},
		"DNS":        {dns, v4, []string{"127.0.0.1:15001", "10.0.0.5:15006", "127.0.0.1:15053"}},
		"IPv6":       {redirect.Default(), v6, []string{"[::1]:15001", "[fd00::5]:15006"}},
		"dual stack": {redirect.Default(), dual, []string{"127.0.0.1:15001", "10.0.0.5:15006", "[::1]:15001"}},
	} {
		var asked []string
		got := audit.Assess(test.spec, audit.Observation{Mesh: true, Families: test.families, Listeners: func(to netip.AddrPort) []audit.Listener {
			asked = append(asked, to.String())
			if to.Port() == redirect.OutboundPort {
				return []audit.Listener{{UID: redirect.DefaultID}}
			}
			return nil
		}})
		if !slices.Equal(asked, test.want) {
			t.Errorf("%s: %q", name, asked)
		}
		if len(got) != len(slices.DeleteFunc(test.want, func(s string) bool { return !strings.HasSuffix(s, ":15006") })) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestAssess_WhoListens: the proxy is known by its user, or by its group where that is known.
func TestAssess_WhoListens(t *testing.T) {
	t.Parallel()
	const id = redirect.DefaultID
	for name, test := range map[string]struct {
		listeners []audit.Listener
		want      audit.State
	}{
		"the proxy":                        {[]audit.Listener{{UID: id, GIDs: []uint32{0}}}, audit.Captured},
		"the proxy, of unknown group":      {[]audit.Listener{{UID: id}}, audit.Captured},
		"the proxy as root":                {[]audit.Listener{{UID: 0, GIDs: []uint32{0, id}}}, audit.Captured},
		"root, of unknown group":           {[]audit.Listener{{UID: 0}}, audit.Captured},
		"root":                             {[]audit.Listener{{UID: 0, GIDs: []uint32{0}}}, audit.ForeignListener},
		"an application":                   {[]audit.Listener{{UID: 4711, GIDs: []uint32{4711, 5}}}, audit.ForeignListener},
		"an application besides the proxy": {[]audit.Listener{{UID: id}, {UID: 4711, GIDs: []uint32{5}}}, audit.ForeignListener},
	} {
		got := audit.Assess(redirect.Default(), audit.Observation{Mesh: true, Families: v4, Listeners: func(netip.AddrPort) []audit.Listener { return test.listeners }})
		if state := audit.StateOf(got); state != test.want || len(got) != 0 && len(got) != 2 {
			t.Errorf("%s: got %v", name, got)
		}
		if want := "uid 4711 listens on 127.0.0.1:15001, to which outbound traffic is redirected; the rules are for a proxy with uid 1337 or gid 1337"; name == "an application" && got[0].Detail != want {
			t.Errorf("got %q", got[0].Detail)
		}
	}
}

// TestTextsAreBounded: rules, names and lists can be a pod author's.
func TestTextsAreBounded(t *testing.T) {
	t.Parallel()
	diffs, mesh := live(redirect.Default(), func(s *ruleset.Set) {
		rules := chain(s, "OUTPUT")
		*rules = slices.Insert(*rules, 0, ruleset.Opaque("-m comment --comment \"\x1b[2J"+strings.Repeat("x", 1<<20)+"\" -j ACCEPT"))
	})
	got := audit.Assess(redirect.Default(), audit.Observation{Mesh: mesh, Rules: audit.Rules(redirect.Default(), mesh, diffs, nil), Families: v4})
	for _, p := range got {
		if len(p.Detail) > 1200 || strings.ContainsRune(p.Detail, 0x1b) {
			t.Errorf("%d bytes: %.100q", len(p.Detail), p.Detail)
		}
	}
	spec := redirect.Default()
	for i := range 5000 {
		spec.OutboundPortsExclude = append(spec.OutboundPortsExclude, ruleset.OnePort(uint16(20000+i)))
	}
	if all := audit.Exceptions(spec, name); len(all) != 1 || len(all[0].Value) > 400 {
		t.Errorf("got %v", all)
	}
}

func TestExceptions(t *testing.T) {
	t.Parallel()
	if all := audit.Exceptions(redirect.Default(), name); len(all) != 0 {
		t.Errorf("of a pod without settings: %v", all)
	}
	spec := redirect.Default()
	spec.Inbound = redirect.Ports{List: ruleset.PortList(8080, 9090)}
	spec.Outbound = redirect.Networks{List: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	spec.OutboundPorts = ruleset.PortList(443)
	spec.OutboundExclude = []netip.Prefix{netip.MustParsePrefix("10.96.0.1/32")}
	spec.OutboundPortsExclude = append(spec.OutboundPortsExclude, ruleset.OnePort(5432))
	spec.ExcludeInterfaces = []string{"eth1"}
	spec.OwnerGroups = redirect.Groups{}
	spec.OwnerGroupsExclude = []uint32{7}
	var got []string
	for _, e := range audit.Exceptions(spec, name) {
		got = append(got, e.Setting+"="+e.Value+": "+e.Traffic)
	}
	want := []string{
		"inbound=8080,9090: inbound connections to any other port",
		"outbound=10.0.0.0/8: outbound connections to any other address, except to the ports 443",
		"outbound-exclude=10.96.0.1/32: outbound connections to these addresses",
		"outbound-ports-exclude=5432: outbound traffic to these ports",
		"interfaces=eth1: traffic of these interfaces",
		"groups=none: outbound traffic of processes of any other group",
		"groups-exclude=7: outbound traffic of processes of these groups",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func TestEachStateHasItsTexts(t *testing.T) {
	t.Parallel()
	for _, s := range audit.States() {
		for _, repairs := range []bool{false, true} {
			remedy := s.Remedy(repairs)
			if s.Sentence() == "" || remedy == "" != (s == audit.Captured) || repairs && strings.Contains(remedy, "set audit.mode") {
				t.Errorf("%s, repairs %v: %q, %q", s, repairs, s.Sentence(), remedy)
			}
		}
	}
	if audit.State("x").Sentence() != "" {
		t.Error("an unknown state has a sentence")
	}
}

// TestForeignRules of chains that hold no rule of the mesh, and of those that do.
func TestForeignRules(t *testing.T) {
	t.Parallel()
	dns, tproxy := redirect.Default(), redirect.Default()
	dns.DNS, tproxy.Mode = redirect.DNSAll, redirect.TPROXY
	for _, test := range []struct {
		rule         string
		alone, ahead bool
		dns, tproxy  bool // of the rule alone
	}{
		{"-j ACCEPT", false, true, false, false},
		{"-p tcp -j RETURN", false, true, false, false},
		{"! -o lo -j DROP", true, true, true, true},
		{"-p tcp -j NOTRACK", true, true, true, true},
		{"-p icmp -j DROP", false, false, false, false},
		{"! -p icmp -j DROP", true, true, true, true},
		{"-p udp -j DROP", false, false, true, false},
		{"-p udp -m udp --dport 5353 -j DROP", false, false, false, false},
		{"-p udp -m udp --dport 53 -j DROP", false, false, true, false},
		{"-p udp -m udp --dport 1:60 -j DROP", false, false, true, false},
		{"-p udp -m udp ! --dport 5353 -j DROP", false, false, true, false},
		{`-m comment --comment "-p icmp" -j DROP`, true, true, true, true},
		{`-m comment --comment "a -j LOG b" -j DROP`, true, true, true, true},
		{`-m comment --comment "a \" -j LOG b" -j DROP`, true, true, true, true},
		{`-m comment --comment -j -j DROP`, true, true, true, true},
		{`-m string ! --string "a -p icmp b" --algo bm -j DROP`, true, true, true, true},
		{`-p tcp -j LOG --log-prefix "a -j DROP b"`, false, false, false, false},
		{"-j MARK --set-xmark 0x1/0x1", false, false, false, true},
		{"-j TCPMSS --clamp-mss-to-pmtu", false, false, false, false},
		{"-g COUNTS", false, true, false, false},
		{"-j TAKES", true, true, true, true},
		{"-j MISSING", true, true, true, true},
		{"[not understood: meta cmp log 01ab]", false, false, false, false},
		{"[nf_tables: meta cmp counter log 01ab]", false, false, false, false},
		{"[nf_tables: meta cmp counter immediate 01ab]", true, true, true, true},
		{"tcp dport 80 counter return", true, true, true, true},
		{"[not understood: target:LOG 01ab]", false, false, false, false},
		{"[not understood: target:MIRROR 01ab]", true, true, true, true},
		{"[not understood: immediate 01ab]", true, true, true, true},
	} {
		for name, spec := range map[string]redirect.Spec{"": redirect.Default(), "dns": dns, "tproxy": tproxy} {
			want := map[string]bool{"": test.alone, "dns": test.dns, "tproxy": test.tproxy}[name]
			have := ruleset.Set{Family: ruleset.IPv4, Tables: []ruleset.Table{{Name: "mangle", Chains: []ruleset.Chain{
				{Name: "OUTPUT", Rules: []ruleset.Rule{ruleset.Opaque(test.rule)}},
				{Name: "COUNTS", Rules: []ruleset.Rule{ruleset.Opaque("-p tcp"), ruleset.Opaque("-j COUNTS")}},
				{Name: "TAKES", Rules: []ruleset.Rule{ruleset.Opaque("-j COUNTS"), ruleset.Opaque("-j DROP")}},
			}}}}
			if got := audit.Foreign(spec, have, ruleset.Ownership{}, "nft"); len(got) > 0 != want {
				t.Errorf("%s %q: got %v", name, test.rule, got)
			}
		}
		diffs, mesh := live(redirect.Default(), func(s *ruleset.Set) {
			rules := chain(s, "OUTPUT")
			*rules = slices.Insert(*rules, 0, ruleset.Opaque(test.rule))
		})
		if got := audit.StateOf(audit.Rules(redirect.Default(), mesh, diffs, nil)); got == audit.ForeignRule != test.ahead {
			t.Errorf("ahead of ours %q: got %s", test.rule, got)
		}
	}
}

// TestRulesInOurChains: one that was added ahead is foreign, any other difference is drift.
func TestRulesInOurChains(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func([]ruleset.Rule) []ruleset.Rule
		want   audit.State
	}{
		"added ahead":        {func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 1, ruleset.Opaque("-p tcp -j RETURN")) }, audit.ForeignRule},
		"added behind":       {func(r []ruleset.Rule) []ruleset.Rule { return append(r, ruleset.Opaque("-p tcp -j RETURN")) }, audit.Drifted},
		"a wanted one twice": {func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 0, r[0]) }, audit.Drifted},
		"replaced":           {func(r []ruleset.Rule) []ruleset.Rule { r[1] = ruleset.Opaque("-p tcp -j RETURN"); return r }, audit.Drifted},
		"a count":            {func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 0, ruleset.Opaque("-p tcp")) }, audit.Drifted},
	} {
		diffs, mesh := live(redirect.Default(), func(s *ruleset.Set) {
			rules := chain(s, "ISTIO_OUTPUT")
			*rules = test.change(*rules)
		})
		if got := audit.Rules(redirect.Default(), mesh, diffs, nil); audit.StateOf(got) != test.want || len(got) != 1 {
			t.Errorf("%s: got %v", name, got)
		}
	}
}
