// Package rulesettest has Namespace, for tests: a model of "iptables-restore --noflush" running a ruleset.Program;
// and Set, which makes a ruleset.Set from lines, with its inverse Lines.
//
// It never touches the system, except the files of Golden. Start at Namespace.
package rulesettest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Set makes a Set of IPv4 from lines: "TABLE", "TABLE CHAIN:", "TABLE CHAIN POLICY", "TABLE CHAIN RULE" and "TABLE CHAIN RULE # REASON".
func Set(lines ...string) ruleset.Set {
	n := NewNamespace(ruleset.Set{Family: ruleset.IPv4})
	for _, line := range lines {
		name, text, _ := strings.Cut(line, " ")
		text, why, _ := strings.Cut(text, " # ")
		chain, rule, isRule := strings.Cut(text, " ")
		t := n.open(name)
		if n.tables[name] = t; text == "" {
			continue
		}
		switch c := t.add(strings.TrimSuffix(chain, ":")); {
		case rule == "ACCEPT" || rule == "DROP":
			c.Policy = rule
		case isRule:
			c.Rules = append(c.Rules, ruleset.Read(rule))
			c.Rules[len(c.Rules)-1].Why = why
		}
	}
	return n.Save()
}

// Lines prints a Set as lines for Set, without empty built-in chains of policy ACCEPT and without the owned part. A
// policy DROP is the line "TABLE CHAIN DROP".
func Lines(s ruleset.Set, owned ruleset.Ownership) []string {
	var out []string
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			switch {
			case owned.OwnsChain(t.Name, c.Name):
			case c.Policy == ruleset.NoPolicy:
				out = append(out, t.Name+" "+c.Name+":")
			case c.Policy != "ACCEPT":
				out = append(out, t.Name+" "+c.Name+" "+c.Policy)
			}
		}
		for _, c := range t.Chains {
			for i, r := range c.Rules {
				if !owned.OwnsRule(t.Name, c.Name, i) {
					out = append(out, t.Name+" "+c.Name+" "+r.String())
				}
			}
		}
	}
	return out
}

// Rules returns all rules of Sets.
func Rules(sets ...ruleset.Set) []ruleset.Rule {
	var out []ruleset.Rule
	for _, s := range sets {
		for _, t := range s.Tables {
			for _, c := range t.Chains {
				out = append(out, c.Rules...)
			}
		}
	}
	return out
}

// Namespace is one family of a network namespace as iptables-restore and iptables-save see it. It is as strict as the
// tools: a chain must be declared before a rule or a jump names it, a rule to delete must exist, a chain to
// delete must be empty and not a jump target, and a table changes as a whole or not at all.
type Namespace struct {
	family ruleset.Family
	tables map[string]*table
}

type table ruleset.Table

// NewNamespace returns a Namespace with the rules of a Set.
func NewNamespace(have ruleset.Set) *Namespace {
	n := &Namespace{family: have.Family, tables: map[string]*table{}}
	for _, t := range have.Tables {
		n.tables[t.Name] = (*table)(&t)
	}
	return n
}

// Save returns the present rules, as Parse does for the output of iptables-save.
func (n *Namespace) Save() ruleset.Set {
	var tables []ruleset.Table
	for name := range n.tables {
		tables = append(tables, ruleset.Table(*n.open(name)))
	}
	return ruleset.New(n.family, tables...)
}

// Add works like "iptables-restore --noflush" with the text of a Set: it sets policies, makes or empties user-defined
// chains, and appends rules.
func (n *Namespace) Add(s ruleset.Set) error {
	for _, from := range s.Tables {
		t := n.open(from.Name)
		for _, c := range from.Chains {
			own := t.add(c.Name)
			if own.Policy = c.Policy; c.Policy == ruleset.NoPolicy {
				own.Rules = nil
			}
		}
		for _, c := range from.Chains {
			for _, r := range c.Rules {
				if err := t.operation(ruleset.Operation{Verb: ruleset.Append, Chain: c.Name, Rule: r}); err != nil {
					return err
				}
			}
		}
		n.tables[from.Name] = t
	}
	return nil
}

