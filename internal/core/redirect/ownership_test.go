package redirect_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// linesOf returns the content of a namespace as lines.
func linesOf(n *rulesettest.Namespace) []string {
	return rulesettest.Lines(n.Save(), ruleset.Ownership{})
}

// TestOwned_CleaningUp removes only the mesh's rules, in any configuration of ours or of the reference.
func TestOwned_CleaningUp(t *testing.T) {
	// A line that begins with "stays: " must stay; all others must go.
	for name, lines := range map[string][]string{
		"an empty namespace stays empty": nil,
		"our chains go with their rules, whatever their names": {
			"nat ISTIO_OUTPUT:", "nat ISTIO_OF_TOMORROW:", "raw ISTIO_INBOUND:", "nat OUTPUT -j ISTIO_OUTPUT",
			"nat ISTIO_OUTPUT -p tcp -j ISTIO_OF_TOMORROW", "nat ISTIO_OF_TOMORROW -j DROP",
		},
		"TPROXY's rules in built-in chains go, whatever mark, ids and loopback network they had": {
			"mangle PREROUTING -p tcp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"mangle OUTPUT -o lo -p tcp -m mark --mark 0xfa0 -j RETURN",
			"mangle OUTPUT ! -d 127.0.0.0/8 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53a/0xffffffff",
			"mangle OUTPUT ! -d ::1/128 -o lo -p tcp -m owner --gid-owner 3000 -j MARK --set-xmark 0x53a/0xffffffff",
			"mangle OUTPUT -p tcp -m connmark --mark 0xfa0 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		},
		"similar rules stay": {
			"stays: mangle PREROUTING -p udp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"stays: mangle PREROUTING -p tcp -m mark --mark 0xfa0 -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff",
			"stays: mangle POSTROUTING -p tcp -m connmark --mark 0xfa0 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"stays: mangle OUTPUT ! -d 10.0.0.1/32 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53a/0xffffffff",
			"stays: mangle OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 2000 -j MARK --set-xmark 0x53b/0xffffffff",
			"stays: nat OUTPUT -p udp -m udp --dport 53 -j REDIRECT --to-ports 5353",
			"stays: nat OUTPUT -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053",
			"stays: nat POSTROUTING -d 127.0.0.1/32 -p udp -m udp --dport 15053 -j SNAT --to-source 127.0.0.2",
			"stays: raw OUTPUT -p udp -m udp --dport 53 -j CT --zone 7", "stays: raw PREROUTING -p udp -m udp --dport 53 -j CT --zone 1",
		},
		"excluded interfaces go where the mesh was": {
			"nat ISTIO_OUTPUT:", "nat PREROUTING -i eth1 -j RETURN", "nat OUTPUT -o eth1 -j RETURN", "nat OUTPUT -j ISTIO_OUTPUT",
			"mangle ISTIO_INBOUND:", "mangle PREROUTING -i eth1 -j RETURN", "mangle OUTPUT -o eth1 -j RETURN",
		},
		"excluded interfaces stay in mangle without TPROXY": {
			"nat ISTIO_OUTPUT:", "stays: mangle PREROUTING -i eth1 -j RETURN", "stays: mangle OUTPUT -o eth1 -j RETURN",
		},
		"excluded interfaces stay behind the jumps of the mesh": {
			"nat ISTIO_OUTPUT:", "nat PREROUTING -p tcp -j ISTIO_INBOUND", "stays: nat PREROUTING -i eth1 -j RETURN",
			"nat OUTPUT -j ISTIO_OUTPUT", "stays: nat OUTPUT -o eth1 -j RETURN",
		},
		"excluded interfaces stay where the mesh was not": {
			"stays: nat PREROUTING -i eth1 -j RETURN", "stays: nat OUTPUT -o eth1 -j RETURN",
		},
		"a RETURN for one direction stays if not at the head": {
			"nat ISTIO_OUTPUT:", "stays: nat PREROUTING -p udp -j DROP", "stays: nat PREROUTING -i eth1 -j RETURN",
			"nat OUTPUT -j ISTIO_OUTPUT", "stays: nat OUTPUT -o eth2 -j RETURN",
		},
		"virtual machines' rules go from the head of the chain": {
			"nat ISTIO_REDIRECT:", "nat PREROUTING -d 10.0.0.0/8 -i vm1 -j ISTIO_REDIRECT",
			"nat PREROUTING -d 10.0.0.0/8 -i vm0 -j ISTIO_REDIRECT", "nat PREROUTING -i vm1 -j RETURN", "nat PREROUTING -i vm0 -j RETURN",
			"stays: nat PREROUTING -i vm2 -j RETURN", "stays: nat PREROUTING -p udp -j DROP",
		},
		"virtual machines' rules go without a captured network, too": {
			"nat ISTIO_REDIRECT:", "nat PREROUTING -i vm1 -j RETURN", "nat PREROUTING -i vm0 -j RETURN",
		},
		"a RETURN at the head stays where the mesh captured networks and no virtual machine": {
			"nat ISTIO_OUTPUT:", "nat ISTIO_REDIRECT:", "stays: nat PREROUTING -i eth7 -j RETURN", "nat OUTPUT -j ISTIO_OUTPUT",
			"nat ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT", "nat ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT",
		},
		"guardrails of a replacement that was killed go": {
			"filter INPUT -p udp -j DROP", "filter INPUT -p tcp -j DROP", "filter FORWARD -p udp -j DROP",
			"filter FORWARD -p tcp -j DROP", "filter OUTPUT -p udp -j DROP", "filter OUTPUT -p tcp -j DROP",
			"stays: filter OUTPUT -p udp -j DROP",
		},
		"fewer than six drops are foreign and stay": {
			"stays: filter INPUT -p udp -j DROP", "stays: filter INPUT -p tcp -j DROP", "stays: filter FORWARD -p udp -j DROP",
			"stays: filter FORWARD -p tcp -j DROP", "stays: filter OUTPUT -p tcp -j DROP", "stays: filter OUTPUT -p udp -j DROP",
		},
		"a drop in one chain of filter stays": {"stays: filter INPUT -p udp -j DROP"},
		"a foreign chain loses its jumps to our chains only": {
			"nat ISTIO_OUTPUT:", "stays: nat CNI-X:", "stays: nat OUTPUT -j CNI-X", "nat CNI-X -p tcp -j ISTIO_OUTPUT",
			"nat CNI-X -p udp -g ISTIO_OUTPUT", "stays: nat CNI-X -p tcp -j ACCEPT",
		},
		"a comment or log text that names our chain stays": {
			"nat ISTIO_OUTPUT:", `stays: nat OUTPUT -m comment --comment "before -j ISTIO_OUTPUT" -j RETURN`,
			`stays: nat OUTPUT -j LOG --log-prefix "-j ISTIO_OUTPUT"`, `stays: nat OUTPUT -j LOG --log-prefix ISTIO_OUTPUT`,
			`stays: nat OUTPUT -j XISTIO_OUTPUT`,
		},
		"a foreign chain with a similar name stays": {
			"stays: nat ISTIO:", "stays: nat MY_ISTIO_OUTPUT:", "stays: nat OUTPUT -j ISTIO", "stays: nat OUTPUT -j MY_ISTIO_OUTPUT",
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
			n := rulesettest.NewNamespace(rulesettest.Set(all...))
			n.Reach(t, ruleset.Set{Family: ruleset.IPv4}, func(_, have ruleset.Set) ruleset.Ownership { return redirect.Sidecar().AllOwned(have) })
			check.Diff(t, "what is left", rulesettest.Lines(rulesettest.Set(want...), ruleset.Ownership{}), linesOf(n))
		})
	}
}

