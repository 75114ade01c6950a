package decode

import (
	"bytes"
	"encoding/binary"
	"math"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// load is the content of a register: a part of the packet, of its metadata or of its connection, or a constant.
type load struct {
	// from is "meta", "ct", "payload", "fib" or "constant"; "" means unknown.
	from                      string
	key, base, offset, length uint32
	mask, xor, constant       []byte
	// swapped reports whether a number was converted from host to network byte order.
	swapped bool
	// source is a fib lookup of the source address, marked one that also uses the packet's mark.
	source, marked bool
	// register is the first register of the load.
	register uint32
}

// word returns the number of a register of 4 bytes: the first four registers have 16 bytes (enum nft_registers).
func word(register uint32) uint32 {
	if register < unix.NFT_REG32_00 {
		return (register - unix.NFT_REG_1) * 4
	}
	return register - unix.NFT_REG32_00
}

// put fills a register. If known is false, the register has unknown content.
func (d *decoder) put(register uint32, l load, known bool) {
	if !known {
		l = load{}
	}
	if register == unix.NFT_REG_VERDICT {
		d.target(d.other("a computed verdict"))
		return
	}
	l.register = word(register)
	for at, other := range d.registers { // overwritten registers lose their content
		if at < l.register+l.words() && l.register < at+other.words() {
			delete(d.registers, at)
		}
	}
	d.registers[l.register] = &l
}

// words returns the number of 4-byte registers that a load fills: a whole 16-byte register if its length is not known.
func (l load) words() uint32 {
	if l.length == 0 {
		return 4
	}
	return (l.length + 3) / 4
}

// take returns and clears the content of a register. An unknown register has a load without content.
func (d *decoder) take(register uint32) load {
	at := word(register)
	l := d.registers[at]
	delete(d.registers, at)
	if l != nil {
		return *l
	}
	return load{}
}

// metadata reads a load from meta or ct, or a store to it.
func (d *decoder) metadata(name string, f nfnetlink.Fields) {
	kind, into, from := uint16(unix.NFTA_META_KEY), uint16(unix.NFTA_META_DREG), uint16(unix.NFTA_META_SREG)
	if name == "ct" {
		kind, into, from = unix.NFTA_CT_KEY, unix.NFTA_CT_DREG, unix.NFTA_CT_SREG
	}
	key, ok := f.Number(kind)
	if register, stores := f.Number(from); stores {
		d.store(name, key, d.take(register))
		return
	}
	register, ok2 := f.Number(into)
	d.put(register, load{from: name, key: key, length: metaLength(name, key)}, ok && ok2 && f.Count() == 2) // one more attribute: a direction
}

// metaLength is the number of bytes of a meta or ct key.
func metaLength(name string, key uint32) uint32 {
	switch {
	case name == "ct" && key == unix.NFT_CT_DIRECTION:
		return 1
	case name == "ct":
		return 4
	case key == unix.NFT_META_IIFNAME || key == unix.NFT_META_OIFNAME:
		return unix.IFNAMSIZ
	case key == unix.NFT_META_L4PROTO || key == unix.NFT_META_NFPROTO:
		return 1
	case key == unix.NFT_META_PROTOCOL:
		return 2
	}
	return 4
}

func (d *decoder) payload(f nfnetlink.Fields) {
	base, ok := f.Number(unix.NFTA_PAYLOAD_BASE)
	offset, ok2 := f.Number(unix.NFTA_PAYLOAD_OFFSET)
	length, ok3 := f.Number(unix.NFTA_PAYLOAD_LEN)
	if _, stores := f.Number(unix.NFTA_PAYLOAD_SREG); stores {
		d.rewrite(base, offset, length)
		return
	}
	register, ok4 := f.Number(unix.NFTA_PAYLOAD_DREG)
	d.put(register, load{from: "payload", base: base, offset: offset, length: length}, ok && ok2 && ok3 && ok4 && f.Count() == 4)
}

// bitwise reads a mask and the following exclusive or.
func (d *decoder) bitwise(f nfnetlink.Fields) {
	into, _ := f.Number(unix.NFTA_BITWISE_DREG)
	source, mask, xor, ok := f.Bitwise()
	l := d.take(source)
	if !ok || l.mask != nil || l.from == "constant" {
		l = load{}
	}
	l.mask, l.xor = mask, xor
	if !slices.ContainsFunc(xor, func(b byte) bool { return b != 0 }) {
		l.xor = nil
	}
	d.put(into, l, true)
}

func (d *decoder) byteorder(f nfnetlink.Fields) {
	source, _ := f.Number(unix.NFTA_BYTEORDER_SREG)
	into, _ := f.Number(unix.NFTA_BYTEORDER_DREG)
	l := d.take(source)
	if l.length != 4 || l.swapped || l.from == "payload" || l.mask != nil {
		l = load{}
	}
	l.swapped = true
	d.put(into, l, true)
}

func (d *decoder) fib(f nfnetlink.Fields) {
	n, ok := f.Numbers(unix.NFTA_FIB_DREG, unix.NFTA_FIB_RESULT, unix.NFTA_FIB_FLAGS)
	l := load{from: "fib", key: n[1], length: 4, source: n[2]&unix.NFTA_FIB_F_SADDR != 0, marked: n[2]&unix.NFTA_FIB_F_MARK != 0}
	kind := n[1] == unix.NFT_FIB_RESULT_ADDRTYPE && (n[2] == unix.NFTA_FIB_F_SADDR || n[2] == unix.NFTA_FIB_F_DADDR)
	back := n[1] == unix.NFT_FIB_RESULT_OIF && n[2]&^(unix.NFTA_FIB_F_MARK|unix.NFTA_FIB_F_PRESENT) == unix.NFTA_FIB_F_SADDR|unix.NFTA_FIB_F_IIF
	d.put(n[0], l, ok && (kind || back))
}

// comparison reads one comparison. Inequalities become ranges.
func (d *decoder) comparison(f nfnetlink.Fields) {
	register, op, value, ok := f.Comparison()
	l := d.take(register)
	least, most := make([]byte, len(value)), bytes.Repeat([]byte{0xff}, len(value))
	if !ok {
		d.match(d.other("a broken comparison"))
		return
	}
	if op == unix.NFT_CMP_GTE { // a second comparison may follow
		d.put(register, l, true)
	}
	switch op {
	case unix.NFT_CMP_EQ, unix.NFT_CMP_NEQ:
		d.compare(l, op == unix.NFT_CMP_NEQ, value, value)
	case unix.NFT_CMP_LT:
		d.compare(l, true, value, most)
	case unix.NFT_CMP_GT:
		d.compare(l, true, least, value)
	case unix.NFT_CMP_LTE:
		d.upTo(l, least, value)
	case unix.NFT_CMP_GTE:
		d.compare(l, false, value, most)
	default:
		d.match(d.other("a comparison"))
	}
}

// upTo reads the second comparison of a range. The previous part is the comparison with the first value.
func (d *decoder) upTo(l load, least, value []byte) {
	n := len(d.parts)
	if n > 0 {
		if p, is := d.parts[n-1].match.(ruleset.Port); is && l.from == "payload" && len(value) == 2 && !p.Not && p.Range.Last == math.MaxUint16 &&
			p.Source == (l.offset == nfnetlink.SourcePortOffset) && l.base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.mask == nil {
			p.Range.Last = binary.BigEndian.Uint16(value)
			d.parts[n-1].match = p
			return
		}
		if a, is := d.parts[n-1].match.(ruleset.Addresses); is && l.from == "payload" && l.base == unix.NFT_PAYLOAD_NETWORK_HEADER && !a.Not && l.mask == nil {
			if last, ok := netip.AddrFromSlice(value); ok && last.BitLen() == a.First.BitLen() {
				a.Last = last
				d.parts[n-1].match = a
				return
			}
		}
	}
	d.compare(l, false, least, value)
}

func (d *decoder) between(f nfnetlink.Fields) {
	register, negated, first, last, ok := f.Range()
	if !ok {
		d.match(d.other("a broken range"))
		return
	}
	d.compare(d.take(register), negated, first, last)
}

// compare adds a match of the loaded value with the values from first to last.
func (d *decoder) compare(l load, negated bool, first, last []byte) {
	if d.pair(l, negated, first, last) {
		return
	}
	m := d.condition(l, negated, first, last)
	if m == nil {
		m = d.other("a match of " + l.name())
	}
	d.dropImplied(m)
	d.match(m)
}

// pair reads a comparison of two fields that nft merged: both addresses, or both ports.
func (d *decoder) pair(l load, negated bool, first, last []byte) bool {
	half := len(first) / 2
	ports := l.base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.offset == 0 && l.length == 4
	addresses := l.base == unix.NFT_PAYLOAD_NETWORK_HEADER && (l.offset == 12 && l.length == 8 || l.offset == 8 && l.length == 32)
	if l.from != "payload" || negated || l.mask != nil || !bytes.Equal(first, last) || int(l.length) != len(first) || !ports && !addresses {
		return false
	}
	one, other := l, l
	one.length, other.length = l.length/2, l.length/2
	other.offset += l.length / 2
	d.compare(one, false, first[:half], first[:half])
	d.compare(other, false, first[half:], first[half:])
	return true
}

// dropImplied drops a match that the next one implies: the protocol of a port, and the family of an address. nft's listing does the same.
func (d *decoder) dropImplied(m ruleset.Match) {
	if d.table.IPTables {
		return
	}
	var implied ruleset.Match
	switch m := m.(type) {
	case ruleset.Port:
		implied = ruleset.Protocol{Number: m.Protocol}
	case ruleset.AnyPort:
		implied = ruleset.Protocol{Number: m.Protocol}
	case ruleset.TCPFlags:
		implied = ruleset.Protocol{Number: ruleset.TCP}
	case ruleset.Network, ruleset.Addresses:
		implied = ruleset.OfFamily(d.family)
	default:
		return
	}
	i := slices.IndexFunc(d.parts, func(p part) bool { return p.match == implied })
	last := len(d.parts) - 1
	if _, family := implied.(ruleset.OfFamily); i >= 0 && (family || i == last) {
		d.parts = slices.Delete(d.parts, i, i+1)
	}
}

// name describes the loaded value for people.
func (l load) name() string {
	switch l.from {
	case "":
		return "something"
	case "payload":
		return map[uint32]string{
			unix.NFT_PAYLOAD_LL_HEADER: "the link header", unix.NFT_PAYLOAD_NETWORK_HEADER: "the network header", unix.NFT_PAYLOAD_TRANSPORT_HEADER: "the transport header",
		}[l.base]
	}
	return l.from
}

// condition returns the match of the loaded value, nil if it is not known.
func (d *decoder) condition(l load, negated bool, first, last []byte) ruleset.Match {
	same := bytes.Equal(first, last)
	name := l.from == "meta" && l.length == unix.IFNAMSIZ // a comparison may cover only the start of the name
	exists := l.from == "fib" && l.key == unix.NFT_FIB_RESULT_OIF
	switch {
	case l.xor != nil || len(first) != len(last) || int64(l.length) != int64(len(first)) && !name && !exists:
		return nil
	case l.from == "payload" && l.base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return d.header(l, negated, first, last)
	case l.from == "payload" && l.base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return d.transport(l, negated, first, last)
	case l.from == "fib" && l.key == unix.NFT_FIB_RESULT_OIF && same && l.mask == nil && len(bytes.Trim(first, "\x00")) == 0:
		return ruleset.ReversePath{Missing: !negated, ByMark: l.marked}
	case l.from == "fib" && l.key == unix.NFT_FIB_RESULT_ADDRTYPE && same && l.mask == nil && len(first) == 4:
		if kind := binary.NativeEndian.Uint32(first); kind < 16 {
			return ruleset.AddressType{Types: 1 << kind, Source: l.source, Not: negated}
		}
	case l.from == "ct":
		return d.connection(l, negated, first, last)
	case l.from == "meta":
		return d.meta(l, negated, first, last)
	}
	return nil
}

// meta returns the match of metadata.
func (d *decoder) meta(l load, negated bool, first, last []byte) ruleset.Match {
	same := bytes.Equal(first, last)
	switch l.key {
	case unix.NFT_META_SKUID, unix.NFT_META_SKGID:
		d.nft = true
		return owner(l, negated, first, last)
	case unix.NFT_META_MARK:
		return mark(l, negated, first, last)
	}
	if !same || l.mask != nil {
		return nil
	}
	switch l.key {
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
		return link(first, l.key == unix.NFT_META_OIFNAME, negated)
	case unix.NFT_META_IIF, unix.NFT_META_OIF:
		if name := d.link(first); name != "" {
			return ruleset.Interface{Name: name, Out: l.key == unix.NFT_META_OIF, Not: negated}
		}
	case unix.NFT_META_NFPROTO:
		if len(first) == 1 {
			return d.ofFamily(map[byte]ruleset.Family{unix.NFPROTO_IPV4: ruleset.IPv4, unix.NFPROTO_IPV6: ruleset.IPv6}[first[0]], negated)
		}
	case unix.NFT_META_PROTOCOL:
		if len(first) == 2 {
			return d.ofFamily(map[uint16]ruleset.Family{unix.ETH_P_IP: ruleset.IPv4, unix.ETH_P_IPV6: ruleset.IPv6}[binary.BigEndian.Uint16(first)], negated)
		}
	case unix.NFT_META_L4PROTO:
		if len(first) == 1 {
			return d.ofProtocol(first[0], negated)
		}
	}
	return nil
}

// link reads the index of an interface. Index 1 is the loopback device.
func (d *decoder) link(index []byte) string {
	if len(index) != 4 || d.table.Links == nil {
		return ""
	}
	name, _ := d.table.Links(binary.NativeEndian.Uint32(index)) // "" for an unknown index
	return name
}

func (d *decoder) ofFamily(f ruleset.Family, negated bool) ruleset.Match {
	d.nft = true
	switch {
	case f == 0:
		return nil
	case negated:
		return ruleset.Not{Match: ruleset.OfFamily(f)}
	}
	d.family = f
	return ruleset.OfFamily(f)
}

func (d *decoder) ofProtocol(number uint8, negated bool) ruleset.Match {
	if !negated {
		d.protocol = number
	}
	return ruleset.Protocol{Number: number, Not: negated}
}

// owner compares the user or group of a socket.
func owner(l load, negated bool, first, last []byte) ruleset.Match {
	if l.mask != nil || len(first) != 4 || len(last) != 4 || !l.swapped && !bytes.Equal(first, last) {
		return nil
	}
	number := binary.NativeEndian.Uint32
	if l.swapped {
		number = binary.BigEndian.Uint32
	}
	o := ruleset.Owner{ID: number(first), Group: l.key == unix.NFT_META_SKGID, Not: negated}
	if !bytes.Equal(first, last) {
		if o.Last = number(last); o.Last < o.ID {
			return nil
		}
	}
	return o
}

// mark compares a mark under a mask.
func mark(l load, negated bool, first, last []byte) ruleset.Match {
	if len(first) != 4 || !bytes.Equal(first, last) || l.swapped || l.mask != nil && len(l.mask) != 4 {
		return nil
	}
	m := ruleset.Mark{Value: binary.NativeEndian.Uint32(first), Connection: l.from == "ct", Not: negated}
	if l.mask != nil {
		if m.Mask = binary.NativeEndian.Uint32(l.mask); m.Mask == 0 || m.Mask == math.MaxUint32 {
			return nil
		}
	}
	return m
}

// link reads the name of an interface: complete with a zero byte at the end, else only a prefix.
func link(value []byte, out, negated bool) ruleset.Match {
	name, behind, whole := bytes.Cut(value, []byte{0})
	odd := bytes.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '"' })
	if len(name) == 0 || len(bytes.Trim(behind, "\x00")) > 0 || odd || bytes.HasSuffix(name, []byte("+")) || len(name) >= unix.IFNAMSIZ {
		return nil
	}
	i := ruleset.Interface{Name: string(name), Out: out, Not: negated}
	if !whole {
		i.Name += "+"
	}
	return i
}

