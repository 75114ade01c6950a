package ruleset

import (
	"fmt"
	"slices"
	"strings"
)

// Verb is the kind of an Operation.
type Verb uint8

// EmptyChain creates a chain, or removes all its rules; the others are -A, -I at the Operation's Place, -D of the first
// equal rule, and -X of iptables.
const (
	EmptyChain Verb = iota
	Append
	Insert
	Delete
	RemoveChain
)

// Operation is one change of a chain.
type Operation struct {
	Verb         Verb
	Table, Chain string
	Rule         Rule
	// Place counts from 1, for Insert only.
	Place int
}

// String returns the operation as a line for iptables-restore --noflush.
func (o Operation) String() string {
	switch o.Verb {
	case EmptyChain:
		return fmt.Sprintf(":%s %s [0:0]", o.Chain, NoPolicy)
	case Insert:
		return strings.TrimSuffix(fmt.Sprintf("-I %s %d %s", o.Chain, o.Place, o.Rule), " ")
	case Delete:
		return "-D" + strings.TrimPrefix(o.Rule.appendTo(o.Chain), "-A")
	case RemoveChain:
		return "-X " + o.Chain
	case Append:
	}
	return o.Rule.appendTo(o.Chain)
}

// Program brings a family of a namespace to a wanted state. The operations of a table are adjacent: iptables-restore
// runs them as one transaction. The zero Program does nothing.
type Program struct {
	Family     Family
	Operations []Operation
}

// String returns the exact input for iptables-restore --noflush.
func (p Program) String() string {
	var b strings.Builder
	for i, o := range p.Operations {
		if i == 0 || p.Operations[i-1].Table != o.Table {
			b.WriteString("*" + o.Table + "\n")
		}
		b.WriteString(o.String() + "\n")
		if i+1 == len(p.Operations) || p.Operations[i+1].Table != o.Table {
			b.WriteString("COMMIT\n")
		}
	}
	return b.String()
}

// Empty reports whether the Program has no operations.
func (p Program) Empty() bool { return len(p.Operations) == 0 }

// Reconcile returns the program that turns have into want: it creates or refills our chains, puts our rules at the head of
// the built-in chains, and removes owned rules and chains that are not wanted. Foreign chains, rules and policies stay.
// The program has no operations for tables without a difference. An empty want removes all owned rules and chains.
func Reconcile(want, have Set, owned Ownership) Program {
	diff := Compare(want, have, owned)
	p := Program{Family: want.Family}
	for _, name := range tableNames(want, have) {
		if slices.ContainsFunc(diff.Chains, func(c ChainDiff) bool { return c.Table == name }) {
			p.rebuild(want.Table(name), have.Table(name), owned)
		}
	}
	return p
}

func (p *Program) add(verb Verb, table, chain string, rules ...Rule) {
	for i, r := range rules {
		p.Operations = append(p.Operations, Operation{Verb: verb, Table: table, Chain: chain, Rule: r, Place: i + 1})
	}
}

func (p *Program) addChain(verb Verb, table, chain string) {
	p.Operations = append(p.Operations, Operation{Verb: verb, Table: table, Chain: chain})
}

// rebuild writes one table. It declares our chains first, which creates or empties them, and fills them before it adds a
// jump to them; it removes leftover chains last, when no rule jumps to them any more. It never declares a built-in chain:
// that would set the policy.
func (p *Program) rebuild(want, have Table, owned Ownership) {
	own := slices.DeleteFunc(slices.Clone(want.Chains), func(c Chain) bool { return Builtin(want.Name, c.Name) })
	stale := leftover(want, have, owned)
	for _, c := range slices.Concat(own, stale) {
		p.addChain(EmptyChain, want.Name, c.Name)
	}
	for _, c := range own {
		p.add(Append, want.Name, c.Name, c.Rules...)
	}
	for _, c := range have.Chains {
		if _, wanted := want.Chain(c.Name); !ours(have.Name, c.Name, wanted, owned) {
			p.replaceOwn(want, c, owned)
		}
	}
	for _, c := range want.Chains {
		if _, there := have.Chain(c.Name); !there && Builtin(want.Name, c.Name) {
			p.add(Append, want.Name, c.Name, c.Rules...)
		}
	}
	for _, c := range stale {
		p.addChain(RemoveChain, want.Name, c.Name)
	}
}

// leftover returns the present chains that we own and do not want.
func leftover(want, have Table, owned Ownership) []Chain {
	return slices.DeleteFunc(slices.Clone(have.Chains), func(c Chain) bool {
		_, wanted := want.Chain(c.Name)
		return wanted || !owned.OwnsChain(have.Name, c.Name)
	})
}

// replaceOwn replaces our rules in a foreign chain.
func (p *Program) replaceOwn(want Table, have Chain, owned Ownership) {
	wanted, _ := want.Chain(have.Name)
	var own []Rule
	for i, r := range have.Rules {
		if owned.OwnsRule(want.Name, have.Name, i) {
			own = append(own, r)
		}
	}
	if slices.EqualFunc(own, wanted.Rules, Rule.Equal) && ownEnd(want.Name, have, owned) == len(own) {
		return
	}
	p.add(Delete, want.Name, have.Name, own...)
	if len(own) == len(have.Rules) {
		p.add(Append, want.Name, have.Name, wanted.Rules...)
	} else {
		p.add(Insert, want.Name, have.Name, wanted.Rules...)
	}
}
