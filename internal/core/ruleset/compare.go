package ruleset

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Ownership marks our part of a namespace's rules. Package redirect makes it. Everything else is foreign and never changed.
type Ownership struct {
	// Chains names the chains that we own as a whole, by table.
	Chains map[string]map[string]bool
	// Rules marks our rules in all other chains by table, chain and place. A missing slice means no rule.
	Rules map[string]map[string][]bool
}

// OwnsChain reports whether we own the whole chain.
func (c Ownership) OwnsChain(table, chain string) bool { return c.Chains[table][chain] }

// OwnsRule reports whether we own the i-th rule of a chain, by itself or with its chain.
func (c Ownership) OwnsRule(table, chain string, i int) bool {
	marks := c.Rules[table][chain]
	return c.OwnsChain(table, chain) || i < len(marks) && marks[i]
}

// Op is the result of the comparison for one rule.
type Op uint8

// Same: the rule is wanted and in its place. Missing: wanted, but absent or out of place. Extra: ours, but not wanted in
// this place. Foreign: a foreign rule ahead of a rule of ours.
const (
	Same Op = iota
	Missing
	Extra
	Foreign
)

// Line is one rule in the comparison of a chain.
type Line struct {
	Op   Op
	Rule Rule
}

// ChainDiff is a chain that differs from the wanted chain, with every compared rule, in order.
type ChainDiff struct {
	Table, Chain string
	// Absent is set if the wanted chain does not exist; Stale if a chain of ours exists and is not wanted.
	Absent, Stale bool
	Lines         []Line
}

// maxPairs bounds the alignment of a chain: the number of wanted rules times the number of present rules, without the equal
// rules at both ends. A thousand of each are aligned, with a table of 4 MB. A larger comparison is correct, but not
// the shortest.
const maxPairs = 1 << 20

// maxOthers bounds the listed foreign rules.
const maxOthers = 20

// Diff holds the differences of one family of a namespace from the wanted rules. The zero Diff means: no difference.
type Diff struct {
	Family Family
	// Tool, if set, names the compared view of the namespace: the variants of iptables keep separate rules.
	Tool   string
	Chains []ChainDiff
	// Others are foreign rules behind ours in built-in chains, as "TABLE: -A CHAIN …": the first rules, and the number
	// of the rest. Only packets that our rules let pass traverse these rules, so they make no difference.
	Others []string
}

// Empty reports whether the Diff has no difference.
func (d Diff) Empty() bool { return len(d.Chains) == 0 }

// Compare finds the differences of have from want, in time and memory linear in the number of rules. In our chains every
// rule counts, and the order. In any other chain our rules must come first and in order; rules behind them are ignored;
// rules ahead of them are reported because a packet that matches one may never reach our rules.
func Compare(want, have Set, owned Ownership) Diff {
	d := Diff{Family: want.Family}
	unlisted := 0
	for _, table := range tableNames(want, have) {
		w, h := want.Table(table), have.Table(table)
		wanted, there := byName(w), byName(h)
		for _, chain := range chainNames(w, h) {
			if diff, differs := compareChain(table, chain, wanted[chain], there[chain], owned); differs {
				d.Chains = append(d.Chains, diff)
			}
			for _, r := range behind(table, there[chain], owned) {
				if len(d.Others) == maxOthers {
					unlisted++
					continue
				}
				d.Others = append(d.Others, shown(table+": "+r.appendTo(chain)))
			}
		}
	}
	if unlisted > 0 {
		d.Others = append(d.Others, fmt.Sprintf("%d more", unlisted))
	}
	return d
}

// byName returns the chains of a table by name. A pod can create very many chains.
func byName(t Table) map[string]Chain {
	chains := make(map[string]Chain, len(t.Chains))
	for _, c := range t.Chains {
		chains[c.Name] = c
	}
	return chains
}

