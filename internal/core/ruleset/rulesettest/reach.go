package rulesettest

import (
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Reach brings the namespace to the wanted rules and checks the promises of Compare and Reconcile: the wanted rules are
// present, ahead of all others; foreign rules stay; the result survives printing and reading; and no difference is left.
func (n *Namespace) Reach(tb testing.TB, want ruleset.Set, owned func(want, have ruleset.Set) ruleset.Ownership) {
	tb.Helper()
	have := n.Save()
	ours := owned(want, have)
	program := ruleset.Reconcile(want, have, ours)
	if program.Empty() != ruleset.Compare(want, have, ours).Empty() {
		tb.Errorf("Compare and Reconcile disagree about\n%s\nbeing\n%s", have, want)
	}
	if err := n.Apply(program); err != nil {
		tb.Errorf("%v in\n%s", err, program)
	}
	after := n.Save()
	oursAfter := owned(want, after)
	if d, again := ruleset.Compare(want, after, oursAfter), ruleset.Reconcile(want, after, oursAfter); !d.Empty() || !again.Empty() {
		tb.Errorf("after\n%s\nthe difference is\n%s\nand the next program\n%s", program, d, again)
	}
	for _, t := range want.Tables {
		for _, c := range t.Chains {
			got, _ := after.Table(t.Name).Chain(c.Name)
			if len(got.Rules) < len(c.Rules) || !slices.EqualFunc(c.Rules, got.Rules[:len(c.Rules)], ruleset.Rule.Equal) {
				tb.Errorf("%s/%s does not begin with the wanted rules:\n%s", t.Name, c.Name, after)
			}
		}
	}
	check.Diff(tb, "foreign rules", Lines(have, ours), Lines(after, oursAfter))
	if parsed, err := ruleset.Parse(after.Family, after.String()); err != nil || !parsed.Equal(after) {
		tb.Errorf("the result does not survive printing and reading: %v\n%s", err, after)
	}
}
