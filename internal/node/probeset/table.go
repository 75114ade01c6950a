package probeset

import (
	"bytes"
	"context"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/decode"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// The names are the reference's, but for the chain's.
const (
	tableName      = "istio-ambient-nat"
	chainName      = "istio-probes"
	referenceChain = "postrouting"
)

// priority is one before srcnat, the priority of masquerades.
const priority = 99

// setUserdata is what nft stores with a set for its listing: the byte order of the keys (big endian), and the reference's comment.
const setUserdata = "\x00\x04\x02\x00\x00\x00" + "\x07\x2fUUID of the pods that are part of ambient mesh\x00"

// family is the part of the table for IPv4 or IPv6.
type family struct {
	ipv6    bool
	set     string
	keyType uint32 // nft's number of the type, for its listing
	source  netip.Addr
}

// families is the shape of a table: all but its entries.
type families []family

func shape(w Want) families {
	all := families{{false, "istio-inpod-probes-v4", 7, w.V4}, {true, "istio-inpod-probes-v6", 8, w.V6}}
	if !w.IPv6 {
		all = all[:1]
	}
	return all
}

// length is the length of an address.
func (f family) length() uint32 { return uint32(f.source.BitLen() / 8) } //nolint:gosec // at most 16

// of returns the entries of the family.
func (f family) of(entries map[netip.Addr]string) map[netip.Addr]string {
	mine := maps.Clone(entries)
	maps.DeleteFunc(mine, func(a netip.Addr, _ string) bool { return a.Is6() != f.ipv6 })
	return mine
}

// table is what the kernel has.
type table struct {
	// there: it exists. whole: all but the entries is as wanted.
	there, whole bool
	entries      map[netip.Addr]string
}

// read reads the table.
func read(c *nfnetlink.Conn, want families) (t table, err error) {
	t.entries = map[netip.Addr]string{}
	found, there, err := getTable(c)
	if err != nil || !there {
		return t, err
	}
	flags, _ := found.Get(unix.NFTA_TABLE_FLAGS).Uint32()
	objects, _ := found.Get(unix.NFTA_TABLE_USE).Uint32()
	t.there, t.whole = true, flags == 0 && int(objects) == len(want)+1 // the sets and the chain
	for _, f := range want {
		usable, failed := f.readSet(c, t.entries)
		if failed != nil {
			return t, failed
		}
		t.whole = t.whole && usable
	}
	chain, there, err := getChain(c, chainName)
	if err != nil || !there {
		t.whole = false
		return t, err
	}
	at, drops, base := nfnetlink.ReadHook(chain)
	var rules [][]byte
	err = dumpRules(c, unix.NFPROTO_INET, tableName, chainName, func(rule nfnetlink.Attributes) {
		rules = append(rules, bytes.Clone(rule.Get(unix.NFTA_RULE_EXPRESSIONS).Value))
	})
	t.whole = t.whole && base && !drops && at == hook && slices.EqualFunc(rules, want, func(have []byte, f family) bool {
		return sameExpressions(f.expressions(), have)
	})
	return t, err
}

// readSet adds the entries of a set. usable reports whether the set is a plain one of the right type.
func (f family) readSet(c *nfnetlink.Conn, entries map[netip.Addr]string) (usable bool, err error) {
	named := func(b *nfnetlink.Buffer) { b.In(tableName, f.set) }
	found, there, err := c.Get(unix.NFT_MSG_GETSET, unix.NFPROTO_INET, named)
	if err != nil || !there {
		return false, err
	}
	flags, _ := found.Get(unix.NFTA_SET_FLAGS).Uint32()
	keyType, _ := found.Get(unix.NFTA_SET_KEY_TYPE).Uint32()
	err = c.Dump(context.Background(), unix.NFT_MSG_GETSETELEM, unix.NFPROTO_INET, named, func(m nfnetlink.Message) error {
		for e := range nfnetlink.Attributes(m.Attributes.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value).All() {
			one := nfnetlink.Attributes(e.Value)
			key := nfnetlink.Attributes(one.Get(unix.NFTA_SET_ELEM_KEY).Value).Get(unix.NFTA_DATA_VALUE).Value
			if a, ok := netip.AddrFromSlice(key); ok && a.Is6() == f.ipv6 {
				entries[a] = ""
				for comment := range decode.Comments(one.Get(unix.NFTA_SET_ELEM_USERDATA).Value) {
					entries[a] = comment
				}
			}
		}
		return nil
	})
	return flags == 0 && keyType == f.keyType, err
}

func getTable(c *nfnetlink.Conn) (found nfnetlink.Attributes, there bool, err error) {
	return c.Get(unix.NFT_MSG_GETTABLE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, tableName) })
}