func negatable(m ruleset.Match, negated bool) ruleset.Match {
	if negated {
		return ruleset.Not{Match: m}
	}
	return m
}

// connection compares the state, the status or the mark of a connection.
func (d *decoder) connection(l load, negated bool, first, last []byte) ruleset.Match {
	d.nft = true
	switch {
	case l.key == unix.NFT_CT_DIRECTION && len(first) == 1 && bytes.Equal(first, last) && l.mask == nil:
		return negatable(ruleset.Reply{}, negated == (first[0] != 0))
	case len(first) != 4 || !bytes.Equal(first, last):
		return nil
	case l.key == unix.NFT_CT_MARK:
		return mark(l, negated, first, last)
	case l.key == unix.NFT_CT_STATE && l.mask == nil: // an element of a set
		l.mask, negated = first, !negated
	case l.key != unix.NFT_CT_STATE && l.key != unix.NFT_CT_STATUS || len(l.mask) != 4 || binary.NativeEndian.Uint32(first) != 0:
		return nil
	}
	bits := binary.NativeEndian.Uint32(l.mask)
	if l.key == unix.NFT_CT_STATUS {
		return translated(bits, !negated)
	}
	const untracked = 1 << 6 // NF_CT_STATE_UNTRACKED_BIT
	tracked := ruleset.StateInvalid | ruleset.StateEstablished | ruleset.StateRelated | ruleset.StateNew
	states := ruleset.States(bits) & tracked //nolint:gosec // four bits, by the mask
	if bits&untracked != 0 {
		states |= ruleset.StateUntracked
	}
	switch {
	case bits&^(uint32(tracked)|untracked) != 0 || states == 0:
		return nil
	case !negated:
		return ruleset.Not{Match: states}
	}
	return states
}

