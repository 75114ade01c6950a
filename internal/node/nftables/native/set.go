package native

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

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
