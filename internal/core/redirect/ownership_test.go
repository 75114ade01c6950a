package redirect_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// saved makes a Set of rules in iptables' own notation, "TABLE -A CHAIN …" or "TABLE -N CHAIN".
func saved(t *testing.T, lines ...string) ruleset.Set {
	t.Helper()
	tables := map[string]*ruleset.Table{}
	for _, line := range lines {
		words := strings.SplitN(line+"   ", " ", 4)
		name, verb, chain, spec := words[0], words[1], words[2], strings.TrimSpace(words[3])
		if tables[name] == nil {
			tables[name] = &ruleset.New(ruleset.IPv4, ruleset.Table{Name: name}).Tables[0]
		}
		table := tables[name]
		at := slices.IndexFunc(table.Chains, func(c ruleset.Chain) bool { return c.Name == chain })
		switch {
		case verb == "-N":
			table.Chains = append(table.Chains, ruleset.Chain{Name: chain, Policy: ruleset.NoPolicy})
		case at < 0:
			t.Fatalf("%s has no chain %q", name, chain)
		default:
			table.Chains[at].Rules = append(table.Chains[at].Rules, ruleset.Opaque(spec))
		}
	}
	set := ruleset.Set{Family: ruleset.IPv4}
	for _, table := range tables {
		set = ruleset.New(ruleset.IPv4, append(set.Tables, *table)...)
	}
	return set
}

// notation prints a Set in that notation again.
func notation(s ruleset.Set) []string {
	var out []string
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			if c.Policy == ruleset.NoPolicy {
				out = append(out, t.Name+" -N "+c.Name)
			}
		}
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				out = append(out, t.Name+" -A "+c.Name+" "+r.String())
			}
		}
	}
	return out
}

