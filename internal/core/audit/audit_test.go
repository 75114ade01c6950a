package audit_test

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/test/check"
)

var v4 = redirect.Families{HasIPv4: true, Host: netip.MustParseAddr("10.0.0.5")}

// problems returns the problems of the changed wanted rules, in a namespace with the interface eth0 and other sets.
func problems(spec redirect.Spec, change func(*ruleset.Set), others ...ruleset.Set) []audit.Problem {
	want, have := redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv4)
	change(&have)
	owned := redirect.Sidecar().Owned(want, have)
	var diffs []ruleset.Diff
	if d := ruleset.Compare(want, have, owned); !d.Empty() {
		diffs = append(diffs, d)
	}
	n := walk.Namespace{
		Live: append([]ruleset.Set{have}, others...), Wanted: &walk.Wanted{Spec: spec, Families: v4}, Delivered: map[ruleset.Family][]ruleset.Mark{ruleset.IPv4: {{Value: spec.Mark}}},
		Links: []string{"eth0", "a", "b", "c", "d", "e", "net11"}, Own: []netip.Addr{v4.Host, netip.MustParseAddr("10.0.1.5")},
	}
	return audit.Rules(len(owned.Chains) > 0, diffs, n.Deviations())
}

// ahead inserts a rule at the start of nat OUTPUT.
func ahead(rule string) func(*ruleset.Set) {
	return func(s *ruleset.Set) {
		rules := chain(s, "OUTPUT")
		*rules = slices.Insert(*rules, 0, ruleset.Read(rule))
	}
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

// own changes the rules of chain ISTIO_OUTPUT.
func own(change func([]ruleset.Rule) []ruleset.Rule) func(*ruleset.Set) {
	return func(s *ruleset.Set) {
		rules := chain(s, "ISTIO_OUTPUT")
		*rules = change(*rules)
	}
}

// TestRules: a rule that takes packets is foreign, a rule without an effect is no problem, and a missing wanted rule is drift.
func TestRules(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*ruleset.Set)
		want   audit.State
		text   string
	}{
		"as wanted":        {func(*ruleset.Set) {}, audit.Captured, ""},
		"no rules":         {func(s *ruleset.Set) { s.Tables = nil }, audit.Bypassed, "no rule of the mesh"},
		"a rule is gone":   {own(func(r []ruleset.Rule) []ruleset.Rule { return r[1:] }), audit.Drifted, "missing \"-A ISTIO_OUTPUT -p tcp -m tcp --dport 15020"},
		"the order":        {own(func(r []ruleset.Rule) []ruleset.Rule { r[0], r[1] = r[1], r[0]; return r }), audit.Drifted, "missing"},
		"RETURN ahead":     {ahead("-p tcp -j RETURN"), audit.ForeignRule, "-A OUTPUT -p tcp -j RETURN"},
		"a chain ahead":    {ahead("-g OTHER"), audit.ForeignRule, "-g OTHER"},
		"the jump is gone": {func(s *ruleset.Set) { *chain(s, "OUTPUT") = nil }, audit.Drifted, "nat/OUTPUT: missing"},
		"added ahead": {
			own(func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 1, ruleset.Read("-p tcp -j RETURN")) }), audit.ForeignRule, "RETURN",
		},
		"added behind":       {own(func(r []ruleset.Rule) []ruleset.Rule { return append(r, ruleset.Read("-p tcp -j RETURN")) }), audit.Captured, ""},
		"a wanted one twice": {own(func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 0, r[0]) }), audit.Captured, ""},
		"all of them twice":  {own(func(r []ruleset.Rule) []ruleset.Rule { return append(slices.Clone(r), r...) }), audit.Captured, ""},
		"replaced":           {own(func(r []ruleset.Rule) []ruleset.Rule { r[1] = ruleset.Read("-p tcp -j RETURN"); return r }), audit.Drifted, ""},
		"a count":            {own(func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 0, ruleset.Read("-p tcp")) }), audit.Captured, ""},
		"a log":              {own(func(r []ruleset.Rule) []ruleset.Rule { return slices.Insert(r, 3, ruleset.Read("-j LOG")) }), audit.Captured, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := problems(redirect.Default(), test.change)
			if state := audit.StateOf(got); state != test.want || len(got) == 0 != (test.want == audit.Captured) {
				t.Fatalf("got %v", got)
			}
			if test.text != "" && !strings.Contains(got[0].Detail, test.text) {
				t.Errorf("got %q", got[0].Detail)
			}
		})
	}
}

