package native

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Set is a set of ports that a rule looks into. The kernel wants it made ahead of the rule, in the same transaction.
type Set struct {
	// ID names it there; 0 is no set.
	ID    uint32
	Ports []uint16
}

// Rule is a rule that was understood and can be written.
type Rule struct {
	terms []term
	set   Set
}

// Parse reads a rule's text. If it needs a set, that gets the ID. The error says what of it is not understood.
func Parse(spec string, id uint32) (Rule, error) {
	terms, err := parse(spec)
	if err != nil {
		return Rule{}, err
	}
	r := Rule{terms: terms}
	for _, t := range terms {
		p, ok := t.(portTerm)
		switch {
		case !ok || !p.set:
		case r.set.ID != 0:
			return Rule{}, fmt.Errorf("a rule with two sets cannot be written")
		default:
			r.set = Set{id, p.ports}
		}
	}
	return r, nil
}

// Set gives the set that the rule needs, and whether it needs one.
func (r Rule) Set() (Set, bool) { return r.set, r.set.ID != 0 }

// Encode adds the attribute NFTA_RULE_EXPRESSIONS.
func (r Rule) Encode(b *nfnetlink.Buffer) {
	e := &encoder{Writer: expression.Writer{Buffer: b}, set: r.set}
	b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, t := range r.terms {
			t.encode(e)
		}
	})
}

// anonymousSet is the name for which the kernel chooses a number.
const anonymousSet = "__set%d"

// portType is nft's number for ports; the kernel keeps it for nft to print the set by.
const portType = 13

// portUserdata is what nft keeps with a set of ports, for itself: the byte order of its keys, that they are ports of
// TCP's destination, and the same of its data, which it has none of.
const portUserdata = "\x00\x04\x02\x00\x00\x00" + "\x03\x14\x04\x07\x00\x00\x00\x01\x0c\x00\x04\x08\x00\x00\x00\x01\x04\x02\x00\x00\x00\x00"

// Declare adds the attributes of the message that makes the set (NFT_MSG_NEWSET).
func (s Set) Declare(b *nfnetlink.Buffer, table string) {
	b.String(unix.NFTA_SET_TABLE, table)
	b.String(unix.NFTA_SET_NAME, anonymousSet)
	b.Uint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_ANONYMOUS|unix.NFT_SET_CONSTANT)
	b.Uint32(unix.NFTA_SET_KEY_TYPE, portType)
	b.Uint32(unix.NFTA_SET_KEY_LEN, 2)
	b.Uint32(unix.NFTA_SET_ID, s.ID)
	b.Nested(unix.NFTA_SET_DESC, func() {
		b.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(len(s.Ports))) //nolint:gosec // a handful
	})
	b.Attribute(unix.NFTA_SET_USERDATA, []byte(portUserdata))
}

// Fill adds the attributes of the message that puts the ports into the set (NFT_MSG_NEWSETELEM).
func (s Set) Fill(b *nfnetlink.Buffer, table string) {
	b.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
	b.String(unix.NFTA_SET_ELEM_LIST_SET, anonymousSet)
	b.Uint32(unix.NFTA_SET_ELEM_LIST_SET_ID, s.ID)
	b.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		for _, port := range s.Ports {
			b.Nested(unix.NFTA_LIST_ELEM, func() {
				expression.Writer{Buffer: b}.Data(unix.NFTA_SET_ELEM_KEY, binary.BigEndian.AppendUint16(nil, port))
			})
		}
	})
}