// translated reads the bits of a connection's status for address translation (enum ip_conntrack_status).
func translated(bits uint32, not bool) ruleset.Match {
	const source, destination = 1 << 4, 1 << 5
	var states ruleset.States
	if bits&source != 0 {
		states |= ruleset.StateSNAT
	}
	if bits&destination != 0 {
		states |= ruleset.StateDNAT
	}
	switch {
	case states == 0 || bits&^(source|destination) != 0:
		return nil
	case not:
		return ruleset.Not{Match: states}
	}
	return states
}

// protocolOffset and nextHeader are the offsets of the protocol in the headers of IPv4 and IPv6.
const (
	fragments      = 6
	protocolOffset = 9
	nextHeader     = 6
)

// header compares an address, the first bytes of an address, an address with a mask, or the protocol.
func (d *decoder) header(l load, negated bool, first, last []byte) ruleset.Match {
	same := bytes.Equal(first, last)
	if d.family == ruleset.Inet || d.family == ruleset.Netdev {
		return nil
	}
	if at := map[ruleset.Family]uint32{ruleset.IPv4: protocolOffset, ruleset.IPv6: nextHeader}[d.family]; l.offset == at && len(first) == 1 && same && l.mask == nil {
		return d.ofProtocol(first[0], negated)
	}
	if d.family == ruleset.IPv4 && l.offset == fragments && same && bytes.Equal(l.mask, []byte{0x1f, 0xff}) && len(bytes.Trim(first, "\x00")) == 0 {
		return negatable(ruleset.Absent{Text: "ip frag-off & 0x1fff != 0"}, !negated) // conntrack has reassembled the fragments
	}
	source, destination, length := nfnetlink.AddressOffsets(d.family == ruleset.IPv6)
	if l.offset != source && l.offset != destination {
		return nil
	}
	if same {
		if p, ok := nfnetlink.ReadNetwork(length, first, l.mask); ok && (p.Bits() > 0 || !d.table.IPTables) {
			return ruleset.Network{Prefix: p, Source: l.offset == source, Not: negated}
		}
		return nil
	}
	a, ok := netip.AddrFromSlice(first)
	b, ok2 := netip.AddrFromSlice(last)
	if !ok || !ok2 || l.mask != nil || len(first) != length || len(last) != length {
		return nil
	}
	return ruleset.Addresses{First: a, Last: b, Source: l.offset == source, Not: negated}
}

// transport compares a port or the TCP flags.
func (d *decoder) transport(l load, negated bool, first, last []byte) ruleset.Match {
	switch {
	case l.length == 2 && l.mask == nil && (l.offset == nfnetlink.SourcePortOffset || l.offset == nfnetlink.DestinationPortOffset):
		if d.table.IPTables && d.protocol == 0 {
			d.nft = true
		}
		return ruleset.Port{
			Protocol: d.protocol, Source: l.offset == nfnetlink.SourcePortOffset, Not: negated,
			Range: ruleset.PortRange{First: binary.BigEndian.Uint16(first), Last: binary.BigEndian.Uint16(last)},
		}
	case l.length == 1 && l.offset == nfnetlink.TCPFlagsOffset && d.protocol == ruleset.TCP && bytes.Equal(first, last):
		mask := uint8(math.MaxUint8)
		if l.mask != nil {
			mask = l.mask[0]
		}
		return ruleset.TCPFlags{Mask: mask, Set: first[0], Not: negated}
	}
	return nil
}
