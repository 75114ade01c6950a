// Package decode reads the rules of nf_tables: those of iptables-nft, of the native tables, and of any other program.
//
// It promises that a rule never means less than its expressions: what it does not know is a ruleset.Other, a match of which is not known
// whether it holds, or a target of which is not known what it does. Two rules have the same text only if packets pass them alike,
// except for parts that are not known, which have the rule's handle in their text. It uses no socket, no file and no process.
//
// Start at Table.Rule; compare.go has the matches, act.go the targets, set.go the sets.
package decode

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// Table is what the rules of a table refer to.
type Table struct {
	// Family is that of the packets, Inet where rules see both.
	Family ruleset.Family
	// IPTables reports whether the rules have the text of iptables-save, where that can express them; otherwise they have nft's.
	IPTables bool
	// Sets are those of the table by name; one that is looked up and missing is nil behind that. Links returns the name of an interface by its index.
	Sets  map[string]*Set
	Links func(index uint32) (string, error)
	// Expanded counts the elements of sets in the rules; nil sets no bound.
	Expanded *int
}

// Rule returns the rule of the attributes NFTA_RULE_EXPRESSIONS and NFTA_RULE_USERDATA. The handle is the kernel's number of the rule.
func (t Table) Rule(handle uint64, expressions nfnetlink.Attributes, userdata []byte) ruleset.Rule {
	d := decoder{table: t, handle: handle, family: t.Family, registers: map[uint32]*load{}}
	for e := range expressions.All() {
		name, f, ok := nfnetlink.SplitExpression(e)
		if !ok {
			d.target(d.other("a broken expression"))
			break
		}
		d.expression(Name(name), f)
	}
	if expressions.Check() != nil {
		d.target(d.other("broken expressions"))
	}
	var noted []ruleset.Match
	for comment := range comments(userdata) {
		noted = append(noted, ruleset.Comment{Text: comment})
	}
	return d.rule(noted)
}

// Name returns a name of the kernel's, which may be of any bytes, as one word of plain characters. Different names have different words.
func Name(name string) string {
	odd := func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' || r == '"' }
	if strings.IndexFunc(name, odd) < 0 {
		return name
	}
	quoted := strconv.QuoteToASCII(name)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], " ", `\x20`)
}

// comments yields the comments that nft keeps beside a rule: records of type, length and value, of which type 0 is a comment.
func comments(userdata []byte) func(func(string) bool) {
	return func(yield func(string) bool) {
		for len(userdata) >= 2 {
			end := min(2+int(userdata[1]), len(userdata))
			if userdata[0] == 0 && !yield(nfnetlink.Attribute{Value: userdata[2:end]}.Text()) {
				return
			}
			userdata = userdata[end:]
		}
	}
}

// part is a match or a target, in the order of evaluation.
type part struct {
	match  ruleset.Match
	target ruleset.Target
}

// decoder reads expressions in the order in which the kernel evaluates them.
type decoder struct {
	table  Table
	handle uint64
	// family and protocol are those that were compared.
	family   ruleset.Family
	protocol uint8
	// registers have what was loaded, by the number of 4 bytes.
	registers map[uint32]*load
	parts     []part
	// nft reports whether iptables writes no such rule.
	nft bool
}

func (d *decoder) match(m ruleset.Match) { d.parts = append(d.parts, part{match: m}) }

func (d *decoder) target(t ruleset.Target) { d.parts = append(d.parts, part{target: t}) }

// other is a part that is not known.
func (d *decoder) other(what string) ruleset.Other {
	d.nft = true
	return ruleset.Other{Text: fmt.Sprintf("[%s, see rule handle %d]", what, d.handle)}
}

// expression decodes one expression.
func (d *decoder) expression(name string, f nfnetlink.Fields) {
	switch name {
	case "counter":
		d.match(ruleset.Counter{})
	case "meta", "ct":
		d.metadata(name, f)
	case "payload":
		d.payload(f)
	case "immediate":
		d.immediate(f)
	case "bitwise":
		d.bitwise(f)
	case "byteorder":
		d.byteorder(f)
	case "cmp":
		d.comparison(f)
	case "range":
		d.between(f)
	case "lookup":
		d.lookup(f)
	case "fib":
		d.fib(f)
	case "match":
		d.match(xtables.Read(name, d.family, d.protocol, &f, d.handle))
	case "target":
		d.target(xtables.Read(name, d.family, d.protocol, &f, d.handle))
	default:
		d.act(name, f)
	}
}

// rule joins the parts. Matches behind a target are those of a rule within it.
func (d *decoder) rule(noted []ruleset.Match) ruleset.Rule {
	matches, target := d.join(d.parts)
	matches = append(matches, noted...)
	if !d.table.IPTables || d.nft {
		listing := make([]ruleset.Match, len(d.parts))
		for i, p := range d.parts {
			if listing[i] = p.match; p.target != nil {
				listing[i] = p.target
			}
		}
		return ruleset.Listed(matches, target, append(listing, noted...))
	}
	matches = slices.DeleteFunc(matches, func(m ruleset.Match) bool { return m == ruleset.Match(ruleset.Counter{}) })
	return ruleset.IPTables("", target, matches...)
}

// join returns the matches ahead of the first target, and the targets with what is behind it.
func (d *decoder) join(parts []part) (matches []ruleset.Match, target ruleset.Target) {
	for i, p := range parts {
		if p.target == nil {
			matches = append(matches, p.match)
			continue
		}
		on, behind := d.join(parts[i+1:])
		switch {
		case behind == nil:
			return matches, p.target
		case len(conditions(on)) > 0:
			behind = ruleset.VerdictMap{List: []ruleset.VerdictOf{{Matches: on, Target: behind}}}
		}
		if all, several := behind.(ruleset.Then); several {
			return matches, append(ruleset.Then{p.target}, all...)
		}
		return matches, ruleset.Then{p.target, behind}
	}
	return matches, nil
}

// conditions are the matches that can fail.
func conditions(matches []ruleset.Match) []ruleset.Match {
	return slices.DeleteFunc(slices.Clone(matches), func(m ruleset.Match) bool {
		switch m.(type) {
		case ruleset.Counter, ruleset.Comment, ruleset.Neutral:
			return true
		}
		return false
	})
}
