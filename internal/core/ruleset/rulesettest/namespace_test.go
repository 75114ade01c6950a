package rulesettest_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// stock returns a namespace with rules.
const stock = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT DROP [0:0]
:POSTROUTING ACCEPT [0:0]
:A - [0:0]
:B - [0:0]
-A OUTPUT -p tcp -j A
-A OUTPUT -p udp -j DROP
-A OUTPUT -p tcp -j A
-A A -j RETURN
COMMIT
`

func parse(t *testing.T, f ruleset.Family, text string) ruleset.Set {
	t.Helper()
	set, err := ruleset.Parse(f, text)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func op(verb ruleset.Verb, chain, rule string) ruleset.Operation {
	return ruleset.Operation{Verb: verb, Table: "nat", Chain: chain, Rule: ruleset.Read(rule)}
}

func insert(place int, rule string) ruleset.Operation {
	o := op(ruleset.Insert, "A", rule)
	o.Place = place
	return o
}

func TestNamespace_RefusesAsTheTool(t *testing.T) {
	for _, tt := range []struct {
		op   ruleset.Operation // applied after a rule of chain A jumps to chain B
		want string
	}{
		{op(ruleset.Append, "C", "-j DROP"), `chain "C" does not exist`},
		{op(ruleset.Append, "A", "-j C"), `restoring "-A A -j C": chain "C" does not exist`},
		{insert(4, "-j DROP"), "nothing can be inserted at 4"},
		{insert(0, "-j DROP"), "nothing can be inserted at 0"},
		{op(ruleset.Delete, "A", "-j DROP"), `chain "A" has no such rule`},
		{op(ruleset.RemoveChain, "A", ""), "is built in or not empty"},
		{op(ruleset.RemoveChain, "B", ""), `still jumped to from "A"`},
		{op(ruleset.RemoveChain, "INPUT", ""), "is built in or not empty"},
		{op(ruleset.EmptyChain, "INPUT", ""), `chain "INPUT" is built in`},
	} {
		n := rulesettest.NewNamespace(parse(t, ruleset.IPv4, stock))
		good := ruleset.Operation{Verb: ruleset.EmptyChain, Table: "mangle", Chain: "M"}
		err := n.Apply(ruleset.Program{Operations: []ruleset.Operation{good, op(ruleset.EmptyChain, "B", ""), op(ruleset.Append, "A", "-j B"), tt.op}})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("error is %v, want %q in it", err, tt.want)
		}
		after := n.Save()
		if _, kept := after.Table("mangle").Chain("M"); !kept || !strings.HasSuffix(after.String(), stock) {
			t.Errorf("the table before the bad one must change, the bad one not:\n%s", after)
		}
	}
}