// compareChain compares a chain that is wanted, present, or both; the other one is the zero Chain.
func compareChain(table, name string, want, have Chain, owned Ownership) (ChainDiff, bool) {
	own := ours(table, name, want.Name != "", owned)
	d := ChainDiff{Table: table, Chain: name, Absent: own && have.Name == "", Stale: own && want.Name == ""}
	seen := have.Rules
	if !own {
		seen = seen[:ownEnd(table, have, owned)]
	}
	if !d.Absent && !d.Stale && slices.EqualFunc(want.Rules, seen, Rule.Equal) {
		return d, false
	}
	d.Lines = lines(want.Rules, seen, func(i int) bool { return own || owned.OwnsRule(table, name, i) })
	return d, true
}

// ours reports whether we own a whole chain: it is marked as owned, or wanted and not built in.
func ours(table, chain string, wanted bool, owned Ownership) bool {
	return owned.OwnsChain(table, chain) || wanted && !Builtin(table, chain)
}

// ownEnd returns the index behind our last rule in a chain.
func ownEnd(table string, c Chain, owned Ownership) int {
	for i := range slices.Backward(c.Rules) {
		if owned.OwnsRule(table, c.Name, i) {
			return i + 1
		}
	}
	return 0
}

// lines aligns the wanted and the present rules of a chain. Equal rules at both ends need no alignment.
func lines(want, have []Rule, own func(int) bool) []Line {
	head, end := 0, 0
	for head < min(len(want), len(have)) && want[head].Equal(have[head]) && own(head) {
		head++
	}
	w, h := want[head:], have[head:]
	for end < min(len(w), len(h)) && w[len(w)-1-end].Equal(h[len(h)-1-end]) && own(len(have)-1-end) {
		end++
	}
	end = max(0, end-1) // align shows foreign rules ahead of a wanted rule: it needs one of the equal rules
	w, h = w[:len(w)-end], h[:len(h)-end]
	out := make([]Line, 0, len(want)+len(h))
	for _, r := range want[:head] {
		out = append(out, Line{Same, r})
	}
	out = align(out, w, h, func(i int) bool { return own(head + i) })
	for _, r := range want[len(want)-end:] {
		out = append(out, Line{Same, r})
	}
	return out
}

// align adds lines by the longest common subsequence of both. It shows a foreign rule only ahead of a wanted rule.
func align(out []Line, want, have []Rule, own func(int) bool) []Line {
	length := func(int, int) int32 { return 0 } // then all present rules up to the next wanted rule are in its way
	if len(want)*len(have) <= maxPairs {
		length = lcs(want, have)
	}
	i, j := 0, 0
	for i < len(want) || j < len(have) {
		switch {
		case i < len(want) && j < len(have) && want[i].Equal(have[j]) && own(j):
			out = append(out, Line{Same, want[i]})
			i, j = i+1, j+1
		case i == len(want) && !own(j): // behind all our rules that stay
			j++
		case j < len(have) && (i == len(want) || length(i, j+1) >= length(i+1, j)):
			op := Extra
			if !own(j) {
				op = Foreign
			}
			out = append(out, Line{op, have[j]})
			j++
		default:
			out = append(out, Line{Missing, want[i]})
			i++
		}
	}
	return out
}

// lcs returns the length of the longest common subsequence of want[i:] and have[j:] for all i and j.
func lcs(want, have []Rule) func(i, j int) int32 {
	row := len(have) + 1
	table := make([]int32, (len(want)+1)*row)
	for i, w := range slices.Backward(want) {
		for j, h := range slices.Backward(have) {
			if w.Equal(h) {
				table[i*row+j] = table[(i+1)*row+j+1] + 1
			} else {
				table[i*row+j] = max(table[(i+1)*row+j], table[i*row+j+1])
			}
		}
	}
	return func(i, j int) int32 { return table[i*row+j] }
}