func getChain(c *nfnetlink.Conn, name string) (found nfnetlink.Attributes, there bool, err error) {
	return c.Get(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.Chain(tableName, name) })
}

// hook is the hook of our chain.
var hook = nfnetlink.Hook{Number: unix.NF_INET_POST_ROUTING, Priority: priority, Type: "nat"} //nolint:gochecknoglobals // a constant

// dumpRules calls each with the rules of a chain.
func dumpRules(c *nfnetlink.Conn, family uint8, table, chain string, each func(nfnetlink.Attributes)) error {
	named := func(b *nfnetlink.Buffer) { b.In(table, chain) }
	return c.Dump(context.Background(), unix.NFT_MSG_GETRULE, family, named, func(m nfnetlink.Message) error {
		// A kernel may not narrow the list.
		if m.Attributes.Get(unix.NFTA_RULE_TABLE).Text() == table && m.Attributes.Get(unix.NFTA_RULE_CHAIN).Text() == chain {
			each(m.Attributes)
		}
		return nil
	})
}

// sameExpressions compares the expressions of two rules. The kernel adds attributes that are zero, and counts.
func sameExpressions(want, have nfnetlink.Attributes) bool {
	return slices.EqualFunc(slices.Collect(want.All()), slices.Collect(have.All()), func(a, b nfnetlink.Attribute) bool {
		name, wanted, _ := nfnetlink.SplitExpression(a)
		other, found, ok := nfnetlink.SplitExpression(b)
		if !ok || name != other {
			return false
		}
		for kind := range uint16(nfnetlink.MaxFields) {
			w, h := wanted.Raw(kind), found.Raw(kind)
			if name != "counter" && !bytes.Equal(w, h) && (len(w) > 0 || len(bytes.Trim(h, "\x00")) > 0) {
				return false
			}
		}
		return true
	})
}

// replace adds the messages that make the table with entries, instead of the existing one.
func (all families) replace(b *nfnetlink.Batch, have table, pods map[netip.Addr]string) {
	if have.there {
		deleteTable(b)
	}
	b.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, tableName) })
	b.Add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
		b.Chain(tableName, chainName)
		b.Base(hook)
	})
	for i, f := range all {
		b.Add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
			b.In(tableName, f.set)
			b.Uint32(unix.NFTA_SET_FLAGS, 0)
			b.Uint32(unix.NFTA_SET_KEY_TYPE, f.keyType)
			b.Uint32(unix.NFTA_SET_KEY_LEN, f.length())
			b.Uint32(unix.NFTA_SET_ID, uint32(i+1)) //nolint:gosec // 1 or 2
			b.Attribute(unix.NFTA_SET_USERDATA, []byte(setUserdata))
		})
		b.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
			b.In(tableName, chainName)
			b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() { f.rule(b) })
		})
	}
	all.update(b, nil, pods)
}

// expressions returns the expressions of the family's rule.
func (f family) expressions() nfnetlink.Attributes {
	var b nfnetlink.Buffer
	f.rule(&b)
	data, _ := b.Bytes() // it is short
	return data
}

