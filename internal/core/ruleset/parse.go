package ruleset

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Parse parses the output of iptables-save or ip6tables-save. It drops comment lines and counters and puts tables and
// chains into canonical order, so Parse(f, s.String()) equals s. An error names the line and its problem; a text that ends
// inside a table is an error, so a truncated text never yields a smaller Set.
func Parse(family Family, text string) (Set, error) {
	p := parser{}
	n := 0
	open := "" // the first lines of a rule with a comment of several lines
	for line := range strings.SplitSeq(text, "\n") {
		n++
		line = open + line
		if _, inside := words(line); inside && p.table != nil {
			open = line + "\n"
			continue
		}
		open = ""
		if err := p.line(strings.TrimRight(line, " \t\r")); err != nil {
			return Set{}, fmt.Errorf("parsing %s rules, line %d %s: %w", family, n, printable.Quote(line, maxShown), err)
		}
	}
	if p.table != nil {
		return Set{}, fmt.Errorf("parsing %s rules: table %q has no COMMIT: the text is cut off", family, p.table.Name)
	}
	return New(family, p.tables...), nil
}

// maxShown keeps an error readable when the input is garbage.
const maxShown = 200

type parser struct {
	tables []Table
	table  *Table // the open table
	// chains has the index of each chain by name: a table may have very many.
	chains map[string]int
}

func (p *parser) line(line string) error {
	switch {
	case line == "", line[0] == '#' && p.table == nil:
		return nil
	case line[0] == '*':
		return p.open(line[1:])
	case p.table == nil:
		return fmt.Errorf("is outside any table")
	case line == "COMMIT":
		p.tables = append(p.tables, *p.table)
		p.table = nil
		return nil
	case line[0] == ':':
		return p.chain(line[1:])
	}
	if first, rest, ok := strings.Cut(line, " "); ok && counters(first) {
		line = rest
	}
	if rest, ok := strings.CutPrefix(line, "-A "); ok {
		return p.rule(rest)
	}
	return fmt.Errorf("is not *TABLE, :CHAIN, -A or COMMIT")
}

func (p *parser) open(name string) error {
	if p.table != nil {
		return fmt.Errorf("table %q is still open", p.table.Name)
	}
	if !word(name) {
		return fmt.Errorf("has no table name")
	}
	if slices.ContainsFunc(p.tables, func(t Table) bool { return t.Name == name }) {
		return fmt.Errorf("table %q is declared twice", name)
	}
	p.table, p.chains = &Table{Name: name}, map[string]int{}
	return nil
}

func (p *parser) chain(text string) error {
	f := strings.Split(text, " ")
	if len(f) == 3 && counters(f[2]) {
		f = f[:2]
	}
	if len(f) != 2 || !word(f[0]) || !word(f[1]) {
		return fmt.Errorf("want :CHAIN POLICY [packets:bytes]")
	}
	if _, twice := p.chains[f[0]]; twice {
		return fmt.Errorf("chain %q is declared twice", f[0])
	}
	if Builtin(p.table.Name, f[0]) == (f[1] == NoPolicy) {
		return fmt.Errorf("policy %q does not fit chain %q", f[1], f[0])
	}
	p.chains[f[0]] = len(p.table.Chains)
	p.table.Chains = append(p.table.Chains, Chain{Name: f[0], Policy: f[1]})
	return nil
}

func (p *parser) rule(text string) error {
	name, spec, _ := strings.Cut(text, " ")
	i, declared := p.chains[name]
	if !declared {
		return fmt.Errorf("chain %q is not declared", name)
	}
	c := &p.table.Chains[i]
	c.Rules = append(c.Rules, Read(strings.TrimLeft(spec, " ")))
	return nil
}

// counters reports whether the text is iptables-save's packet and byte counters, like [3:180]: always behind a chain, and
// before a rule with -c.
func counters(s string) bool {
	inner, opened := strings.CutPrefix(s, "[")
	inner, closed := strings.CutSuffix(inner, "]")
	packets, size, two := strings.Cut(inner, ":")
	return opened && closed && two && number(packets) && number(size)
}

func number(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// word reports whether the text can be a name: iptables allows no white space in names.
func word(s string) bool { return s != "" && !strings.ContainsAny(s, " \t\r\n") }
