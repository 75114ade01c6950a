package ruleset

import (
	"fmt"
	"slices"
	"strings"
)

// Program is the text for one "iptables-restore --noflush" that brings a family of a namespace to a wanted state. Each
// table is one transaction of the kernel. The zero Program does nothing and need not be run.
type Program struct {
	Family Family
	text   string
}

// String is the exact text to feed to iptables-restore.
func (p Program) String() string { return p.text }

// Empty reports whether there is nothing to do.
func (p Program) Empty() bool { return p.text == "" }

// Reconcile gives the program that turns have into want: it makes or refills our chains, puts our rules at the head of
// the built-in chains, and takes away what is claimed and not wanted. Foreign chains, rules and policies are left as
// they are. Tables that are already right are not mentioned. An empty want removes everything that is claimed.
func Reconcile(want, have Set, claim Claim) Program {
	diff := Compare(want, have, claim)
	var b strings.Builder
	for _, name := range tableNames(want, have) {
		if slices.ContainsFunc(diff.Chains, func(c ChainDiff) bool { return c.Table == name }) {
			rebuild(&b, want.Table(name), have.Table(name), claim)
		}
	}
	return Program{Family: want.Family, text: b.String()}
}

// rebuild writes one table. Chains of ours are declared first, which makes or empties them under --noflush, and filled
// before anything jumps to them; leftovers go last, when nothing does any more. A built-in chain is never declared:
// that would set its policy.
func rebuild(b *strings.Builder, want, have Table, claim Claim) {
	fmt.Fprintf(b, "*%s\n", want.Name)
	own := slices.DeleteFunc(slices.Clone(want.Chains), func(c Chain) bool { return Builtin(want.Name, c.Name) })
	stale := leftover(want, have, claim)
	for _, c := range slices.Concat(own, stale) {
		fmt.Fprintf(b, ":%s %s [0:0]\n", c.Name, NoPolicy)
	}
	for _, c := range own {
		appendAll(b, c)
	}
	for _, c := range have.Chains {
		if _, wanted := want.Chain(c.Name); !ours(have.Name, c.Name, wanted, claim) {
			replaceOwn(b, want, have.Name, c, claim)
		}
	}
	for _, c := range want.Chains {
		if _, there := have.Chain(c.Name); !there && Builtin(want.Name, c.Name) {
			appendAll(b, c)
		}
	}
	for _, c := range stale {
		fmt.Fprintf(b, "-X %s\n", c.Name)
	}
	b.WriteString("COMMIT\n")
}

// leftover gives the chains that are ours, there, and not wanted.
func leftover(want, have Table, claim Claim) []Chain {
	return slices.DeleteFunc(slices.Clone(have.Chains), func(c Chain) bool {
		_, wanted := want.Chain(c.Name)
		return wanted || !claim.OwnsChain(have.Name, c.Name)
	})
}

func appendAll(b *strings.Builder, c Chain) {
	for _, r := range c.Rules {
		fmt.Fprintln(b, r.line(c.Name))
	}
}

// replaceOwn swaps our rules in a chain that is not ours as a whole.
func replaceOwn(b *strings.Builder, want Table, table string, have Chain, claim Claim) {
	wc, _ := want.Chain(have.Name)
	foreign := false
	var own []Rule
	for i, r := range have.Rules {
		if claim.OwnsRule(table, have.Name, i) {
			own = append(own, r)
		} else {
			foreign = true
		}
	}
	if slices.EqualFunc(own, wc.Rules, sameSpec) && ownEnd(table, have, claim) == len(own) {
		return
	}
	for _, r := range own {
		fmt.Fprintln(b, "-D"+strings.TrimPrefix(r.line(have.Name), "-A"))
	}
	if !foreign {
		appendAll(b, wc)
		return
	}
	for i, r := range wc.Rules {
		fmt.Fprintf(b, "-I %s %d %s\n", have.Name, i+1, r.Spec)
	}
}