// rule adds "meta l4proto tcp meta skuid >= 0 ip daddr @SET counter snat to SOURCE" as nft does. A packet that is forwarded has no
// socket and so no skuid, which ends the rule.
func (f family) rule(b *nfnetlink.Buffer) {
	b.Meta(unix.NFT_META_L4PROTO)
	b.Compare(false, []byte{unix.IPPROTO_TCP})
	b.Meta(unix.NFT_META_SKUID)
	b.Expression("byteorder", func() {
		b.Uint32(unix.NFTA_BYTEORDER_SREG, nfnetlink.Register)
		b.Uint32(unix.NFTA_BYTEORDER_DREG, nfnetlink.Register)
		b.Uint32(unix.NFTA_BYTEORDER_OP, unix.NFT_BYTEORDER_HTON)
		b.Uint32(unix.NFTA_BYTEORDER_LEN, 4)
		b.Uint32(unix.NFTA_BYTEORDER_SIZE, 4)
	})
	b.CompareBy(unix.NFT_CMP_GTE, make([]byte, 4))
	b.Family(f.ipv6)
	_, offset, length := nfnetlink.AddressOffsets(f.ipv6)
	b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, length)
	b.Expression("lookup", func() {
		b.String(unix.NFTA_LOOKUP_SET, f.set)
		b.Uint32(unix.NFTA_LOOKUP_SREG, nfnetlink.Register)
	})
	b.Counter()
	b.Immediate(f.source.AsSlice())
	const mapAddresses = 1 // NF_NAT_RANGE_MAP_IPS, which the kernel adds
	b.Expression("nat", func() {
		b.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		b.Uint32(unix.NFTA_NAT_FAMILY, uint32(nfnetlink.ProtocolFamily(f.ipv6)))
		b.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, nfnetlink.Register)
		b.Uint32(unix.NFTA_NAT_REG_ADDR_MAX, nfnetlink.Register)
		b.Uint32(unix.NFTA_NAT_FLAGS, mapAddresses)
	})
}

// update adds the messages that turn the entries have into pods. An element keeps its comment when it is added again, so an address
// with another comment is deleted first.
func (all families) update(b *nfnetlink.Batch, have, pods map[netip.Addr]string) {
	for _, f := range all {
		old, fresh := f.of(have), f.of(pods)
		maps.DeleteFunc(old, func(a netip.Addr, uid string) bool {
			same, stays := fresh[a]
			if stays = stays && same == uid; stays {
				delete(fresh, a)
			}
			return stays
		})
		f.elements(b, unix.NFT_MSG_DELSETELEM, 0, old)
		f.elements(b, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, fresh)
	}
}

// perMessage bounds the elements of a message: a list of elements has at most 64 kB.
const perMessage = 200

// elements adds messages about elements.
func (f family) elements(b *nfnetlink.Batch, kind, flags uint16, entries map[netip.Addr]string) {
	sorted := slices.SortedFunc(maps.Keys(entries), netip.Addr.Compare)
	for some := range slices.Chunk(sorted, perMessage) {
		b.Add(kind, flags, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
			b.In(tableName, f.set)
			b.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
				for _, a := range some {
					b.Nested(unix.NFTA_LIST_ELEM, func() {
						b.Data(unix.NFTA_SET_ELEM_KEY, a.AsSlice())
						if kind == unix.NFT_MSG_NEWSETELEM {
							b.Attribute(unix.NFTA_SET_ELEM_USERDATA, comment(entries[a]))
						}
					})
				}
			})
		})
	}
}

// maxComment is the longest comment that nft takes (NFTNL_UDATA_COMMENT_MAXLEN), without its end. A pod's UID has 36 bytes.
const maxComment = 127

// comment returns a comment as userdata of an element: kind 0, length, text.
func comment(text string) []byte {
	return append(append([]byte{0, byte(len(text) + 1)}, text...), 0) //nolint:gosec // at most maxComment
}

func deleteTable(b *nfnetlink.Batch) {
	b.Add(unix.NFT_MSG_DELTABLE, 0, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, tableName) })
}

// deleteChain deletes a chain and its rules.
func deleteChain(b *nfnetlink.Batch, family uint8, table, chain string) {
	b.Add(unix.NFT_MSG_DELRULE, 0, family, func(b *nfnetlink.Buffer) { b.In(table, chain) })
	b.Add(unix.NFT_MSG_DELCHAIN, 0, family, func(b *nfnetlink.Buffer) { b.Chain(table, chain) })
}

// jump returns the name of the chain to which a rule jumps, "" if it does not end with a jump.
func jump(rule nfnetlink.Attributes) (to string) {
	for e := range nfnetlink.Attributes(rule.Get(unix.NFTA_RULE_EXPRESSIONS).Value).All() {
		name, data, _ := nfnetlink.SplitExpression(e)
		if v, ok := data.ReadVerdict(); ok && name == "immediate" && v.Code == nfnetlink.Jump {
			to = v.Chain
		}
	}
	return to
}
