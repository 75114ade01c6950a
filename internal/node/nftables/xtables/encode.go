package xtables

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Encode adds the attributes NFTA_RULE_EXPRESSIONS and NFTA_RULE_COMPAT of a rule, given as iptables-save prints it,
// without "-A CHAIN". The error says what of it is not understood.
func Encode(b *nfnetlink.Buffer, f ruleset.Family, spec string) error {
	if !expression.Printable(spec) {
		return fmt.Errorf("rule %q: it has characters that no rule has", spec)
	}
	r, err := parse(f, spec)
	if err != nil {
		return err
	}
	e := &encoder{Writer: expression.Writer{Buffer: b}, family: f}
	b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() { e.rule(r) })
	e.compat(r.protocol)
	return e.err
}

// encoder adds the expressions of a rule. The first error stays.
type encoder struct {
	expression.Writer
	family ruleset.Family
	err    error
}

func (e *encoder) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// rule adds the expressions in the order of iptables-nft.
func (e *encoder) rule(r rule) {
	e.link(unix.NFT_META_IIFNAME, r.in)
	e.link(unix.NFT_META_OIFNAME, r.out)
	if r.protocol.set {
		e.Meta(unix.NFT_META_L4PROTO)
		e.Compare(r.protocol.negated, []byte{r.protocol.number})
	}
	source, destination, _ := expression.AddressOffsets(r.family == ruleset.IPv6)
	e.network(source, r.source)
	e.network(destination, r.destination)
	for _, m := range r.matches {
		m.encode(e)
	}
	e.Counter()
	if r.target != nil {
		r.target.encode(e)
	}
}

// compat tells matches and targets of x_tables the protocol, for which some of them insist on one.
func (e *encoder) compat(p protocol) {
	flags := uint32(0)
	if p.negated {
		flags = unix.NFT_RULE_COMPAT_F_INV
	}
	e.Nested(unix.NFTA_RULE_COMPAT, func() {
		e.Uint32(unix.NFTA_RULE_COMPAT_PROTO, uint32(p.number))
		e.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, flags)
	})
}

// link compares a name with its zero byte, or without one if the name is only a beginning.
func (e *encoder) link(key uint32, l link) {
	if l.name == "" {
		return
	}
	name, open := strings.CutSuffix(l.name, "+")
	value := []byte(name)
	if !open {
		value = append(value, 0)
	}
	e.Meta(key)
	e.Compare(l.negated, value)
}

func (e *encoder) network(offset uint32, n network) {
	if !n.prefix.IsValid() {
		return
	}
	if n.prefix.Bits() == 0 {
		e.fail("the kernel has no match for a network that is everything")
		return
	}
	e.Network(offset, n.negated, n.prefix)
}

// xt is a match or target of x_tables with its struct.
type xt struct {
	name     string
	revision uint32
	info     []byte
}

func (e *encoder) xtMatch(x xt) {
	e.Expression("match", func() {
		e.String(unix.NFTA_MATCH_NAME, x.name)
		e.Uint32(unix.NFTA_MATCH_REV, x.revision)
		e.Attribute(unix.NFTA_MATCH_INFO, x.info)
	})
}

func (e *encoder) xtTarget(x xt) {
	e.Expression("target", func() {
		e.String(unix.NFTA_TARGET_NAME, x.name)
		e.Uint32(unix.NFTA_TARGET_REV, x.revision)
		e.Attribute(unix.NFTA_TARGET_INFO, x.info)
	})
}

// record builds a struct of the kernel's headers in the machine's own byte order.
type record []byte

func (r record) u8(values ...uint8) record { return append(r, values...) }

func (r record) u16(values ...uint16) record {
	for _, v := range values {
		r = binary.NativeEndian.AppendUint16(r, v)
	}
	return r
}

func (r record) u32(values ...uint32) record {
	for _, v := range values {
		r = binary.NativeEndian.AppendUint32(r, v)
	}
	return r
}

// be16 adds values in the byte order of packets.
func (r record) be16(values ...uint16) record {
	for _, v := range values {
		r = binary.BigEndian.AppendUint16(r, v)
	}
	return r
}

// fill adds zeros up to a length.
func (r record) fill(length int) record { return append(r, make([]byte, max(0, length-len(r)))...) }

// align ends a struct as XT_ALIGN does: at a multiple of what a 64-bit number is aligned to.
func (r record) align() []byte { return r.fill((len(r) + 7) &^ 7) }
