package rulesettest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Namespace is one family of a network namespace as iptables-restore and iptables-save see it. It is strict where the
// tools are: a chain must be declared before a rule or a jump names it, a rule to delete must be there, a chain to
// delete must be empty and not jumped to, and a table changes as a whole or not at all.
type Namespace struct {
	family ruleset.Family
	tables map[string]*table
}

type table struct {
	name   string
	chains []ruleset.Chain
}

// NewNamespace makes one that holds the rules of a Set.
func NewNamespace(have ruleset.Set) *Namespace {
	n := &Namespace{family: have.Family, tables: map[string]*table{}}
	for _, t := range have.Tables {
		n.tables[t.Name] = (&table{t.Name, t.Chains}).clone()
	}
	return n
}

// Save gives what is there, as Parse would give it for the output of iptables-save.
func (n *Namespace) Save() ruleset.Set {
	var tables []ruleset.Table
	for _, t := range n.tables {
		tables = append(tables, ruleset.Table{Name: t.name, Chains: t.clone().chains})
	}
	return ruleset.New(n.family, tables...)
}

// Restore does what "iptables-restore --noflush" does with the text. On an error the tables before the bad one have
// changed, as with the real tool.
func (n *Namespace) Restore(text string) error {
	var open *table
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		var err error
		switch {
		case text == "" || strings.HasPrefix(line, "#"):
		case open == nil && strings.HasPrefix(line, "*"):
			open = n.open(line[1:])
		case open == nil:
			err = fmt.Errorf("stands outside any table")
		case line == "COMMIT":
			n.tables[open.name], open = open, nil
		default:
			err = open.line(line)
		}
		if err != nil {
			return fmt.Errorf("restoring, line %d %q: %w", i+1, line, err)
		}
	}
	if open != nil {
		return fmt.Errorf("restoring: table %q has no COMMIT", open.name)
	}
	return nil
}

// open gives a copy to work on. A table that nobody used before begins with its built-in chains.
func (n *Namespace) open(name string) *table {
	if t, there := n.tables[name]; there {
		return t.clone()
	}
	return &table{name, ruleset.New(n.family, ruleset.Table{Name: name}).Tables[0].Chains}
}

func (t *table) clone() *table {
	c := &table{name: t.name, chains: slices.Clone(t.chains)}
	for i := range c.chains {
		c.chains[i].Rules = slices.Clone(c.chains[i].Rules)
		for j := range c.chains[i].Rules {
			c.chains[i].Rules[j].Why = ""
		}
	}
	return c
}

func (t *table) chain(name string) *ruleset.Chain {
	for i := range t.chains {
		if t.chains[i].Name == name {
			return &t.chains[i]
		}
	}
	return nil
}

func (t *table) line(line string) error {
	if strings.HasPrefix(line, ":") {
		return t.declare(line[1:])
	}
	verb, rest, _ := strings.Cut(line, " ")
	name, spec, _ := strings.Cut(rest, " ")
	c := t.chain(name)
	if c == nil {
		return fmt.Errorf("chain %q does not exist", name)
	}
	switch verb {
	case "-A":
		return t.insert(c, len(c.Rules), spec)
	case "-I":
		return t.insertAt(c, spec)
	case "-D":
		at := slices.IndexFunc(c.Rules, func(r ruleset.Rule) bool { return r.String() == spec })
		if at < 0 {
			return fmt.Errorf("chain %q has no such rule", name)
		}
		c.Rules = slices.Delete(c.Rules, at, at+1)
		return nil
	case "-X":
		return t.remove(c)
	}
	return fmt.Errorf("command %q is not known here", verb)
}

// declare makes a chain or, if it is there, empties it. Of a built-in chain it sets the policy.
func (t *table) declare(text string) error {
	f := strings.Split(text, " ")
	if len(f) != 3 || f[2] != "[0:0]" {
		return fmt.Errorf("want :CHAIN POLICY [0:0]")
	}
	name, policy := f[0], f[1]
	c := t.chain(name)
	switch {
	case ruleset.Builtin(t.name, name) == (policy == ruleset.NoPolicy):
		return fmt.Errorf("policy %q does not fit chain %q", policy, name)
	case c == nil:
		t.chains = append(t.chains, ruleset.Chain{Name: name, Policy: policy})
	case policy == ruleset.NoPolicy:
		c.Rules = nil
	default:
		c.Policy = policy
	}
	return nil
}

func (t *table) insertAt(c *ruleset.Chain, text string) error {
	number, spec, _ := strings.Cut(text, " ")
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > len(c.Rules)+1 {
		return fmt.Errorf("chain %q has %d rules, so nothing can be inserted at %q", c.Name, len(c.Rules), number)
	}
	return t.insert(c, n-1, spec)
}

func (t *table) insert(c *ruleset.Chain, at int, spec string) error {
	if to := jump(spec); to != "" && t.chain(to) == nil {
		return fmt.Errorf("chain %q does not exist", to)
	}
	c.Rules = slices.Insert(c.Rules, at, ruleset.Opaque(spec))
	return nil
}

func (t *table) remove(c *ruleset.Chain) error {
	if ruleset.Builtin(t.name, c.Name) || len(c.Rules) > 0 {
		return fmt.Errorf("chain %q is built in or not empty", c.Name)
	}
	for _, other := range t.chains {
		for _, r := range other.Rules {
			if jump(r.String()) == c.Name {
				return fmt.Errorf("chain %q is still jumped to from %q", c.Name, other.Name)
			}
		}
	}
	name := c.Name
	t.chains = slices.DeleteFunc(t.chains, func(c ruleset.Chain) bool { return c.Name == name })
	return nil
}

// extensions are the targets that are no chains: ours, and those that foreign rules in tests use.
var extensions = []string{ //nolint:gochecknoglobals // a constant table
	"ACCEPT", "DROP", "RETURN", "REJECT", "REDIRECT", "TPROXY", "MARK", "CONNMARK", "CT", "LOG", "DNAT", "SNAT", "MASQUERADE",
}

// jump gives the chain that a rule leads to, "" if none. A chain takes no options, so its name ends the rule; with a quote
// behind it the words are the end of a text.
func jump(spec string) string {
	f := strings.Fields(spec)
	if len(f) < 2 {
		return ""
	}
	verb, name := f[len(f)-2], f[len(f)-1]
	if verb != "-j" && verb != "-g" || strings.HasSuffix(name, `"`) || slices.Contains(extensions, name) {
		return ""
	}
	return name
}
