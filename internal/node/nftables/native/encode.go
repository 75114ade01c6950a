// Package native encodes the rules of the native nf_tables tables, like the reference's native mode.
//
// It promises that Encode writes exactly the expressions that nft writes for the rule's text. It uses no socket, no file and no process.
//
// Start reading at Encode. Package decode reads the rules, package redirect decides which ones are wanted.
package native

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Encode adds the attribute NFTA_RULE_EXPRESSIONS of a rule that ruleset.NFT made. If the rule needs a set, SetOf returns
// it; id is the set's number in the transaction.
func Encode(b *nfnetlink.Buffer, r ruleset.Rule, id uint32) error {
	e := encoder{Buffer: b, set: id}
	b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, m := range r.Matches {
			e.match(m)
		}
		e.target(r.Target)
	})
	return e.err
}

// encoder adds the expressions of a rule.
type encoder struct {
	*nfnetlink.Buffer
	protocol uint8 // the protocol compared so far
	set      uint32
	err      error
}

// nameLength is IFNAMSIZ: nft compares a name with its padding of zeros.
const nameLength = 16

func (e *encoder) match(m ruleset.Match) {
	switch m := m.(type) {
	case ruleset.Interface:
		e.meta(m.Out, unix.NFT_META_OIFNAME, unix.NFT_META_IIFNAME)
		e.Compare(m.Not, append([]byte(m.Name), make([]byte, max(0, nameLength-len(m.Name)))...))
	case ruleset.OfFamily:
		e.Family(m == ruleset.OfFamily(ruleset.IPv6))
	case ruleset.Network:
		e.Family(m.Prefix.Addr().Is6())
		e.Network(m.Source, m.Not, m.Prefix)
	case ruleset.Protocol:
		e.needProtocol(m.Number)
	case ruleset.Port:
		e.needProtocol(m.Protocol)
		e.port(m)
	case ruleset.AnyPort:
		e.ports(m)
	case ruleset.TCPFlags:
		if m != ruleset.Reset {
			e.err = fmt.Errorf("cannot encode match %v", m)
		}
		e.needProtocol(ruleset.TCP)
		e.Reset()
	case ruleset.Owner:
		if m.Last != 0 {
			e.err = fmt.Errorf("cannot encode match %v", m)
		}
		e.meta(m.Group, unix.NFT_META_SKGID, unix.NFT_META_SKUID)
		e.Compare(m.Not, binary.NativeEndian.AppendUint32(nil, m.ID))
	case ruleset.Mark:
		e.mark(m.Connection)
		e.Masked(m.Not, m.Value, m.Mask)
	case ruleset.Counter:
		e.Counter()
	case ruleset.States: // ct state & mask != 0
		e.ct(unix.NFT_CT_STATE, unix.NFTA_CT_DREG)
		e.And(binary.NativeEndian.AppendUint32(nil, uint32(m)))
		e.Compare(true, make([]byte, 4))
	default:
		e.err = fmt.Errorf("cannot encode match %v", m)
	}
}

// meta loads the key yes if condition is true, else the key no.
func (e *encoder) meta(condition bool, yes, no uint32) {
	if condition {
		no = yes
	}
	e.Meta(no)
}

// needProtocol compares the protocol if the rule has not done so.
func (e *encoder) needProtocol(number uint8) {
	if e.protocol != number {
		e.protocol = number
		e.Meta(unix.NFT_META_L4PROTO)
		e.Compare(false, []byte{number})
	}
}

// port compares a port, or both ends of a range like nft.
func (e *encoder) port(p ruleset.Port) {
	switch {
	case p.Range.First == p.Range.Last:
		e.Port(p.Source, p.Not, p.Range.First)
	case p.Not:
		e.err = fmt.Errorf("cannot encode match %v", p)
	default:
		e.LoadPort(p.Source)
		e.CompareBy(unix.NFT_CMP_GTE, nfnetlink.PortValue(p.Range.First))
		e.CompareBy(unix.NFT_CMP_LTE, nfnetlink.PortValue(p.Range.Last))
	}
}