// Apply works like "iptables-restore --noflush" with a Program. On an error the tables before the bad one have
// changed, as with the real tool.
func (n *Namespace) Apply(p ruleset.Program) error {
	for ops := p.Operations; len(ops) > 0; {
		name, t := ops[0].Table, n.open(ops[0].Table)
		for len(ops) > 0 && ops[0].Table == name {
			if err := t.operation(ops[0]); err != nil {
				return fmt.Errorf("restoring %q: %w", ops[0], err)
			}
			ops = ops[1:]
		}
		n.tables[name] = t
	}
	return nil
}

// open returns a working copy. A new table begins with its built-in chains.
func (n *Namespace) open(name string) *table {
	have, there := n.tables[name]
	if !there {
		return (*table)(&ruleset.New(n.family, ruleset.Table{Name: name}).Tables[0])
	}
	t := &table{Name: name, Chains: slices.Clone(have.Chains)}
	for i, c := range t.Chains {
		t.Chains[i].Rules = slices.Clone(c.Rules)
	}
	return t
}

func (t *table) chain(name string) *ruleset.Chain {
	for i := range t.Chains {
		if t.Chains[i].Name == name {
			return &t.Chains[i]
		}
	}
	return nil
}

// add returns the chain of that name, and makes it if missing.
func (t *table) add(name string) *ruleset.Chain {
	if c := t.chain(name); c != nil {
		return c
	}
	t.Chains = append(t.Chains, ruleset.Chain{Name: name, Policy: ruleset.NoPolicy})
	return &t.Chains[len(t.Chains)-1]
}

func (t *table) operation(o ruleset.Operation) error {
	c := t.chain(o.Chain)
	switch {
	case o.Verb == ruleset.EmptyChain && ruleset.Builtin(t.Name, o.Chain):
		return fmt.Errorf("chain %q is built in", o.Chain)
	case o.Verb == ruleset.EmptyChain && c == nil:
		t.add(o.Chain)
		return nil
	case c == nil:
		return fmt.Errorf("chain %q does not exist", o.Chain)
	}
	switch o.Verb {
	case ruleset.EmptyChain:
		c.Rules = nil
	case ruleset.Append:
		return t.insert(c, len(c.Rules)+1, o.Rule)
	case ruleset.Insert:
		return t.insert(c, o.Place, o.Rule)
	case ruleset.Delete:
		at := slices.IndexFunc(c.Rules, o.Rule.Equal)
		if at < 0 {
			return fmt.Errorf("chain %q has no such rule", o.Chain)
		}
		c.Rules = slices.Delete(c.Rules, at, at+1)
	case ruleset.RemoveChain:
		return t.remove(c)
	}
	return nil
}

func (t *table) insert(c *ruleset.Chain, place int, r ruleset.Rule) error {
	if place < 1 || place > len(c.Rules)+1 {
		return fmt.Errorf("chain %q has %d rules, so nothing can be inserted at %d", c.Name, len(c.Rules), place)
	}
	if to, jumps := r.Target.(ruleset.Jump); jumps && t.chain(to.Chain) == nil {
		return fmt.Errorf("chain %q does not exist", to.Chain)
	}
	c.Rules = slices.Insert(c.Rules, place-1, r)
	return nil
}

func (t *table) remove(c *ruleset.Chain) error {
	if ruleset.Builtin(t.Name, c.Name) || len(c.Rules) > 0 {
		return fmt.Errorf("chain %q is built in or not empty", c.Name)
	}
	jumps := func(r ruleset.Rule) bool { to, is := r.Target.(ruleset.Jump); return is && to.Chain == c.Name }
	if slices.ContainsFunc(t.Chains, func(other ruleset.Chain) bool { return slices.ContainsFunc(other.Rules, jumps) }) {
		return fmt.Errorf("chain %q is still jumped to", c.Name)
	}
	name := c.Name
	t.Chains = slices.DeleteFunc(t.Chains, func(c ruleset.Chain) bool { return c.Name == name })
	return nil
}