// behind returns the foreign rules behind ours in a foreign chain that holds our rules.
func behind(table string, c Chain, owned Ownership) []Rule {
	end := ownEnd(table, c, owned)
	if end == 0 || owned.OwnsChain(table, c.Name) {
		return nil
	}
	return c.Rules[end:]
}

func tableNames(sets ...Set) []string {
	var names []string
	for _, s := range sets {
		for _, t := range s.Tables {
			names = append(names, t.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// chainNames returns the chains of both tables in canonical order.
func chainNames(a, b Table) []string {
	var names []string
	for _, c := range New(0, Table{Name: a.Name, Chains: slices.Concat(a.Chains, b.Chains)}).Tables[0].Chains {
		names = append(names, c.Name)
	}
	return slices.Compact(names)
}

// place returns the name of the family, and of the tool if set.
func (d Diff) place() string {
	if d.Tool == "" {
		return d.Family.String()
	}
	return fmt.Sprintf("%s (%s)", d.Family, d.Tool)
}

// String prints every chain that differs: Same rules after two blanks, Missing rules after "-" with their reason, Extra rules
// after "+", Foreign rules after "!". It returns "" for an empty Diff; above maxText it ends with a line about the rest.
func (d Diff) String() string {
	var b strings.Builder
	for i, c := range d.Chains {
		fmt.Fprintf(&b, "%s table %s chain %s%s\n", d.place(), c.Table, shown(c.Chain), c.note())
		for _, l := range c.Lines {
			if b.Len() > maxText {
				break
			}
			b.WriteString(shown(l.text(c.Chain)) + "\n")
		}
		if b.Len() > maxText {
			fmt.Fprintf(&b, "the rest is not shown: %d more chains differ\n", len(d.Chains)-1-i)
			break
		}
	}
	return b.String()
}

// maxText bounds, roughly, the bytes of a printed difference, far above the size of the mesh's own rules.
const maxText = 2 << 20

// maxLine bounds a printed rule, far above the mesh's own rules.
const maxLine = 4 << 10

// shown returns a name or a rule, which a pod may have made, as one printable line.
func shown(text string) string { return printable.Text(text, maxLine) }

func (c ChainDiff) note() string {
	switch {
	case c.Absent:
		return ": the chain is missing"
	case c.Stale:
		return ": the chain is left over and not wanted"
	}
	return ""
}

func (l Line) text(chain string) string {
	rule := l.Rule.appendTo(chain)
	switch l.Op {
	case Missing:
		if l.Rule.Why != "" {
			rule += "    # missing: " + l.Rule.Why
		}
		return "- " + rule
	case Extra:
		return "+ " + rule + "    # not wanted here"
	case Foreign:
		return "! " + rule + "    # not ours, ahead of ours"
	case Same:
	}
	return "  " + rule
}

// Summary names the differences in one line for an error message: at most the given number of rules, then the number of
// the rest. It does not format the rest: a pod can create very many rules.
func (d Diff) Summary(most int) string {
	var parts []string
	all := 0
	add := func(c ChainDiff, what string, rules ...Rule) {
		if all++; all > most {
			return
		}
		for _, r := range rules {
			what += " " + printable.Quote(r.appendTo(c.Chain), maxLine)
		}
		parts = append(parts, fmt.Sprintf("%s %s/%s: %s", d.place(), c.Table, shown(c.Chain), what))
	}
	verbs := map[Op]string{Missing: "missing", Extra: "not wanted", Foreign: "foreign rule ahead of ours"}
	for _, c := range d.Chains {
		switch {
		case c.Absent:
			add(c, "chain missing")
		case c.Stale:
			add(c, "chain left over")
		default:
			for _, l := range c.Lines {
				if verb := verbs[l.Op]; verb != "" {
					add(c, verb, l.Rule)
				}
			}
		}
	}
	if all > most {
		parts = append(parts, fmt.Sprintf("and %d more", all-most))
	}
	return strings.Join(parts, "; ")
}
