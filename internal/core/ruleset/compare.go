package ruleset

import (
	"fmt"
	"slices"
	"strings"
)

// Claim says which part of a namespace's rules is ours. Whoever knows the meaning of the rules makes it; this package
// only respects it: what is not claimed is foreign and never changed.
type Claim struct {
	// Chains names the chains that are ours as a whole, by table.
	Chains map[string]map[string]bool
	// Rules marks our rules in all other chains by table, chain and place. A missing slice means none.
	Rules map[string]map[string][]bool
}

// OwnsChain reports whether the whole chain is claimed.
func (c Claim) OwnsChain(table, chain string) bool { return c.Chains[table][chain] }

// OwnsRule reports whether the i-th rule of a chain is claimed, by itself or with its chain.
func (c Claim) OwnsRule(table, chain string, i int) bool {
	marks := c.Rules[table][chain]
	return c.OwnsChain(table, chain) || i < len(marks) && marks[i]
}

// Op is what a Line says of its rule.
type Op uint8

// A rule is as wanted; wanted and not there (or not at its place); there and ours but not wanted (there); somebody
// else's, standing ahead of one of ours.
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

// ChainDiff is a chain that is not as it should be, with every rule that was compared, in order.
type ChainDiff struct {
	Table, Chain string
	// Absent says that the chain itself is wanted and not there; Stale that it is ours, there, and not wanted.
	Absent, Stale bool
	Lines         []Line
}

// Diff is all that keeps one family of a namespace from being as wanted. The zero Diff means: nothing.
type Diff struct {
	Family Family
	// Tool says, if it is set, whose view of the namespace was compared: the variants of iptables keep separate rules.
	Tool   string
	Chains []ChainDiff
	// Others are rules of somebody else that stand behind ours in built-in chains, as "TABLE: -A CHAIN …". They see only
	// what our rules let pass, so they are no difference.
	Others []string
}

// Empty reports whether everything is as wanted.
func (d Diff) Empty() bool { return len(d.Chains) == 0 }

// Compare tells how have departs from want. In a chain of ours every rule counts, and its order. In any other chain our
// rules must come first and in order; what follows them is somebody else's business, what stands ahead of them is
// reported, since a packet that meets it may never reach ours.
func Compare(want, have Set, claim Claim) Diff {
	d := Diff{Family: want.Family}
	for _, table := range tableNames(want, have) {
		w, h := want.Table(table), have.Table(table)
		for _, chain := range chainNames(w, h) {
			if diff, differs := compareChain(w, h, chain, claim); differs {
				d.Chains = append(d.Chains, diff)
			}
			d.Others = append(d.Others, others(h, chain, claim)...)
		}
	}
	return d
}

func compareChain(w, h Table, chain string, claim Claim) (ChainDiff, bool) {
	wc, wanted := w.Chain(chain)
	hc, there := h.Chain(chain)
	own := ours(w, chain, claim)
	d := ChainDiff{Table: w.Name, Chain: chain, Absent: own && !there, Stale: own && !wanted}
	seen := hc.Rules
	if !own {
		seen = hc.Rules[:ownEnd(h.Name, hc, claim)]
	}
	if !d.Absent && !d.Stale && slices.EqualFunc(wc.Rules, seen, sameSpec) {
		return d, false
	}
	d.Lines = lines(wc.Rules, seen, func(i int) bool { return own || claim.OwnsRule(h.Name, chain, i) })
	return d, true
}

// ours reports whether a chain is ours as a whole: claimed, or wanted and not one of the kernel's.
func ours(want Table, chain string, claim Claim) bool {
	_, wanted := want.Chain(chain)
	return claim.OwnsChain(want.Name, chain) || wanted && !Builtin(want.Name, chain)
}

// ownEnd is the place behind the last rule of ours in a chain.
func ownEnd(table string, c Chain, claim Claim) int {
	for i := range slices.Backward(c.Rules) {
		if claim.OwnsRule(table, c.Name, i) {
			return i + 1
		}
	}
	return 0
}

func sameSpec(a, b Rule) bool { return a.Spec == b.Spec }