// ports adds a lookup of the port in a set, or a comparison if there is only one distinct port. nft does the same.
func (e *encoder) ports(p ruleset.AnyPort) {
	e.needProtocol(p.Protocol)
	list := p.Distinct()
	if p.Side != ruleset.DestinationPort || slices.ContainsFunc(list, func(r ruleset.PortRange) bool { return r.First != r.Last }) {
		e.err = fmt.Errorf("cannot encode match %v", p)
	}
	if len(list) == 1 {
		e.Port(false, p.Not, list[0].First)
		return
	}
	e.LoadPort(false)
	flags := uint32(0)
	if p.Not {
		flags = unix.NFT_LOOKUP_F_INV
	}
	e.Expression("lookup", func() {
		e.Uint32(unix.NFTA_LOOKUP_SREG, nfnetlink.Register)
		e.String(unix.NFTA_LOOKUP_SET, anonymousSet)
		e.Uint32(unix.NFTA_LOOKUP_SET_ID, e.set)
		e.Uint32(unix.NFTA_LOOKUP_FLAGS, flags)
	})
}

// mark loads the mark of the packet or of its connection.
func (e *encoder) mark(connection bool) {
	if connection {
		e.ct(unix.NFT_CT_MARK, unix.NFTA_CT_DREG)
	} else {
		e.Meta(unix.NFT_META_MARK)
	}
}

// ct loads a key into the register (NFTA_CT_DREG), or sets it from the register (NFTA_CT_SREG).
func (e *encoder) ct(key uint32, register uint16) {
	e.Expression("ct", func() {
		e.Uint32(unix.NFTA_CT_KEY, key)
		e.Uint32(register, nfnetlink.Register)
	})
}

func (e *encoder) target(t ruleset.Target) {
	switch t := t.(type) {
	case ruleset.Verdict:
		e.Verdict(nfnetlink.Verdict{Code: map[ruleset.Verdict]int32{
			ruleset.Drop: nfnetlink.Drop, ruleset.Accept: nfnetlink.Accept, ruleset.Return: nfnetlink.Return,
		}[t]})
	case ruleset.Jump:
		code := int32(nfnetlink.Jump)
		if t.Goto {
			code = nfnetlink.Goto
		}
		e.Verdict(nfnetlink.Verdict{Code: code, Chain: t.Chain})
	case ruleset.RedirectTo:
		e.Immediate(binary.BigEndian.AppendUint16(nil, uint16(t)))
		e.Expression("redir", func() {
			e.Uint32(unix.NFTA_REDIR_REG_PROTO_MIN, nfnetlink.Register)
			e.Uint32(unix.NFTA_REDIR_FLAGS, nfnetlink.NATPorts)
		})
	case ruleset.SetMark:
		e.setMark(t)
	case ruleset.CopyMark:
		e.copyMark(t)
	case ruleset.Zone:
		e.Immediate(binary.NativeEndian.AppendUint16(nil, uint16(t)))
		e.ct(unix.NFT_CT_ZONE, unix.NFTA_CT_SREG)
	case ruleset.TProxy:
		e.tproxy(t)
	case ruleset.Reject:
		e.reject(t)
	default:
		e.err = fmt.Errorf("cannot encode target %v", t)
	}
}

// setMark stores a constant, or replaces the bits of the mask.
func (e *encoder) setMark(t ruleset.SetMark) {
	value := binary.NativeEndian.AppendUint32(nil, t.Value)
	if t.Mask == 0 {
		e.Immediate(value)
	} else {
		e.mark(t.Connection)
		e.Bitwise(binary.NativeEndian.AppendUint32(nil, ^t.Mask), value)
	}
	e.store(t.Connection)
}

// store sets the mark of the packet or of its connection.
func (e *encoder) store(connection bool) {
	if connection {
		e.ct(unix.NFT_CT_MARK, unix.NFTA_CT_SREG)
	} else {
		e.SetMeta(unix.NFT_META_MARK)
	}
}

