package rulesettest_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// stock is a namespace in which somebody has been before.
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

func TestNamespaceRestoresAsTheToolDoes(t *testing.T) {
	for _, test := range []struct {
		name string
		text string
		// want is nat/OUTPUT, A, B and C afterwards.
		want []string
	}{
		{
			"nothing changes nothing", "",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j RETURN", "-N B"},
		},
		{
			"declaring a chain makes it", "*nat\n:C - [0:0]\n-A C -j A\nCOMMIT\n",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j RETURN", "-N B", "-N C", "-A C -j A"},
		},
		{
			"declaring a chain that is there empties it", "*nat\n:A - [0:0]\n-A A -j B\nCOMMIT\n",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j B", "-N B"},
		},
		{
			"declaring a built-in chain sets its policy only", "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n",
			[]string{"-P OUTPUT ACCEPT", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j RETURN", "-N B"},
		},
		{
			"rules are inserted by number", "*nat\n-I OUTPUT 1 -j B\n-I OUTPUT 5 -j A\nCOMMIT\n",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -j B", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-A OUTPUT -j A", "-N A", "-A A -j RETURN", "-N B"},
		},
		{
			"the first of equal rules is deleted", "*nat\n-D OUTPUT -p tcp -j A\nCOMMIT\n",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j RETURN", "-N B"},
		},
		{
			"an empty chain nobody jumps to can go", "*nat\n-X B\nCOMMIT\n",
			[]string{"-P OUTPUT DROP", "-A OUTPUT -p tcp -j A", "-A OUTPUT -p udp -j DROP", "-A OUTPUT -p tcp -j A", "-N A", "-A A -j RETURN"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := rulesettest.NewNamespace(parse(t, ruleset.IPv4, stock))
			if err := n.Restore(test.text); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, list(n.Save())); diff != "" {
				t.Errorf("afterwards (-want +got):\n%s", diff)
			}
		})
	}
}

// list prints nat/OUTPUT and the chains that are not built in as "iptables -S" does.
func list(set ruleset.Set) []string {
	var out []string
	for _, c := range set.Table("nat").Chains {
		switch {
		case c.Policy == ruleset.NoPolicy:
			out = append(out, "-N "+c.Name)
		case c.Name == "OUTPUT":
			out = append(out, "-P OUTPUT "+c.Policy)
		}
		for _, r := range c.Rules {
			out = append(out, "-A "+c.Name+" "+r.String())
		}
	}
	return out
}

func TestNamespaceRefusesWhatTheToolRefuses(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"a rule outside a table", "-A OUTPUT -j DROP\n", `line 1 "-A OUTPUT -j DROP": stands outside any table`},
		{"a text that is cut off", "*nat\n-A OUTPUT -j DROP\n", `table "nat" has no COMMIT`},
		{"a rule for a chain that is not there", "*nat\n-A C -j DROP\nCOMMIT\n", `chain "C" does not exist`},
		{"a jump to a chain that is not there", "*nat\n-A A -j C\n:C - [0:0]\nCOMMIT\n", `line 2 "-A A -j C": chain "C" does not exist`},
		{"an insertion behind the end", "*nat\n-I A 3 -j DROP\nCOMMIT\n", `nothing can be inserted at "3"`},
		{"an insertion at 0", "*nat\n-I A 0 -j DROP\nCOMMIT\n", `nothing can be inserted at "0"`},
		{"an insertion without number", "*nat\n-I A -j DROP\nCOMMIT\n", `nothing can be inserted at "-j"`},
		{"deleting what is not there", "*nat\n-D A -j DROP\nCOMMIT\n", `chain "A" has no such rule`},
		{"removing a chain that has rules", "*nat\n-X A\nCOMMIT\n", `is built in or not empty`},
		{"removing a chain that is jumped to", "*nat\n:A - [0:0]\n-X A\nCOMMIT\n", `still jumped to from "OUTPUT"`},
		{"removing a built-in chain", "*nat\n-X INPUT\nCOMMIT\n", `is built in or not empty`},
		{"a policy for an own chain", "*nat\n:A DROP [0:0]\nCOMMIT\n", `policy "DROP" does not fit chain "A"`},
		{"a built-in chain without policy", "*nat\n:INPUT - [0:0]\nCOMMIT\n", `policy "-" does not fit chain "INPUT"`},
		{"a chain without counters", "*nat\n:C -\nCOMMIT\n", `want :CHAIN POLICY [0:0]`},
		{"an unknown command", "*nat\n-F A\nCOMMIT\n", `command "-F" is not known here`},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := parse(t, ruleset.IPv4, stock)
			n := rulesettest.NewNamespace(before)
			err := n.Restore(test.text)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q in it", err, test.want)
			}
			if diff := cmp.Diff(before.String(), n.Save().String()); diff != "" {
				t.Errorf("the table was changed all the same:\n%s", diff)
			}
		})
	}
}

func TestNamespaceKeepsTheTablesBeforeABadOne(t *testing.T) {
	n := rulesettest.NewNamespace(ruleset.Set{Family: ruleset.IPv6})
	if err := n.Restore("*raw\n-A OUTPUT -j DROP\nCOMMIT\n*nat\n-A NOWHERE -j DROP\nCOMMIT\n"); err == nil {
		t.Error("the bad table was taken")
	}
	want := "*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j DROP\nCOMMIT\n"
	if diff := cmp.Diff(want, n.Save().String()); diff != "" {
		t.Errorf("saved (-want +got):\n%s", diff)
	}
}

func TestNamespaceSharesNothingWithItsSets(t *testing.T) {
	before := parse(t, ruleset.IPv4, stock)
	n := rulesettest.NewNamespace(before)
	saved := n.Save()
	if err := n.Restore("*nat\n-D OUTPUT -p tcp -j A\n-D OUTPUT -p tcp -j A\n:A - [0:0]\n-X A\nCOMMIT\n"); err != nil {
		t.Fatal(err)
	}
	for _, set := range []ruleset.Set{before, saved} {
		if diff := cmp.Diff(stock, set.String()); diff != "" {
			t.Errorf("a Set changed:\n%s", diff)
		}
	}
}
