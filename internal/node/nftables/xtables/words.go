package xtables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
)

// words are those of a rule's text, read from left to right. The first error stays; what is read behind it is empty.
type words struct {
	list []string
	err  error
}

func (w *words) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// more reports whether there is anything left to read.
func (w *words) more() bool { return w.err == nil && len(w.list) > 0 }

func (w *words) next() string {
	if !w.more() {
		w.fail("the rule ends too early")
		return ""
	}
	word := w.list[0]
	w.list = w.list[1:]
	return word
}

// take reads the word if it comes next.
func (w *words) take(word string) bool {
	if !w.more() || w.list[0] != word {
		return false
	}
	w.list = w.list[1:]
	return true
}

// option reads one of the options if it comes next, with a "!" before it. It gives "" if none does.
func (w *words) option(names ...string) (name string, negated bool) {
	rest := w.list
	if w.more() && rest[0] == "!" {
		rest, negated = rest[1:], true
	}
	if w.err != nil || len(rest) == 0 || !slices.Contains(names, rest[0]) {
		return "", false
	}
	w.list = rest[1:]
	return rest[0], negated
}

// number reads a number of at most so many bits, decimal or with 0x.
func (w *words) number(bits int) uint64 {
	word := w.next()
	return w.parseNumber(word, bits)
}

func (w *words) parseNumber(word string, bits int) uint64 {
	digits, base := word, 10
	if rest, ok := strings.CutPrefix(word, "0x"); ok {
		digits, base = rest, 16
	}
	n, err := strconv.ParseUint(digits, base, bits)
	if err != nil && w.err == nil {
		w.fail("reading %q as a number of %d bits: %w", word, bits, errors.Unwrap(err))
	}
	return n
}

func (w *words) uint16() uint16 { return uint16(w.number(16)) } //nolint:gosec // number keeps to the bits

func (w *words) uint32() uint32 { return uint32(w.number(32)) } //nolint:gosec // number keeps to the bits

// masked reads VALUE or VALUE/MASK.
func (w *words) masked() (value, mask uint32) {
	text, maskText, ok := strings.Cut(w.next(), "/")
	if !ok {
		maskText = "0xffffffff"
	}
	//nolint:gosec // parseNumber keeps to the bits
	return uint32(w.parseNumber(text, 32)), uint32(w.parseNumber(maskText, 32))
}

// span reads PORT or FIRST and LAST with the separator between them.
func (w *words) span(word, separator string) span {
	first, last, ok := strings.Cut(word, separator)
	if !ok {
		last = first
	}
	//nolint:gosec // parseNumber keeps to the bits
	return span{uint16(w.parseNumber(first, 16)), uint16(w.parseNumber(last, 16))}
}

func (w *words) network(f ruleset.Family, negated bool) network {
	word := w.next()
	p, err := netip.ParsePrefix(word)
	switch {
	case w.err != nil:
	case err != nil:
		w.fail("reading network %q: %w", word, err)
	case p.Addr().Is4() != (f == ruleset.IPv4):
		w.fail("network %q is not one of %s", word, f)
	case p != p.Masked():
		w.fail("network %q has bits behind its prefix", word)
	}
	return network{p, negated}
}

// maxLink is the longest name that a network interface can have (IFNAMSIZ less the zero byte).
const maxLink = 15

func (w *words) link(negated bool) link {
	name := w.next()
	if w.err == nil && (name == "" || name == "+" || len(name) > maxLink) {
		w.fail("%q can be no interface: want 1 to %d characters, and not + alone", name, maxLink)
	}
	return link{name, negated}
}

func (w *words) protocol(negated bool) protocol {
	word := w.next()
	for number, name := range protocols {
		if name == word {
			return protocol{number, true, negated}
		}
	}
	return protocol{uint8(w.parseNumber(word, 8)), true, negated} //nolint:gosec // parseNumber keeps to the bits
}

// parse takes a rule apart. It must be spelled as iptables-save prints it.
func parse(f ruleset.Family, spec string) (rule, error) {
	r := rule{family: f}
	w := &words{list: strings.Fields(spec)}
	for w.more() {
		w.part(&r)
	}
	switch {
	case w.err != nil:
		return rule{}, w.err
	case r.String() != spec:
		return rule{}, fmt.Errorf("it is not spelled as iptables-save prints it, which is %q", r.String())
	}
	return r, nil
}

// part reads the next part of a rule.
func (w *words) part(r *rule) {
	if w.take("-m") {
		r.matches = append(r.matches, w.match(*r))
		return
	}
	option, negated := w.option("-s", "-d", "-i", "-o", "-p", "-j", "-g")
	switch option {
	case "-s":
		r.source = w.network(r.family, negated)
	case "-d":
		r.destination = w.network(r.family, negated)
	case "-i":
		r.in = w.link(negated)
	case "-o":
		r.out = w.link(negated)
	case "-p":
		r.protocol = w.protocol(negated)
	case "-j":
		r.target = w.target(r.family)
	case "-g":
		r.target = w.jump(expression.Goto, w.next())
	default:
		w.fail("nothing is known of %q", w.next())
	}
	if r.target != nil && w.more() {
		w.fail("nothing is known of %q behind the target", w.next())
	}
}

// match reads what stands behind -m.
func (w *words) match(r rule) match {
	switch name := w.next(); name {
	case "tcp":
		return w.ports(tcp, r.protocol)
	case "udp":
		return w.ports(udp, r.protocol)
	case "multiport":
		return w.multiport()
	case "owner":
		return w.owner()
	case "mark", "connmark":
		return w.mark(name)
	case "conntrack":
		return w.conntrack()
	default:
		w.fail("nothing is known of match %q", name)
		return nil
	}
}

// target reads what stands behind -j.
func (w *words) target(f ruleset.Family) target {
	switch name := w.next(); name {
	case "REDIRECT":
		return w.redirect(f)
	case "MARK":
		return w.setMark()
	case "CONNMARK":
		return w.setConnmark()
	case "TPROXY":
		return w.tproxy(f)
	case "CT":
		return w.ct()
	case "REJECT":
		return w.reject(f)
	case "ACCEPT", "DROP", "RETURN":
		code, _ := verdictCode(name)
		return verdict{Code: code}
	default:
		return w.jump(expression.Jump, name)
	}
}

// jump leads to a chain.
func (w *words) jump(code int32, name string) target {
	if w.err == nil && !chainName(name) {
		w.fail("%q can be no chain, or is a target that nothing is known of", name)
	}
	return verdict{Code: code, Chain: name}
}
