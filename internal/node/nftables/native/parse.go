package native

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
)

// parse takes a rule apart.
func parse(spec string) ([]term, error) {
	if !expression.Printable(spec) {
		return nil, fmt.Errorf("rule %q: it has characters that no rule has", spec)
	}
	w := &words{list: strings.Fields(spec)}
	var terms []term
	for len(w.list) > 0 && w.err == nil {
		terms = append(terms, w.term())
	}
	if w.err != nil {
		return nil, w.err
	}
	if got := text(terms); got != spec {
		return nil, fmt.Errorf("it is not spelled as nft lists it, which is %q", got)
	}
	return terms, nil
}

func text(terms []term) string {
	parts := make([]string, len(terms))
	for i, t := range terms {
		parts[i] = t.String()
	}
	return strings.Join(parts, " ")
}

// words are those of a rule, read from left to right. The first error stays; what is read behind it is empty.
type words struct {
	list []string
	err  error
}

func (w *words) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *words) next() string {
	if len(w.list) == 0 || w.err != nil {
		w.fail(errors.New("the rule ends too early"))
		return ""
	}
	word := w.list[0]
	w.list = w.list[1:]
	return word
}

// take reads the words if they come next.
func (w *words) take(phrase ...string) bool {
	if w.err != nil || len(w.list) < len(phrase) {
		return false
	}
	for i, p := range phrase {
		if w.list[i] != p {
			return false
		}
	}
	w.list = w.list[len(phrase):]
	return true
}

func (w *words) unknown(word string) term {
	w.fail(fmt.Errorf("nothing is known of %q", word))
	return nil
}

// number reads a number of at most so many bits, decimal or with 0x.
func (w *words) number(text string, bits int) uint32 {
	digits, base := text, 10
	if rest, ok := strings.CutPrefix(text, "0x"); ok {
		digits, base = rest, 16
	}
	n, err := strconv.ParseUint(digits, base, bits)
	if err != nil {
		w.fail(fmt.Errorf("reading %q as a number of %d bits: %w", text, bits, errors.Unwrap(err)))
	}
	return uint32(n) //nolint:gosec // at most 32 bits
}

func (w *words) port(text string) uint16 { return uint16(w.number(text, 16)) } //nolint:gosec // 16 bits

// term reads the next one.
func (w *words) term() term {
	switch word := w.next(); word {
	case "iifname":
		return w.link(unix.NFT_META_IIFNAME)
	case "oifname":
		return w.link(unix.NFT_META_OIFNAME)
	case "meta", "ct":
		return w.about(word + " " + w.next())
	case "ip", "ip6":
		return w.address(word == "ip6")
	case "tcp", "udp":
		return w.ports(protocolNumber(word))
	default:
		return w.statement(word)
	}
}

func (w *words) link(key uint32) term {
	name, ok := strings.CutPrefix(w.next(), `"`)
	name, ok2 := strings.CutSuffix(name, `"`)
	if !ok || !ok2 || name == "" || len(name) >= linkLength {
		w.fail(fmt.Errorf("%q can be no interface: want 1 to %d characters in quotes", name, linkLength-1))
		return nil
	}
	return linkTerm{key, name}
}

func protocolNumber(name string) uint8 {
	for _, p := range protocols {
		if p.name == name {
			return p.number
		}
	}
	return 0
}

// about reads what begins with meta or ct.
func (w *words) about(name string) term {
	switch name {
	case "meta l4proto":
		word := w.next()
		if protocolNumber(word) == 0 {
			return w.unknown(word)
		}
		return protocolTerm{protocolNumber(word)}
	case "meta nfproto":
		word := w.next()
		if word != "ipv4" && word != "ipv6" {
			return w.unknown(word)
		}
		return familyTerm{word == "ipv6"}
	case "ct state":
		return w.state()
	}
	if w.take("set") {
		return w.set(name)
	}
	for _, n := range numbers {
		if n.name == name {
			return numberTerm{name, w.take("!="), w.number(w.next(), 32)}
		}
	}
	return w.unknown(name)
}

func (w *words) set(name string) term {
	for _, from := range []string{"meta mark", "ct mark"} {
		if name != "ct zone" && name != from && w.take(strings.Fields(from)...) {
			return setTerm{name: name, from: from}
		}
	}
	switch name {
	case "ct zone":
		return setTerm{name: name, value: w.number(w.next(), 16)}
	case "meta mark":
		return setTerm{name: name, value: w.number(w.next(), 32)}
	}
	return w.unknown(name + " set")
}

func (w *words) address(ipv6 bool) term {
	side := w.next()
	a := addressTerm{source: side == "saddr", negated: w.take("!=")}
	word := w.next()
	prefix, err := netip.ParsePrefix(word)
	if !strings.Contains(word, "/") {
		var single netip.Addr
		single, err = netip.ParseAddr(word)
		prefix = netip.PrefixFrom(single, single.BitLen())
	}
	switch {
	case side != "saddr" && side != "daddr":
		return w.unknown(side)
	case err != nil:
		w.fail(fmt.Errorf("reading network %q: %w", word, err))
	case prefix.Addr().Is6() != ipv6:
		w.fail(fmt.Errorf("network %q is of the other family", word))
	}
	a.prefix = prefix
	return a
}

func (w *words) ports(protocol uint8) term {
	side := w.next()
	if side == "flags" && protocol == tcp && w.take("&", "rst", "==", "rst") {
		return resetTerm{}
	}
	if side != "sport" && side != "dport" {
		return w.unknown(side)
	}
	p := portTerm{protocol: protocol, source: side == "sport", negated: w.take("!=")}
	if !w.take("{") {
		p.ports = []uint16{w.port(w.next())}
		return p
	}
	p.set = true
	for w.err == nil && !w.take("}") {
		p.ports = append(p.ports, w.port(strings.TrimSuffix(w.next(), ",")))
	}
	if len(p.ports) == 0 {
		w.fail(errors.New("a set without ports matches nothing"))
		return nil
	}
	return p
}

func (w *words) state() term {
	s := stateTerm{}
	for name := range strings.SplitSeq(w.next(), ",") {
		before := s.bits
		for _, state := range states {
			if state.name == name {
				s.bits |= state.bit
			}
		}
		if s.bits == before {
			return w.unknown("connection state " + name)
		}
	}
	return s
}

// statement reads what a rule does.
func (w *words) statement(word string) term {
	switch word {
	case "counter":
		return counterTerm{}
	case "return":
		return verdictTerm{Code: expression.Return}
	case "accept":
		return verdictTerm{Code: expression.Accept}
	case "drop":
		return verdictTerm{Code: expression.Drop}
	case "jump":
		return verdictTerm{Code: expression.Jump, Chain: w.next()}
	case "goto":
		return verdictTerm{Code: expression.Goto, Chain: w.next()}
	case "redirect":
		return redirectTerm{w.target()}
	case "tproxy":
		family := w.next()
		if family != "ip" && family != "ip6" {
			return w.unknown(family)
		}
		return tproxyTerm{family == "ip6", w.target()}
	}
	for _, r := range rejections {
		if rest := strings.Fields(r.text); word == rest[0] && w.take(rest[1:]...) {
			return r.term
		}
	}
	return w.unknown(word)
}

// target reads "to :PORT".
func (w *words) target() uint16 {
	if !w.take("to") {
		w.unknown(w.next())
	}
	return w.port(strings.TrimPrefix(w.next(), ":"))
}
