package ruleset_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

func parse(tb testing.TB, text string) ruleset.Set {
	tb.Helper()
	set, err := ruleset.Parse(ruleset.IPv4, text)
	if err != nil {
		tb.Fatal(err)
	}
	return set
}

// nat makes a Set of that table from lines like "OUTPUT -j OWN_A" and, for a chain that is not built in, "OWN_A:". What
// stands behind " # " is the rule's reason.
func nat(tb testing.TB, lines ...string) ruleset.Set {
	tb.Helper()
	table := ruleset.Table{Name: "nat"}
	chain := func(name string) *ruleset.Chain {
		for i := range table.Chains {
			if table.Chains[i].Name == name {
				return &table.Chains[i]
			}
		}
		policy := ruleset.NoPolicy
		if ruleset.Builtin("nat", name) {
			policy = "ACCEPT"
		}
		table.Chains = append(table.Chains, ruleset.Chain{Name: name, Policy: policy})
		return &table.Chains[len(table.Chains)-1]
	}
	for _, l := range lines {
		if name, declared := strings.CutSuffix(l, ":"); declared {
			chain(name)
			continue
		}
		text, why, _ := strings.Cut(l, " # ")
		name, spec, _ := strings.Cut(text, " ")
		c := chain(name)
		c.Rules = append(c.Rules, because(spec, why))
	}
	return ruleset.New(ruleset.IPv4, table)
}

// because is a rule that was read, with a reason.
func because(text, why string) ruleset.Rule {
	r := ruleset.Opaque(text)
	r.Why = why
	return r
}

// own marks chains whose name begins with OWN_, jumps to them, rules that carry the mark 0x99, and what is wanted.
func own(want, have ruleset.Set) ruleset.Ownership {
	owned := ruleset.Ownership{Chains: map[string]map[string]bool{}, Rules: map[string]map[string][]bool{}}
	for _, t := range have.Tables {
		owned.Chains[t.Name], owned.Rules[t.Name] = map[string]bool{}, map[string][]bool{}
		for _, c := range t.Chains {
			owned.Chains[t.Name][c.Name] = strings.HasPrefix(c.Name, "OWN_")
			wanted, _ := want.Table(t.Name).Chain(c.Name)
			marks := make([]bool, len(c.Rules))
			for i, r := range c.Rules {
				marks[i] = strings.Contains(r.String(), "-j OWN_") || strings.Contains(r.String(), "--mark 0x99")
				for _, w := range wanted.Rules {
					marks[i] = marks[i] || w.String() == r.String()
				}
			}
			owned.Rules[t.Name][c.Name] = marks
		}
	}
	return owned
}
