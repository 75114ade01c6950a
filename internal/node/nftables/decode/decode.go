// Package decode reads the rules of nf_tables: rules of iptables-nft, of the native tables, and of any other program.
//
// It promises that a rule never means less than its expressions: an expression that it does not know becomes a ruleset.Other, as a match
// with an unknown result, or as a target with an unknown effect. Two rules have the same text only if packets pass them alike. Unknown
// parts have the rule's handle in their text. The package uses no socket, no file and no process.
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

// Table is the context of the rules of a table.
type Table struct {
	// Family is the family of the packets, Inet where rules see both IPv4 and IPv6.
	Family ruleset.Family
	// IPTables selects the text of iptables-save where it can express a rule. Otherwise rules have nft's text.
	IPTables bool
	// Sets has the table's sets by name; the decoder adds nil for a missing one. Links returns an interface's name by its index.
	Sets  map[string]*Set
	Links func(index uint32) (string, error)
	// Expanded counts the elements of sets in the rules; nil means no bound.
	Expanded *int
}

// Rule decodes the attributes NFTA_RULE_EXPRESSIONS and NFTA_RULE_USERDATA. The handle is the kernel's number of the rule.
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
	for comment := range Comments(userdata) {
		noted = append(noted, ruleset.Comment{Text: comment})
	}
	return d.rule(noted)
}

// Name returns one of the kernel's names, of any bytes, as one word of plain characters. Different names have different words.
func Name(name string) string {
	odd := func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' || r == '"' }
	if strings.IndexFunc(name, odd) < 0 {
		return name
	}
	quoted := strconv.QuoteToASCII(name)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], " ", `\x20`)
}

// Comments yields the comments that nft stores with a rule or an element of a set: records of type, length and value, where type 0 is a
// comment.
func Comments(userdata []byte) func(func(string) bool) {
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
	// family and protocol are the ones that the rule has compared so far.
	family   ruleset.Family
	protocol uint8
	// registers has the loaded values by the number of the 4-byte register.
	registers map[uint32]*load
	parts     []part
	// nft reports that iptables cannot write this rule.
	nft bool
}

func (d *decoder) match(m ruleset.Match) { d.parts = append(d.parts, part{match: m}) }

func (d *decoder) target(t ruleset.Target) { d.parts = append(d.parts, part{target: t}) }

// other returns a part for an unknown expression.
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

// rule joins the parts. Matches after a target form a nested rule.
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
	return ruleset.InOrder("", target, matches...)
}

// join returns the matches before the first target, and the targets with the parts after it.
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

// conditions returns the matches that can fail.
func conditions(matches []ruleset.Match) []ruleset.Match {
	return slices.DeleteFunc(slices.Clone(matches), func(m ruleset.Match) bool {
		switch m.(type) {
		case ruleset.Counter, ruleset.Comment, ruleset.Neutral, ruleset.Header:
			return true
		}
		return false
	})
}
