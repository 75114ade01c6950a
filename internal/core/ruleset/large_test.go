package ruleset_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// ports makes a chain of the mesh with a rule for each port.
func ports(list []int) ruleset.Chain {
	c := ruleset.Chain{Name: "OWN_IN", Policy: ruleset.NoPolicy}
	for _, p := range list {
		c.Rules = append(c.Rules, ruleset.Read(fmt.Sprintf("-p tcp -m tcp --dport %d -j RETURN", p)))
	}
	return c
}

// ownIn owns this chain.
func ownIn() ruleset.Ownership {
	return ruleset.Ownership{Chains: map[string]map[string]bool{"nat": {"OWN_IN": true}}}
}

func natOf(chains ...ruleset.Chain) ruleset.Set {
	return ruleset.New(ruleset.IPv4, ruleset.Table{Name: "nat", Chains: chains})
}

func numbers(first, n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = first + i
	}
	return list
}

func reversed(list []int) []int {
	list = slices.Clone(list)
	slices.Reverse(list)
	return list
}

// allocated returns the total bytes that fn allocates.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestCompare_Memory compares chains of many rules: a pod can cause the first two pairs by changing an annotation of 60
// or 120 KB.
func TestCompare_Memory(t *testing.T) {
	const perRule = 1 << 10 // bytes; an alignment of all rules would take 8 bytes for each pair
	for _, test := range []struct {
		name       string
		want, have []int
	}{
		{"12,000 ports, reversed", numbers(10000, 12000), reversed(numbers(10000, 12000))},
		{"24,000 ports, reversed", numbers(10000, 24000), reversed(numbers(10000, 24000))},
		{"24,000 ports, all others", numbers(10000, 24000), numbers(40000, 24000)},
		{"24,000 ports and none", numbers(10000, 24000), nil},
		{"none and 24,000 ports", nil, numbers(10000, 24000)},
		{"one port, 24,000 times", slices.Repeat([]int{80}, 24000), slices.Repeat([]int{443}, 24000)},
		{"few and 200,000", numbers(10000, 100), reversed(numbers(10000, 200000))},
	} {
		t.Run(test.name, func(t *testing.T) {
			want, have := natOf(ports(test.want)), natOf(ports(test.have))
			most := uint64(perRule * (len(test.want) + len(test.have)))
			for what, do := range map[string]func(){
				"Compare":   func() { ruleset.Compare(want, have, ownIn()) },
				"Reconcile": func() { ruleset.Reconcile(want, have, ownIn()) },
				"String":    func() { _ = ruleset.Compare(want, have, ownIn()).String() },
				"Summary":   func() { ruleset.Compare(want, have, ownIn()).Summary(5) },
			} {
				if got := allocated(do); got > most {
					t.Errorf("%s allocates %d bytes, more than %d", what, got, most)
				}
			}
		})
	}
}

// TestCompare_LongChains compares chains that are too long for an alignment: the lines lead from the present rules
// to the wanted rules, as for short chains.
func TestCompare_LongChains(t *testing.T) {
	ahead, list := numbers(20000, 3000), numbers(10000, 24000)
	for name, test := range map[string]struct {
		want, have []int
		foreign    int // number of foreign rules at the head
		summary    string
	}{
		"another order": {numbers(10000, 5000), reversed(numbers(10000, 5000)), 0, `not wanted "-A OWN_IN -p tcp -m tcp --dport 14999 -j RETURN"; and 9997 more`},
		"some missing, some not wanted, ends as wanted": {
			slices.Concat([]int{1, 2}, numbers(10000, 5000), []int{3}), slices.Concat([]int{1, 2}, reversed(numbers(12000, 4000)), []int{3}), 0,
			`not wanted "-A OWN_IN -p tcp -m tcp --dport 15999 -j RETURN"; and 9001 more`,
		},
		"one change":         {list, slices.Replace(slices.Clone(list), 12000, 12001, 7), 0, `not wanted "-A OWN_IN -p tcp -m tcp --dport 7 -j RETURN"; and 1 more`},
		"repeated":           {slices.Repeat([]int{1, 2}, 2000), slices.Repeat([]int{2, 2, 3}, 2000), 0, `not wanted "-A OWN_IN -p tcp -m tcp --dport 2 -j RETURN"; and 9999 more`},
		"foreign ones ahead": {numbers(10000, 3000), append(ahead, 10007), 3000, `foreign rule ahead of ours "-A OUTPUT -p tcp -m tcp --dport 20000 -j RETURN"; and 6000 more`},
	} {
		t.Run(name, func(t *testing.T) {
			wanted, present := ports(test.want), ports(test.have)
			owned := ownIn()
			if test.foreign > 0 {
				wanted.Name, present.Name = "OUTPUT", "OUTPUT"
				owned.Rules = map[string]map[string][]bool{"nat": {"OUTPUT": append(make([]bool, test.foreign), true)}}
			}
			d := ruleset.Compare(natOf(wanted), natOf(present), owned)
			var want, have []ruleset.Rule
			for _, l := range d.Chains[0].Lines {
				if l.Op == ruleset.Same || l.Op == ruleset.Missing {
					want = append(want, l.Rule)
				}
				if l.Op != ruleset.Missing {
					have = append(have, l.Rule)
				}
				if l.Op == ruleset.Foreign && len(have) > test.foreign {
					t.Fatalf("%q is not foreign", l.Rule)
				}
			}
			if !slices.EqualFunc(wanted.Rules, want, ruleset.Rule.Equal) || !slices.EqualFunc(present.Rules, have, ruleset.Rule.Equal) {
				t.Errorf("the lines lead from %d rules to %d, want from %d to %d", len(have), len(want), len(present.Rules), len(wanted.Rules))
			}
			check.Equal(t, d.Summary(1), "IPv4 nat/"+wanted.Name+": "+test.summary)
			if ruleset.Reconcile(natOf(wanted), natOf(present), owned).Empty() {
				t.Error("the program is empty")
			}
		})
	}
}

