package ruleset_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

func parse(tb testing.TB, text string) ruleset.Set {
	tb.Helper()
	set, err := ruleset.Parse(ruleset.IPv4, text)
	if err != nil {
		tb.Fatal(err)
	}
	return set
}

// nat makes a Set of that table from lines for rulesettest.Set without the name of the table.
func nat(lines ...string) ruleset.Set {
	all := []string{"nat"}
	for _, l := range lines {
		all = append(all, "nat "+l)
	}
	return rulesettest.Set(all...)
}

// own marks chains whose name begins with OWN_, jumps to them, rules that carry the mark 0x99, and wanted rules.
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
