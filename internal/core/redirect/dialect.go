package redirect

import (
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// builder is a Spec in one dialect: rules of iptables for one family, or of the native tables for all captured ones.
type builder struct {
	Spec
	families []ruleset.Family
	native   bool
}

// rule makes a rule. Matches are in the order of the native dialect.
func (b builder) rule(why string, target ruleset.Target, matches ...ruleset.Match) ruleset.Rule {
	if b.native {
		return ruleset.NFT(why, target, matches...)
	}
	return ruleset.IPTables(why, target, matches...)
}

func (b builder) jump(chain string) ruleset.Jump { return ruleset.Jump{Chain: b.name(chain)} }

// name returns the name of a chain: ISTIO_OUTPUT_DNS, or istio-output-dns.
func (b builder) name(chain string) string {
	if !b.native {
		return chain
	}
	return strings.ReplaceAll(strings.ToLower(chain), "_", "-")
}

// chain is a chain under its iptables name.
type chain struct {
	name  string
	rules []ruleset.Rule
}

// table holds the chains that have rules.
func (b builder) table(name string, chains ...chain) ruleset.Table {
	t := ruleset.Table{Name: name}
	if b.native {
		t.Name = nativePrefix + name
	}
	for _, c := range chains {
		policy := ruleset.NoPolicy
		if ruleset.Builtin(t.Name, c.name) {
			policy = "ACCEPT"
		}
		if len(c.rules) > 0 {
			t.Chains = append(t.Chains, ruleset.Chain{Name: b.name(c.name), Policy: policy, Rules: c.rules})
		}
	}
	return t
}

// filled returns the tables that have chains.
func filled(tables ...ruleset.Table) []ruleset.Table {
	return slices.DeleteFunc(tables, func(t ruleset.Table) bool { return len(t.Chains) == 0 })
}

// Rules returns iptables' rules that capture one family by the Spec.
func Rules(s Spec, f ruleset.Family) ruleset.Set {
	return ruleset.New(f, filled(builder{Spec: s, families: []ruleset.Family{f}}.tables()...)...)
}

// RejectAll returns iptables' rules that reject an IP family that the mesh does not capture.
func RejectAll(f ruleset.Family) ruleset.Set {
	return ruleset.New(f, builder{}.rejected(f))
}

// NativeSet returns the native nf_tables tables that capture a pod by the Spec, for both families at once. The
// reference's tables sometimes fail to load or let packets pass; here packets in conntrack state invalid are dropped
// whatever their protocol; so are connections that tproxy cannot hand over, like with iptables' target TPROXY; no rule
// jumps to a missing chain; and a Rejected family is rejected.
//
// A rule without an address matches both families. If IPv6 is Bypassed, the first rule of each base chain returns its
// packets; the reference captures them even then.
func (s Spec) NativeSet(f Families) ruleset.Set {
	b := builder{Spec: s, families: f.Captured(), native: true}
	tables := b.tables()
	switch f.IPv6 {
	case Rejected:
		tables = append(tables, b.rejected(ruleset.IPv6))
	case Bypassed:
		b.passIPv6(tables)
	case Captured, Unused:
	}
	return ruleset.Set{Family: ruleset.Inet, Tables: filled(tables...)}
}

// passIPv6 puts a RETURN for IPv6 at the head of every base chain.
func (b builder) passIPv6(tables []ruleset.Table) {
	pass := b.rule("IPv6 bypasses the mesh", ruleset.Return, ruleset.OfFamily(ruleset.IPv6))
	for _, t := range tables {
		for i, c := range t.Chains {
			if _, base := Sidecar().HookOf(ruleset.Inet, t.Name, c.Name); base {
				t.Chains[i].Rules = append([]ruleset.Rule{pass}, c.Rules...)
			}
		}
	}
}