// TestOwned_ForeignReturn programs namespaces in which a foreign rule lets an interface pass ahead of all our rules.
func TestOwned_ForeignReturn(t *testing.T) {
	const rule = "nat PREROUTING -i eth7 -j RETURN"
	for name, w := range map[string]written{
		"the default": {}, "TPROXY": {redirect.FieldMode: "TPROXY"}, "no inbound port": {redirect.FieldInbound: ""},
		"virtual machines": {redirect.FieldRerouteInterfaces: "vm0"}, "excluded interfaces": {redirect.FieldExcludeInterfaces: "eth1"},
	} {
		t.Run(name, func(t *testing.T) {
			n := rulesettest.NewNamespace(rulesettest.Set(rule))
			n.Reach(t, redirect.Rules(w.spec(t), ruleset.IPv4), redirect.Sidecar().Owned)
			if !slices.Contains(linesOf(n), rule) {
				t.Error("the foreign rule is gone")
			}
			n.Reach(t, ruleset.Set{Family: ruleset.IPv4}, redirect.Sidecar().Owned)
			check.Diff(t, "what is left", []string{rule}, linesOf(n))
		})
	}
}

// TestOwned_ShapesAlone: programming a namespace must not remove rules that merely look like the mesh's.
func TestOwned_ShapesAlone(t *testing.T) {
	foreign := []string{
		"filter INPUT -p udp -j DROP", "filter INPUT -p tcp -j DROP", "filter FORWARD -p udp -j DROP",
		"filter FORWARD -p tcp -j DROP", "filter OUTPUT -p udp -j DROP", "filter OUTPUT -p tcp -j DROP",
		"mangle PREROUTING -p tcp -m mark --mark 0x5 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		"mangle OUTPUT -o lo -p tcp -m mark --mark 0x5 -j RETURN",
		"mangle OUTPUT -p tcp -m connmark --mark 0x5 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		"nat OUTPUT -p udp -m udp --dport 53 -m owner --uid-owner 0 -j RETURN",
		"raw OUTPUT -p udp -m udp --dport 53 -j CT --zone 2",
	}
	n := rulesettest.NewNamespace(rulesettest.Set(foreign...))
	n.Reach(t, redirect.Rules(redirect.Default(), ruleset.IPv4), redirect.Sidecar().Owned)
	after := linesOf(n)
	for _, rule := range foreign {
		if !slices.Contains(after, rule) {
			t.Errorf("%q is gone", rule)
		}
	}
}

// TestOwned_ForeignReturnBehind: the namespace holds exactly the wanted rules of a virtual machine's interface, and
// nothing in nat PREROUTING marks the end of our rules.
func TestOwned_ForeignReturnBehind(t *testing.T) {
	s := redirect.Default()
	s.Inbound, s.Outbound, s.RerouteInterfaces = redirect.Ports{}, redirect.Networks{}, []string{"vm0"}
	want := redirect.Rules(s, ruleset.IPv4)
	n := rulesettest.NewNamespace(want)
	check.OK(t, n.Add(rulesettest.Set("nat PREROUTING -i eth8 -j RETURN")))
	have := n.Save()
	if diff := ruleset.Compare(want, have, redirect.Sidecar().Owned(want, have)); !diff.Empty() {
		t.Errorf("a foreign rule is a difference:\n%s", diff)
	}
}