// copyMark copies the whole mark.
func (e *encoder) copyMark(t ruleset.CopyMark) {
	if t != (ruleset.CopyMark{Restore: t.Restore}) {
		e.err = fmt.Errorf("cannot encode target %v", t)
	}
	e.mark(t.Restore)
	e.store(!t.Restore)
}

func (e *encoder) tproxy(t ruleset.TProxy) {
	e.Immediate(binary.BigEndian.AppendUint16(nil, t.Port))
	e.Expression("tproxy", func() {
		e.Uint32(nfnetlink.TProxyFamily, uint32(nfnetlink.ProtocolFamily(t.Family == ruleset.IPv6)))
		e.Uint32(nfnetlink.TProxyPort, nfnetlink.Register)
	})
	e.target(ruleset.SetMark{Value: t.Mark, Mask: t.Mask})
	e.Counter()
	e.target(ruleset.Accept)
}

// reject encodes a type and a code: enum nft_reject_types, and the ICMP and ICMPv6 codes for an unreachable port.
func (e *encoder) reject(r ruleset.Reject) {
	kind, code := uint32(unix.NFT_REJECT_ICMP_UNREACH), uint8(0)
	switch r {
	case ruleset.TCPReset:
		kind = unix.NFT_REJECT_TCP_RST
	case ruleset.PortUnreachable:
		code = 3
	case ruleset.PortUnreachableV6:
		code = 4
	}
	e.Expression("reject", func() {
		e.Uint32(unix.NFTA_REJECT_TYPE, kind)
		e.Attribute(unix.NFTA_REJECT_ICMP_CODE, []byte{code})
	})
}

// Set is a set of ports that a rule looks up. The kernel requires the set before the rule in the same transaction.
type Set []ruleset.PortRange

// SetOf returns the set that a rule needs, or nil.
func SetOf(r ruleset.Rule) Set {
	for _, m := range r.Matches {
		if p, ok := m.(ruleset.AnyPort); ok && len(p.Distinct()) > 1 {
			return p.Distinct()
		}
	}
	return nil
}

// anonymousSet is the name in which the kernel replaces %d by a number.
const anonymousSet = "__set%d"

// portType is nft's number for ports. The kernel stores it for nft's listing.
const portType = 13

// portUserdata is the userdata that nft stores with a set of ports for its listing: the byte order of the keys, their
// type (TCP destination port), and the byte order of the data, which the set does not have.
const portUserdata = "\x00\x04\x02\x00\x00\x00" + "\x03\x14\x04\x07\x00\x00\x00\x01\x0c\x00\x04\x08\x00\x00\x00\x01\x04\x02\x00\x00\x00\x00"

// Declare adds the attributes of the message that creates the set (NFT_MSG_NEWSET) with its number in the transaction.
func (s Set) Declare(b *nfnetlink.Buffer, table string, id uint32) {
	b.In(table, anonymousSet)
	b.Uint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_ANONYMOUS|unix.NFT_SET_CONSTANT)
	b.Uint32(unix.NFTA_SET_KEY_TYPE, portType)
	b.Uint32(unix.NFTA_SET_KEY_LEN, 2)
	b.Uint32(unix.NFTA_SET_ID, id)
	b.Nested(unix.NFTA_SET_DESC, func() {
		b.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(len(s))) //nolint:gosec // a few ports
	})
	b.Attribute(unix.NFTA_SET_USERDATA, []byte(portUserdata))
}

// Fill adds the attributes of the message that adds the ports to the set (NFT_MSG_NEWSETELEM).
func (s Set) Fill(b *nfnetlink.Buffer, table string, id uint32) {
	b.In(table, anonymousSet)
	b.Uint32(unix.NFTA_SET_ELEM_LIST_SET_ID, id)
	b.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		for _, port := range s {
			b.Nested(unix.NFTA_LIST_ELEM, func() { b.Data(unix.NFTA_SET_ELEM_KEY, binary.BigEndian.AppendUint16(nil, port.First)) })
		}
	})
}