// lines aligns the wanted and the present rules of a chain by their longest common subsequence. A foreign rule is shown
// where it stands ahead of a wanted one.
func lines(want, have []Rule, own func(int) bool) []Line {
	length := lcs(want, have)
	var out []Line
	i, j := 0, 0
	for i < len(want) || j < len(have) {
		switch {
		case i < len(want) && j < len(have) && sameSpec(want[i], have[j]) && own(j):
			out = append(out, Line{Same, want[i]})
			i, j = i+1, j+1
		case i == len(want) && !own(j): // behind all of ours that stay
			j++
		case j < len(have) && (i == len(want) || length[i][j+1] >= length[i+1][j]):
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

// lcs gives the length of the longest common subsequence of want[i:] and have[j:] for all i and j.
func lcs(want, have []Rule) [][]int {
	length := make([][]int, len(want)+1)
	for i := range length {
		length[i] = make([]int, len(have)+1)
	}
	for i, w := range slices.Backward(want) {
		for j, h := range slices.Backward(have) {
			if sameSpec(w, h) {
				length[i][j] = length[i+1][j+1] + 1
			} else {
				length[i][j] = max(length[i+1][j], length[i][j+1])
			}
		}
	}
	return length
}

// others lists what somebody else has behind our rules in a chain that is not ours but holds rules of ours.
func others(h Table, chain string, claim Claim) []string {
	c, there := h.Chain(chain)
	if !there || claim.OwnsChain(h.Name, chain) {
		return nil
	}
	end := ownEnd(h.Name, c, claim)
	if end == 0 {
		return nil
	}
	var out []string
	for _, r := range c.Rules[end:] {
		out = append(out, h.Name+": "+r.line(chain))
	}
	return out
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

// chainNames gives the chains of both tables in canonical order.
func chainNames(a, b Table) []string {
	both := New(0, Table{Name: a.Name, Chains: slices.Concat(a.Chains, b.Chains)}).Tables[0]
	var names []string
	for _, c := range both.Chains {
		if len(names) == 0 || names[len(names)-1] != c.Name {
			names = append(names, c.Name)
		}
	}
	return names
}

// place names the family and whose view of it this is.
func (d Diff) place() string {
	if d.Tool == "" {
		return d.Family.String()
	}
	return fmt.Sprintf("%s (%s)", d.Family, d.Tool)
}

// String prints every chain that differs: rules as wanted with two blanks before them, missing ones with "-" and their
// reason, unwanted ones of ours with "+", foreign ones ahead of ours with "!". It is "" for an empty Diff.
func (d Diff) String() string {
	var b strings.Builder
	for _, c := range d.Chains {
		fmt.Fprintf(&b, "%s table %s chain %s%s\n", d.place(), c.Table, c.Chain, c.note())
		for _, l := range c.Lines {
			fmt.Fprintf(&b, "%s\n", l.text(c.Chain))
		}
	}
	return b.String()
}

func (c ChainDiff) note() string {
	switch {
	case c.Absent:
		return ": the chain is missing"
	case c.Stale:
		return ": the chain is left over and not wanted"
	default:
		return ""
	}
}

func (l Line) text(chain string) string {
	rule := l.Rule.line(chain)
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

// Summary names the differences in one line for an error message: at most the given number of rules, then how many more.
func (d Diff) Summary(most int) string {
	var parts []string
	for _, c := range d.Chains {
		where := fmt.Sprintf("%s %s/%s", d.place(), c.Table, c.Chain)
		switch {
		case c.Absent:
			parts = append(parts, where+": chain missing")
		case c.Stale:
			parts = append(parts, where+": chain left over")
		default:
			parts = append(parts, c.changes(where)...)
		}
	}
	if len(parts) > most {
		parts = append(parts[:most:most], fmt.Sprintf("and %d more", len(parts)-most))
	}
	return strings.Join(parts, "; ")
}

func (c ChainDiff) changes(where string) []string {
	verbs := map[Op]string{Missing: "missing", Extra: "not wanted", Foreign: "foreign rule ahead of ours"}
	var parts []string
	for _, l := range c.Lines {
		if verb, ok := verbs[l.Op]; ok {
			parts = append(parts, fmt.Sprintf("%s: %s %q", where, verb, l.Rule.line(c.Chain)))
		}
	}
	return parts
}