// TestCompare_ForeignRulesBehind: foreign rules behind ours are only logged, and a pod can make very many.
func TestCompare_ForeignRulesBehind(t *testing.T) {
	chain := ruleset.Chain{Name: "OUTPUT", Policy: "ACCEPT", Rules: []ruleset.Rule{ruleset.Read("-j OWN_OUT")}}
	for i := range 1000 {
		chain.Rules = append(chain.Rules, ruleset.Read(fmt.Sprintf("-p tcp -m tcp --dport %d -j ACCEPT", i)))
	}
	owned := ruleset.Ownership{Rules: map[string]map[string][]bool{"nat": {"OUTPUT": {true}}}}
	got := ruleset.Compare(natOf(ruleset.Chain{Name: "OUTPUT", Policy: "ACCEPT", Rules: chain.Rules[:1]}), natOf(chain), owned).Others
	if len(got) != 21 || got[20] != "980 more" {
		t.Errorf("others are %d: %q", len(got), got[len(got)-1])
	}
}

// TestSummary_FormatsOnlyNamedRules: a pod can make tens of thousands of chains and rules; a summary names five.
func TestSummary_FormatsOnlyNamedRules(t *testing.T) {
	const most = 64 << 10
	d := ruleset.Diff{Family: ruleset.IPv4}
	for i := range 20000 {
		d.Chains = append(d.Chains, ruleset.ChainDiff{Table: "nat", Chain: fmt.Sprintf("OWN_%0230d", i), Stale: true}, ruleset.ChainDiff{
			Table: "nat", Chain: "OWN_IN", Lines: []ruleset.Line{{Op: ruleset.Extra, Rule: ruleset.Read("-j RETURN")}},
		})
	}
	summary := ""
	got := allocated(func() { summary = d.Summary(5) })
	if got > 200*uint64(len(d.Chains)) || len(summary) > most {
		t.Errorf("Summary allocates %d bytes for %d chains, and has %d", got, len(d.Chains), len(summary))
	}
	if !strings.HasSuffix(summary, "; and 39995 more") {
		t.Errorf("Summary ends with %q", summary[max(0, len(summary)-40):])
	}
}

// TestDiff_Bound: tens of thousands of chains, or of rules in one chain, make a text of bounded length.
func TestDiff_Bound(t *testing.T) {
	const most = 3 << 20
	extra := ruleset.Line{Op: ruleset.Extra, Rule: ruleset.Read("-m comment --comment " + strings.Repeat("x", 200) + " -j RETURN")}
	chains := ruleset.Diff{Family: ruleset.IPv4}
	for i := range 40000 {
		chains.Chains = append(chains.Chains, ruleset.ChainDiff{Table: "nat", Chain: fmt.Sprintf("OWN_%0230d", i), Stale: true})
	}
	rules := ruleset.Diff{Family: ruleset.IPv4, Chains: []ruleset.ChainDiff{
		{Table: "nat", Chain: "OWN_IN", Lines: slices.Repeat([]ruleset.Line{extra}, 40000)}, {Table: "nat", Chain: "OWN_OUT", Absent: true},
	}}
	for name, d := range map[string]ruleset.Diff{"chains": chains, "rules": rules} {
		text := d.String()
		last := text[strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n")+1:]
		if len(text) > most || !strings.HasPrefix(last, "the rest is not shown: ") {
			t.Errorf("%s: %d bytes that end with %q", name, len(text), last)
		}
	}
}