// TestCleaningUp takes away what any configuration of the mesh left, ours or the reference's, and nothing else.
func TestCleaningUp(t *testing.T) {
	// A line that begins with "stays: " must stay, all others go.
	for name, lines := range map[string][]string{
		"an empty namespace stays empty": nil,
		"chains of ours go with all that is in them, whatever their names": {
			"nat -N ISTIO_OUTPUT", "nat -N ISTIO_OF_TOMORROW", "raw -N ISTIO_INBOUND", "nat -A OUTPUT -j ISTIO_OUTPUT",
			"nat -A ISTIO_OUTPUT -p tcp -j ISTIO_OF_TOMORROW", "nat -A ISTIO_OF_TOMORROW -j DROP",
		},
		"TPROXY's rules in built-in chains go, whatever mark, ids and loopback network they had": {
			"mangle -A PREROUTING -p tcp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"mangle -A OUTPUT -o lo -p tcp -m mark --mark 0xfa0 -j RETURN",
			"mangle -A OUTPUT ! -d 127.0.0.0/8 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53a/0xffffffff",
			"mangle -A OUTPUT ! -d ::1/128 -o lo -p tcp -m owner --gid-owner 3000 -j MARK --set-xmark 0x53a/0xffffffff",
			"mangle -A OUTPUT -p tcp -m connmark --mark 0xfa0 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		},
		"what only looks like them stays": {
			"stays: mangle -A PREROUTING -p udp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"stays: mangle -A PREROUTING -p tcp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff",
			"stays: mangle -A POSTROUTING -p tcp -m connmark --mark 0xfa0 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"stays: mangle -A OUTPUT ! -d 10.0.0.1/32 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53a/0xffffffff",
			"stays: mangle -A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53b/0xffffffff",
			"stays: nat -A OUTPUT -p udp -m udp --dport 53 -j REDIRECT --to-ports 5353",
			"stays: nat -A OUTPUT -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053",
			"stays: nat -A POSTROUTING -d 127.0.0.1/32 -p udp -m udp --dport 15053 -j SNAT --to-source 127.0.0.2",
			"stays: raw -A OUTPUT -p udp -m udp --dport 53 -j CT --zone 7", "stays: raw -A PREROUTING -p udp -m udp --dport 53 -j CT --zone 1",
		},
		"excluded interfaces go where the mesh was": {
			"nat -N ISTIO_OUTPUT", "nat -A PREROUTING -i eth1 -j RETURN", "nat -A OUTPUT -o eth1 -j RETURN", "nat -A OUTPUT -j ISTIO_OUTPUT",
			"mangle -N ISTIO_INBOUND", "mangle -A PREROUTING -i eth1 -j RETURN", "mangle -A OUTPUT -o eth1 -j RETURN",
		},
		"in mangle they stay where there was no TPROXY": {
			"nat -N ISTIO_OUTPUT", "stays: mangle -A PREROUTING -i eth1 -j RETURN", "stays: mangle -A OUTPUT -o eth1 -j RETURN",
		},
		"behind what the mesh puts behind them they stay": {
			"nat -N ISTIO_OUTPUT", "nat -A PREROUTING -p tcp -j ISTIO_INBOUND", "stays: nat -A PREROUTING -i eth1 -j RETURN",
			"nat -A OUTPUT -j ISTIO_OUTPUT", "stays: nat -A OUTPUT -o eth1 -j RETURN",
		},
		"the same rules stay where it was not": {
			"stays: nat -A PREROUTING -i eth1 -j RETURN", "stays: nat -A OUTPUT -o eth1 -j RETURN",
		},
		"a RETURN for an interface stays if it is one way and not at the head": {
			"nat -N ISTIO_OUTPUT", "stays: nat -A PREROUTING -p udp -j DROP", "stays: nat -A PREROUTING -i eth1 -j RETURN",
			"nat -A OUTPUT -j ISTIO_OUTPUT", "stays: nat -A OUTPUT -o eth2 -j RETURN",
		},
		"virtual machines' rules go from the head of the chain": {
			"nat -N ISTIO_REDIRECT", "nat -A PREROUTING -d 10.0.0.0/8 -i vm1 -j ISTIO_REDIRECT",
			"nat -A PREROUTING -d 10.0.0.0/8 -i vm0 -j ISTIO_REDIRECT", "nat -A PREROUTING -i vm1 -j RETURN", "nat -A PREROUTING -i vm0 -j RETURN",
			"stays: nat -A PREROUTING -i vm2 -j RETURN", "stays: nat -A PREROUTING -p udp -j DROP",
		},
		"virtual machines' rules go without a captured network, too": {
			"nat -N ISTIO_REDIRECT", "nat -A PREROUTING -i vm1 -j RETURN", "nat -A PREROUTING -i vm0 -j RETURN",
		},
		"a RETURN at the head stays where the mesh captured networks and no virtual machine": {
			"nat -N ISTIO_OUTPUT", "nat -N ISTIO_REDIRECT", "stays: nat -A PREROUTING -i eth7 -j RETURN", "nat -A OUTPUT -j ISTIO_OUTPUT",
			"nat -A ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT", "nat -A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT",
		},
		"guardrails of a replacement that was killed go": {
			"filter -A INPUT -p udp -j DROP", "filter -A INPUT -p tcp -j DROP", "filter -A FORWARD -p udp -j DROP",
			"filter -A FORWARD -p tcp -j DROP", "filter -A OUTPUT -p udp -j DROP", "filter -A OUTPUT -p tcp -j DROP",
			"stays: filter -A OUTPUT -p udp -j DROP",
		},
		"foreign drops that are not all six stay": {
			"stays: filter -A INPUT -p udp -j DROP", "stays: filter -A INPUT -p tcp -j DROP", "stays: filter -A FORWARD -p udp -j DROP",
			"stays: filter -A FORWARD -p tcp -j DROP", "stays: filter -A OUTPUT -p tcp -j DROP", "stays: filter -A OUTPUT -p udp -j DROP",
		},
		"drops in an empty filter table's neighbourhood are no guardrails": {"stays: filter -A INPUT -p udp -j DROP"},
		"a foreign chain's jump to a chain of ours goes, the rest of it stays": {
			"nat -N ISTIO_OUTPUT", "stays: nat -N CNI-X", "stays: nat -A OUTPUT -j CNI-X", "nat -A CNI-X -p tcp -j ISTIO_OUTPUT",
			"nat -A CNI-X -p udp -g ISTIO_OUTPUT", "stays: nat -A CNI-X -p tcp -j ACCEPT",
		},
		"a comment or log text that speaks of a chain of ours stays": {
			"nat -N ISTIO_OUTPUT", `stays: nat -A OUTPUT -m comment --comment "before -j ISTIO_OUTPUT" -j RETURN`,
			`stays: nat -A OUTPUT -j LOG --log-prefix "-j ISTIO_OUTPUT"`, `stays: nat -A OUTPUT -j LOG --log-prefix ISTIO_OUTPUT`,
			`stays: nat -A OUTPUT -j XISTIO_OUTPUT`,
		},
		"a foreign chain with a similar name stays": {
			"stays: nat -N ISTIO", "stays: nat -N MY_ISTIO_OUTPUT", "stays: nat -A OUTPUT -j ISTIO", "stays: nat -A OUTPUT -j MY_ISTIO_OUTPUT",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var all, want []string
			for _, line := range lines {
				rule, stays := strings.CutPrefix(line, "stays: ")
				if all = append(all, rule); stays {
					want = append(want, rule)
				}
			}
			have := saved(t, all...)
			n := rulesettest.NewNamespace(have)
			apply(t, n, ruleset.Reconcile(ruleset.Set{Family: ruleset.IPv4}, have, redirect.AllOwned(have)))
			if diff := cmp.Diff(notation(saved(t, want...)), notation(n.Save())); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAForeignReturnIsNoDrift programs namespaces in which a foreign rule lets an interface pass, where nothing of ours comes
// to stand ahead of that rule.
func TestAForeignReturnIsNoDrift(t *testing.T) {
	const rule = "nat -A PREROUTING -i eth7 -j RETURN"
	for name, w := range map[string]written{
		"the default": {}, "TPROXY": {redirect.FieldMode: "TPROXY"}, "no inbound port": {redirect.FieldInbound: ""},
		"virtual machines": {redirect.FieldRerouteInterfaces: "vm0"}, "excluded interfaces": {redirect.FieldExcludeInterfaces: "eth1"},
	} {
		t.Run(name, func(t *testing.T) {
			n := rulesettest.NewNamespace(saved(t, rule))
			reach(t, n, redirect.Rules(w.spec(t), ruleset.IPv4))
			if !slices.Contains(notation(n.Save()), rule) {
				t.Error("the foreign rule is gone")
			}
			reach(t, n, ruleset.Set{Family: ruleset.IPv4})
			if diff := cmp.Diff([]string{rule}, notation(n.Save())); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOwnedTakesWhatIsWanted keeps a rule that is wanted and of no known shape from being foreign.
func TestOwnedTakesWhatIsWanted(t *testing.T) {
	want := saved(t, "nat -A OUTPUT -o eth9 -j ACCEPT")
	have := saved(t, "nat -A OUTPUT -p udp -j DROP", "nat -A OUTPUT -o eth9 -j ACCEPT")
	owned := redirect.Owned(want, have)
	if owned.OwnsRule("nat", "OUTPUT", 0) || !owned.OwnsRule("nat", "OUTPUT", 1) {
		t.Errorf("owned is %+v, want the second rule of nat/OUTPUT only", owned.Rules)
	}
}

// TestShapesAloneAreNoProofOfTheMesh: to program a namespace must not take away rules that merely look like the mesh's.
func TestShapesAloneAreNoProofOfTheMesh(t *testing.T) {
	foreign := []string{
		"filter -A INPUT -p udp -j DROP", "filter -A INPUT -p tcp -j DROP", "filter -A FORWARD -p udp -j DROP",
		"filter -A FORWARD -p tcp -j DROP", "filter -A OUTPUT -p udp -j DROP", "filter -A OUTPUT -p tcp -j DROP",
		"mangle -A PREROUTING -p tcp -m mark --mark 0x5 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		"mangle -A OUTPUT -o lo -p tcp -m mark --mark 0x5 -j RETURN",
		"mangle -A OUTPUT -p tcp -m connmark --mark 0x5 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		"nat -A OUTPUT -p udp -m udp --dport 53 -m owner --uid-owner 0 -j RETURN",
		"raw -A OUTPUT -p udp -m udp --dport 53 -j CT --zone 2",
	}
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	have := saved(t, foreign...)
	n := rulesettest.NewNamespace(have)
	apply(t, n, ruleset.Reconcile(want, have, redirect.Owned(want, have)))
	after := notation(n.Save())
	for _, rule := range foreign {
		if !slices.Contains(after, rule) {
			t.Errorf("%q is gone", rule)
		}
	}
	if diff := ruleset.Compare(want, n.Save(), redirect.Owned(want, n.Save())); !diff.Empty() {
		t.Errorf("they are a difference afterwards:\n%s", diff)
	}
}

// TestAForeignReturnBehindOursStays: the namespace holds exactly what is wanted for a virtual machine's interface, and
// nothing in nat PREROUTING marks the end of ours.
func TestAForeignReturnBehindOursStays(t *testing.T) {
	s := redirect.Default()
	s.Inbound, s.Outbound, s.RerouteInterfaces = redirect.Ports{}, redirect.Networks{}, []string{"vm0"}
	want := redirect.Rules(s, ruleset.IPv4)
	n := rulesettest.NewNamespace(want)
	add(t, n, "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -i eth8 -j RETURN\nCOMMIT\n")
	have := n.Save()
	if diff := ruleset.Compare(want, have, redirect.Owned(want, have)); !diff.Empty() {
		t.Errorf("a foreign rule is a difference:\n%s", diff)
	}
}