func TestAssess_MostSeriousState(t *testing.T) {
	t.Parallel()
	rules := problems(redirect.Default(), func(s *ruleset.Set) {
		*chain(s, "ISTIO_OUTPUT") = nil
		ahead("-p tcp -j REDIRECT --to-ports 1")(s)
	})
	o := audit.Observation{
		Mesh: true, Rules: rules, Routing: []string{"policy rule is missing"},
		Families: redirect.Families{HasIPv4: true, HasIPv6: true, Host: v4.Host, IPv6: redirect.Bypassed},
		Listeners: func(to netip.AddrPort) []audit.Listener {
			if to.Port() == redirect.InboundPort {
				return []audit.Listener{{UID: 4711, GIDs: []uint32{0}}}
			}
			return nil
		},
		Collisions: append([]audit.Process{{PID: 7, Thread: 9, Container: "app", UID: 1337, GID: 5}}, make([]audit.Process, 19)...),
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
	check.Equal(t, got[5].Detail, `thread 9 of process 7 of container "app" runs with uid 1337 and gid 5`)
	check.Equal(t, got[10].Detail, "and 15 more processes")
}

// TestAssess_Ambient: a pending pod is not captured.
func TestAssess_Ambient(t *testing.T) {
	t.Parallel()
	o := audit.Observation{
		Mesh: true, Pending: "waiting for ztunnel", Families: redirect.Families{HasIPv4: true, HasIPv6: true, IPv6: redirect.Bypassed},
	}
	got := audit.Assess(ambient.Spec{}, o)
	want := []audit.Problem{{State: audit.Pending, Detail: "waiting for ztunnel"}, {State: audit.IPv6Open, Detail: "the setting AMBIENT_IPV6 is false"}}
	if !slices.Equal(got, want) || audit.StateOf(got) != audit.Pending {
		t.Errorf("got %v", got)
	}
	for in, want := range map[bool]int{false: 0, true: 1} {
		if all := audit.Exceptions(ambient.Spec{Ingress: in}); len(all) != want || in && all[0].Setting != ambient.BypassInboundKey {
			t.Errorf("ingress %t: %v", in, all)
		}
	}
}

func TestAssess_Listeners(t *testing.T) {
	t.Parallel()
	none, dns := redirect.Default(), redirect.Default()
	none.Inbound = redirect.Ports{}
	dns.DNS = redirect.DNSAll
	v6 := redirect.Families{HasIPv6: true, Host: netip.MustParseAddr("fd00::5"), IPv6: redirect.Captured}
	dual := redirect.Families{HasIPv4: true, HasIPv6: true, Host: v4.Host, IPv6: redirect.Captured}
	for name, test := range map[string]struct {
		spec     redirect.Wanted
		families redirect.Families
		want     []string
	}{
		"IPv4":       {redirect.Default(), v4, []string{"127.0.0.1:15001", "10.0.0.5:15006"}},
		"no inbound": {none, v4, []string{"127.0.0.1:15001"}},
		"DNS":        {dns, v4, []string{"127.0.0.1:15001", "10.0.0.5:15006", "127.0.0.1:15053"}},
		"IPv6":       {redirect.Default(), v6, []string{"[::1]:15001", "[fd00::5]:15006"}},
		"dual stack": {redirect.Default(), dual, []string{"127.0.0.1:15001", "10.0.0.5:15006", "[::1]:15001"}},
		"ambient":    {ambient.Spec{}, v4, []string{"10.0.0.5:15008", "127.0.0.1:15001", "10.0.0.5:15006"}},
		"ingress":    {ambient.Spec{Ingress: true}, dual, []string{"10.0.0.5:15008", "127.0.0.1:15001", "[::1]:15001"}},
	} {
		var asked []string
		got := audit.Assess(test.spec, audit.Observation{Mesh: true, Families: test.families, Listeners: func(to netip.AddrPort) []audit.Listener {
			asked = append(asked, to.String())
			if to.Port() != redirect.InboundPort && to.Port() != redirect.DNSPort {
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

// TestAssess_WhoListens: the proxy is identified by its user, or by its group if known.
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

// TestTexts_Bounds: a pod's author may choose rules, names and lists.
func TestTexts_Bounds(t *testing.T) {
	t.Parallel()
	got := problems(redirect.Default(), ahead("-m comment --comment \"\x1b[2J"+strings.Repeat("x", 1<<20)+"\" -p tcp -j ACCEPT"))
	if len(got) == 0 {
		t.Error("no problem")
	}
	for _, p := range got {
		if len(p.Detail) > 1200 || strings.ContainsRune(p.Detail, 0x1b) {
			t.Errorf("%d bytes: %.100q", len(p.Detail), p.Detail)
		}
	}
	spec := redirect.Default()
	for i := range 5000 {
		spec.OutboundPortsExclude = append(spec.OutboundPortsExclude, ruleset.OnePort(uint16(20000+i)))
	}
	if all := audit.Exceptions(spec); len(all) != 1 || len(all[0].Value) > 400 {
		t.Errorf("got %v", all)
	}
}

func TestAssess_Exceptions(t *testing.T) {
	t.Parallel()
	if all := audit.Exceptions(redirect.Default()); len(all) != 0 {
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
	for _, e := range audit.Exceptions(spec) {
		got = append(got, e.Setting+"="+e.Value+": "+e.Traffic)
	}
	want := []string{
		sidecar.InboundPortsKey + "=8080,9090: inbound connections to any other port",
		"traffic.sidecar.istio.io/includeOutboundIPRanges=10.0.0.0/8: outbound connections to any other address, except to the ports 443",
		"traffic.sidecar.istio.io/excludeOutboundIPRanges=10.96.0.1/32: outbound connections to these addresses",
		"traffic.sidecar.istio.io/excludeOutboundPorts=5432: outbound traffic to these ports",
		"traffic.sidecar.istio.io/excludeInterfaces=eth1: traffic of these interfaces",
		"=none: outbound traffic of processes of any other group",
		"=7: outbound traffic of processes of these groups",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// TestExceptions_EveryField: a new list of the Spec lets traffic bypass the proxy and is an exception, or is one of these.
func TestExceptions_EveryField(t *testing.T) {
	t.Parallel()
	others := []string{"UIDs", "GIDs", "OutboundPorts", "RerouteInterfaces", "DNSServers"}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[redirect.Spec]()) {
		spec := redirect.Default()
		list := reflect.ValueOf(&spec).Elem().FieldByIndex(field.Index)
		if list.Kind() != reflect.Slice {
			continue
		}
		list.Set(reflect.MakeSlice(field.Type, 1, 1))
		if names, are := reflect.TypeAssert[[]string](list); are {
			names[0] = "eth1"
		}
		if (len(audit.Exceptions(spec)) == 0) != slices.Contains(others, field.Name) {
			t.Errorf("field %s: %v", field.Name, audit.Exceptions(spec))
		}
	}
}

func TestTexts_EachState(t *testing.T) {
	t.Parallel()
	for _, s := range audit.States() {
		for _, repairs := range []bool{false, true} {
			remedy := s.Remedy(repairs)
			if s.Sentence() == "" || remedy == "" != (s == audit.Captured) || repairs && strings.Contains(remedy, "set audit.mode") {
				t.Errorf("%s, repairs %v: %q, %q", s, repairs, s.Sentence(), remedy)
			}
		}
	}
	check.Equal(t, audit.State("x").Sentence(), "", "an unknown state has a sentence")
}

// TestRules_ForeignRules: single foreign rules ahead of the mesh's in nat and mangle are a problem only if they may take packets of
// the mesh.
func TestRules_ForeignRules(t *testing.T) {
	t.Parallel()
	dns, tproxy := redirect.Default(), redirect.Default()
	dns.DNS, tproxy.Mode = redirect.DNSAll, redirect.TPROXY
	const none, nat, mangle, inDNS, inTPROXY = 0, 1, 2, 4, 8
	for rule, want := range map[string]int{
		"-j ACCEPT":                                            nat | inDNS,
		"-p tcp -j RETURN":                                     nat | inDNS,
		"-p tcp -m tcp --dport 80":                             none,
		"! -o lo -j DROP":                                      nat | mangle | inDNS | inTPROXY,
		"-p icmp -j DROP":                                      none,
		"! -p icmp -j DROP":                                    nat | mangle | inDNS | inTPROXY,
		"-p udp -j DROP":                                       inDNS,
		"-p udp -m udp --dport 5353 -j DROP":                   none,
		"-p udp -m udp --dport 1:60 -j DROP":                   inDNS,
		`-m comment --comment "-p icmp" -j DROP`:               nat | mangle | inDNS | inTPROXY,
		`-m comment --comment "a -j LOG b" -j DROP`:            nat | mangle | inDNS | inTPROXY,
		`-m comment --comment "a \" -j LOG b" -j DROP`:         nat | mangle | inDNS | inTPROXY,
		`-m comment --comment -j -j DROP`:                      nat | mangle | inDNS | inTPROXY,
		`-m string ! --string "a -p icmp b" -j DROP`:           nat | mangle | inDNS | inTPROXY,
		`-p tcp -j LOG --log-prefix "a -j DROP b"`:             none,
		"-j MARK --set-xmark 0x1/0x1":                          none,
		"-j CONNMARK --set-xmark 0x80/0x80":                    none,
		"-j TCPMSS --clamp-mss-to-pmtu":                        none,
		"-m mark --mark 0x5 -j DROP":                           none,
		"-o tun0 -j DROP":                                      none,
		"-d 169.254.20.10/32 -p tcp -j DROP":                   none,
		"-d 10.96.0.1/32 -p tcp -j DROP":                       nat | mangle | inDNS | inTPROXY,
		"-p tcp -m tcp --dport 8080 -j DROP":                   nat | mangle | inDNS | inTPROXY,
		"-m owner --uid-owner 1000 -j DROP":                    nat | mangle | inDNS | inTPROXY,
		"-m owner --uid-owner 1337 -j DROP":                    nat | mangle | inDNS | inTPROXY,
		"-m conntrack --ctstate INVALID -j DROP":               none,
		"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT": none,
		"-m set --match-set x dst -j RETURN":                   nat | inDNS,
		"-j COUNTS":                                            none,
		"-j TAKES":                                             nat | mangle | inDNS | inTPROXY,
		"-j MISSING":                                           nat | mangle | inDNS | inTPROXY,
		"-j QUEUE":                                             nat | mangle | inDNS | inTPROXY,
	} {
		for table, bit := range map[string]int{"nat": nat, "mangle": mangle} {
			for _, c := range []struct {
				spec redirect.Spec
				bit  int
			}{{redirect.Default(), bit}, {dns, inDNS}, {tproxy, inTPROXY}} {
				if c.bit == inDNS && table != "nat" || c.bit == inTPROXY && table != "mangle" {
					continue
				}
				got := problems(c.spec, func(s *ruleset.Set) { insert(s, table, rule) })
				if foreign := audit.StateOf(got) == audit.ForeignRule; foreign != (want&c.bit != 0) {
					t.Errorf("%s %q (%d): got %v", table, rule, c.bit, got)
				}
			}
		}
	}
}

// insert puts a rule, and chains that it can jump to, at the start of a table's chain OUTPUT.
func insert(s *ruleset.Set, name, rule string) {
	i := slices.IndexFunc(s.Tables, func(t ruleset.Table) bool { return t.Name == name })
	if i < 0 {
		s.Tables = append(s.Tables, ruleset.Table{Name: name, Chains: []ruleset.Chain{{Name: "OUTPUT", Policy: "ACCEPT"}}})
		i = len(s.Tables) - 1
	}
	t := &s.Tables[i]
	t.Chains = append(t.Chains,
		ruleset.Chain{Name: "COUNTS", Policy: "-", Rules: []ruleset.Rule{ruleset.Read("-p tcp"), ruleset.Read("-j LOG")}},
		ruleset.Chain{Name: "TAKES", Policy: "-", Rules: []ruleset.Rule{ruleset.Read("-j COUNTS"), ruleset.Read("-j DROP")}})
	for j := range t.Chains {
		if c := &t.Chains[j]; c.Name == "OUTPUT" {
			c.Rules = slices.Insert(c.Rules, 0, ruleset.Read(rule))
		}
	}
}

// TestRules_OtherTables: base chains of any table, hook and priority, also after nat.
func TestRules_OtherTables(t *testing.T) {
	t.Parallel()
	rewrites := ruleset.Rule{Matches: []ruleset.Match{ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(15001)}}, Target: ruleset.Other{Text: "tcp dport set 80"}}
	drop := func(port uint16) ruleset.Rule {
		return ruleset.NFT("", ruleset.Drop, ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(port)})
	}
	away := ruleset.Rule{Matches: []ruleset.Match{ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(9999)}}, Target: ruleset.NAT{To: netip.MustParseAddr("10.2.0.9"), Port: 80}}
	for _, test := range []struct {
		name   string
		hook   ruleset.Hook
		policy string
		rules  []ruleset.Rule
		want   audit.State
	}{
		{"redirect ahead", ruleset.Hook{Type: "nat", Name: "output", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(9090), ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(80)})}, audit.ForeignRule},
		{"rewriting behind", ruleset.Hook{Type: "route", Name: "output"}, "", []ruleset.Rule{rewrites}, audit.ForeignRule},
		{"nat behind", ruleset.Hook{Type: "nat", Name: "output"}, "", []ruleset.Rule{away}, audit.ForeignRule},
		{"drop of the proxy's port", ruleset.Hook{Type: "filter", Name: "input"}, "", []ruleset.Rule{drop(15006)}, audit.ForeignRule},
		{"drop of another port", ruleset.Hook{Type: "filter", Name: "input"}, "", []ruleset.Rule{drop(22)}, audit.Captured},
		{"policy", ruleset.Hook{Type: "filter", Name: "input"}, "DROP", []ruleset.Rule{ruleset.NFT("", ruleset.Accept, ruleset.Interface{Name: "lo"})}, audit.ForeignRule},
		{"policy for some", ruleset.Hook{Type: "filter", Name: "input"}, "DROP", []ruleset.Rule{ruleset.NFT("", ruleset.Accept, ruleset.Network{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Source: true}), ruleset.NFT("", ruleset.Accept, ruleset.Interface{Name: "lo"})}, audit.Captured},
		{"ingress", ruleset.Hook{Type: "filter", Name: "ingress", Device: "eth0"}, "", []ruleset.Rule{drop(80)}, audit.ForeignRule},
		{"ingress of another device", ruleset.Hook{Type: "filter", Name: "ingress", Device: "eth1"}, "", []ruleset.Rule{drop(80)}, audit.Captured},
		{"forward", ruleset.Hook{Type: "filter", Name: "forward"}, "DROP", []ruleset.Rule{drop(80)}, audit.Captured},
		{"flags of ECN", ruleset.Hook{Type: "nat", Name: "output", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(9090), ruleset.TCPFlags{Mask: 0x80, Set: 0x80})}, audit.ForeignRule},
		{"a second address arrives", ruleset.Hook{Type: "nat", Name: "prerouting", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(80), ruleset.Network{Prefix: netip.MustParsePrefix("10.0.1.5/32")})}, audit.ForeignRule},
		{"a second address sends", ruleset.Hook{Type: "nat", Name: "output", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(80), ruleset.Network{Prefix: netip.MustParsePrefix("10.0.1.5/32"), Source: true})}, audit.ForeignRule},
		{"an address of another pod", ruleset.Hook{Type: "nat", Name: "prerouting", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(80), ruleset.Network{Prefix: netip.MustParsePrefix("10.0.1.6/32")})}, audit.Captured},
		{"the eleventh interface", ruleset.Hook{Type: "nat", Name: "output", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.RedirectTo(80), ruleset.Interface{Name: "net11", Out: true})}, audit.ForeignRule},
		{"notrack behind conntrack", ruleset.Hook{Type: "filter", Name: "output", Priority: -150}, "", []ruleset.Rule{ruleset.NFT("", ruleset.NoTrack{})}, audit.Captured},
		{"notrack ahead of conntrack", ruleset.Hook{Type: "filter", Name: "output", Priority: -250}, "", []ruleset.Rule{ruleset.NFT("", ruleset.NoTrack{})}, audit.ForeignRule},
	} {
		set := ruleset.Set{Family: ruleset.Inet, Tables: []ruleset.Table{{Name: "mine", Chains: []ruleset.Chain{{Name: "c", Policy: test.policy, Hook: &test.hook, Rules: test.rules}}}}}
		if got := problems(redirect.Default(), func(*ruleset.Set) {}, set); audit.StateOf(got) != test.want {
			t.Errorf("%s: got %v", test.name, got)
		}
	}
}
