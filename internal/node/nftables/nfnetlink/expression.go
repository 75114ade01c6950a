package nfnetlink

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Register is the register of all loads.
const Register = unix.NFT_REG_1

// The expressions of rules, which load, compare and act, with the attributes of
// include/uapi/linux/netfilter/nf_tables.h as nft and iptables-nft write them.

// Expression adds an expression with the attributes that fill adds.
func (b *Buffer) Expression(name string, fill func()) {
	b.Nested(unix.NFTA_LIST_ELEM, func() {
		b.String(unix.NFTA_EXPR_NAME, name)
		b.Nested(unix.NFTA_EXPR_DATA, fill)
	})
}

// Data adds a value in a nested attribute.
func (b *Buffer) Data(kind uint16, value []byte) {
	b.Nested(kind, func() { b.Attribute(unix.NFTA_DATA_VALUE, value) })
}

// Meta loads metadata of the packet (NFT_META_…).
func (b *Buffer) Meta(key uint32) {
	b.Expression("meta", func() {
		b.Uint32(unix.NFTA_META_KEY, key)
		b.Uint32(unix.NFTA_META_DREG, Register)
	})
}

// SetMeta sets metadata of the packet from the register.
func (b *Buffer) SetMeta(key uint32) {
	b.Expression("meta", func() {
		b.Uint32(unix.NFTA_META_KEY, key)
		b.Uint32(unix.NFTA_META_SREG, Register)
	})
}

// Immediate loads a value.
func (b *Buffer) Immediate(value []byte) {
	b.Expression("immediate", func() {
		b.Uint32(unix.NFTA_IMMEDIATE_DREG, Register)
		b.Data(unix.NFTA_IMMEDIATE_DATA, value)
	})
}

// Family compares the packet's family.
func (b *Buffer) Family(ipv6 bool) {
	b.Meta(unix.NFT_META_NFPROTO)
	b.Compare(false, []byte{ProtocolFamily(ipv6)})
}

// ProtocolFamily returns the kernel's number of a family (NFPROTO_…).
func ProtocolFamily(ipv6 bool) byte {
	if ipv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// Payload loads a part of the packet.
func (b *Buffer) Payload(base, offset uint32, length int) {
	b.Expression("payload", func() {
		b.Uint32(unix.NFTA_PAYLOAD_DREG, Register)
		b.Uint32(unix.NFTA_PAYLOAD_BASE, base)
		b.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		b.Uint32(unix.NFTA_PAYLOAD_LEN, uint32(length)) //nolint:gosec // at most the length of an address
	})
}

// Offsets in the TCP header (UDP has the same first two), and the RST bit.
const (
	SourcePortOffset      = 0
	DestinationPortOffset = 2
	TCPFlagsOffset        = 13
	TCPReset              = 4
)

// Port compares a TCP or UDP port.
func (b *Buffer) Port(source, negated bool, number uint16) {
	b.LoadPort(source)
	b.Compare(negated, PortValue(number))
}

// PortValue returns a port in network byte order.
func PortValue(number uint16) []byte { return binary.BigEndian.AppendUint16(nil, number) }

// LoadPort loads the source or the destination port.
func (b *Buffer) LoadPort(source bool) {
	offset := uint32(DestinationPortOffset)
	if source {
		offset = SourcePortOffset
	}
	b.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, 2)
}

// Reset ends the rule unless the TCP packet has the RST flag.
func (b *Buffer) Reset() {
	b.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, TCPFlagsOffset, 1)
	b.And([]byte{TCPReset})
	b.Compare(false, []byte{TCPReset})
}

// And applies a mask to the register.
func (b *Buffer) And(mask []byte) { b.Bitwise(mask, make([]byte, len(mask))) }

// Bitwise applies a mask to the register and inverts the bits of xor.
func (b *Buffer) Bitwise(mask, xor []byte) {
	b.Expression("bitwise", func() {
		b.Uint32(unix.NFTA_BITWISE_SREG, Register)
		b.Uint32(unix.NFTA_BITWISE_DREG, Register)
		b.Uint32(unix.NFTA_BITWISE_LEN, uint32(len(mask))) //nolint:gosec // at most the length of an address
		b.Data(unix.NFTA_BITWISE_MASK, mask)
		b.Data(unix.NFTA_BITWISE_XOR, xor)
	})
}

// Masked ends the rule unless the bits of the mask (all if 0) in a register with a number in host byte order equal the value or, if
// negated, differ from it.
func (b *Buffer) Masked(negated bool, value, mask uint32) {
	if mask != 0 {
		b.And(binary.NativeEndian.AppendUint32(nil, mask))
	}
	b.Compare(negated, binary.NativeEndian.AppendUint32(nil, value))
}

// Compare ends the rule unless the register equals the value or, if negated, differs from it.
func (b *Buffer) Compare(negated bool, value []byte) {
	op := uint32(unix.NFT_CMP_EQ)
	if negated {
		op = unix.NFT_CMP_NEQ
	}
	b.CompareBy(op, value)
}

// CompareBy ends the rule unless the comparison NFT_CMP_… of the register with the value holds.
func (b *Buffer) CompareBy(op uint32, value []byte) {
	b.Expression("cmp", func() {
		b.Uint32(unix.NFTA_CMP_SREG, Register)
		b.Uint32(unix.NFTA_CMP_OP, op)
		b.Data(unix.NFTA_CMP_DATA, value)
	})
}

// Between ends the rule unless the register is in the range or, if negated, outside of it.
func (b *Buffer) Between(negated bool, first, last []byte) {
	op := uint32(unix.NFT_RANGE_EQ)
	if negated {
		op = unix.NFT_RANGE_NEQ
	}
	b.Expression("range", func() {
		b.Uint32(unix.NFTA_RANGE_SREG, Register)
		b.Uint32(unix.NFTA_RANGE_OP, op)
		b.Data(unix.NFTA_RANGE_FROM_DATA, first)
		b.Data(unix.NFTA_RANGE_TO_DATA, last)
	})
}

// Network compares the source or the destination address. It loads only the bytes of the prefix if the prefix ends at a
// byte boundary.
func (b *Buffer) Network(source, negated bool, prefix netip.Prefix) {
	prefix = prefix.Masked()
	from, offset, _ := AddressOffsets(prefix.Addr().Is6())
	if source {
		offset = from
	}
	value, bits := prefix.Addr().AsSlice(), prefix.Bits()
	whole := bits%8 == 0 && bits > 0
	if whole {
		value = value[:bits/8]
	}
	b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, len(value))
	if !whole {
		b.And(net.CIDRMask(bits, 8*len(value)))
	}
	b.Compare(negated, value)
}

// ReadNetwork is the reverse of Network: it returns the prefix that value and mask (nil for none) match in an address of length bytes.
func ReadNetwork(length int, value, mask []byte) (netip.Prefix, bool) {
	bits := 8 * len(value)
	if mask != nil {
		ones, all := net.IPMask(mask).Size()
		if len(value) != length || all != 8*length { // a mask with a hole has no size
			return netip.Prefix{}, false
		}
		bits = ones
	}
	if len(value) > length || len(value) == 0 {
		return netip.Prefix{}, false
	}
	a, _ := netip.AddrFromSlice(slices.Concat(value, make([]byte, length-len(value))))
	p := netip.PrefixFrom(a, bits)
	return p, p == p.Masked()
}

// AddressOffsets returns the offsets of both addresses in the network header, and their length.
func AddressOffsets(ipv6 bool) (source, destination uint32, length int) {
	if ipv6 {
		return 8, 24, 16
	}
	return 12, 16, 4
}

// Attributes that golang.org/x/sys/unix lacks (enum nft_tproxy_attributes), and the flag for ports in a
// translation (NF_NAT_RANGE_PROTO_SPECIFIED).
const (
	TProxyFamily  = 1
	TProxyAddress = 2
	TProxyPort    = 3
	NATPorts      = 2
)

// Counter adds a counter that starts at zero.
func (b *Buffer) Counter() {
	b.Expression("counter", func() {
		b.Uint64(unix.NFTA_COUNTER_BYTES, 0)
		b.Uint64(unix.NFTA_COUNTER_PACKETS, 0)
	})
}

// Verdict is a verdict of nf_tables; Chain is set for jump and goto.
type Verdict struct {
	Code  int32
	Chain string
}

// Codes of verdicts, from include/uapi/linux/netfilter.h and enum nft_verdicts.
const (
	Drop   = 0
	Accept = 1
	Jump   = unix.NFT_JUMP
	Goto   = unix.NFT_GOTO
	Return = unix.NFT_RETURN
)

// Verdict ends the rule with a verdict.
func (b *Buffer) Verdict(v Verdict) {
	b.Expression("immediate", func() {
		b.Uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		b.Nested(unix.NFTA_IMMEDIATE_DATA, func() {
			b.Nested(unix.NFTA_DATA_VERDICT, func() {
				b.Uint32(unix.NFTA_VERDICT_CODE, uint32(v.Code)) //nolint:gosec // two's complement
				if v.Chain != "" {
					b.String(unix.NFTA_VERDICT_CHAIN, v.Chain)
				}
			})
		})
	})
}

// SplitExpression returns the name and the attributes of an element of a rule's expressions. ok is false if the element has other
// attributes. data is empty for an expression without attributes.
func SplitExpression(element Attribute) (name string, data Fields, ok bool) {
	parts, complete := ReadFields(element.Value)
	data, understood := ReadFields(parts.Raw(unix.NFTA_EXPR_DATA))
	bare := parts.count == 1 || parts.count == 2 && parts.set[unix.NFTA_EXPR_DATA]
	ok = complete && understood && bare && parts.set[unix.NFTA_EXPR_NAME] && element.Kind == unix.NFTA_LIST_ELEM
	return parts.Text(unix.NFTA_EXPR_NAME), data, ok
}

// MaxFields is one more than the highest kind in Fields.
const MaxFields = 12

// Fields holds the attributes of an expression by kind. No decoded expression has higher kinds.
type Fields struct {
	byKind [MaxFields]Attribute
	set    [MaxFields]bool
	count  int
}

// ReadFields reads attributes. It returns false if they are incomplete, one is repeated, or a kind is above the highest.
func ReadFields(data Attributes) (Fields, bool) {
	var f Fields
	for a := range data.All() {
		if int(a.Kind) >= len(f.byKind) || f.set[a.Kind] {
			return f, false
		}
		f.byKind[a.Kind], f.set[a.Kind] = a, true
		f.count++
	}
	return f, data.Check() == nil
}

// Count returns the number of remaining attributes.
func (f *Fields) Count() int { return f.count }

// Raw returns the bytes of an attribute.
func (f *Fields) Raw(kind uint16) []byte { return f.byKind[kind].Value }

// Text returns an attribute that is a string.
func (f *Fields) Text(kind uint16) string { return f.byKind[kind].Text() }

// Number returns an attribute that is a number.
func (f *Fields) Number(kind uint16) (uint32, bool) { return f.byKind[kind].Uint32() }

// drop removes an attribute after it was read.
func (f *Fields) drop(kind uint16) {
	f.byKind[kind], f.set[kind] = Attribute{}, false
	f.count--
}

// Numbers returns the values of the kinds, at most four. ok is false if other attributes remain.
func (f *Fields) Numbers(kinds ...uint16) (out [4]uint32, ok bool) {
	for i, k := range kinds {
		if out[i], ok = f.Number(k); !ok {
			return out, false
		}
	}
	return out, f.count == len(kinds)
}

// Value returns a value and removes its attribute.
func (f *Fields) Value(kind uint16) ([]byte, bool) {
	if !f.set[kind] {
		return nil, false
	}
	inner, complete := ReadFields(f.Raw(kind))
	f.drop(kind)
	return inner.Raw(unix.NFTA_DATA_VALUE), complete && inner.set[unix.NFTA_DATA_VALUE] && inner.count == 1
}

// BitwiseOp is NFTA_BITWISE_OP, whose value 0 is NFT_BITWISE_BOOL.
const BitwiseOp = 6

// Bitwise reads a bitwise expression that applies a mask and then inverts the bits of xor. Kernels from 5.6 on name
// the operation; 0 is the only operation of earlier kernels.
func (f *Fields) Bitwise() (source uint32, mask, xor []byte, ok bool) {
	if op, named := f.Number(BitwiseOp); named && op == 0 {
		f.drop(BitwiseOp)
	}
	mask, ok = f.Value(unix.NFTA_BITWISE_MASK)
	xor, ok2 := f.Value(unix.NFTA_BITWISE_XOR)
	n, ok3 := f.Numbers(unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG, unix.NFTA_BITWISE_LEN)
	return n[0], mask, xor, ok && ok2 && ok3 && int64(n[2]) == int64(len(mask)) && len(mask) == len(xor)
}

// Comparison reads a cmp expression. The operation is NFT_CMP_….
func (f *Fields) Comparison() (register, op uint32, value []byte, ok bool) {
	value, ok = f.Value(unix.NFTA_CMP_DATA)
	n, ok2 := f.Numbers(unix.NFTA_CMP_SREG, unix.NFTA_CMP_OP)
	return n[0], n[1], value, ok && ok2
}

// Range reads a range expression.
func (f *Fields) Range() (register uint32, negated bool, first, last []byte, ok bool) {
	first, ok = f.Value(unix.NFTA_RANGE_FROM_DATA)
	last, ok2 := f.Value(unix.NFTA_RANGE_TO_DATA)
	n, ok3 := f.Numbers(unix.NFTA_RANGE_SREG, unix.NFTA_RANGE_OP)
	return n[0], n[1] == unix.NFT_RANGE_NEQ, first, last, ok && ok2 && ok3 && n[1] <= unix.NFT_RANGE_NEQ
}

// ReadVerdict reads an immediate expression with a verdict.
func (f *Fields) ReadVerdict() (Verdict, bool) {
	register, ok := f.Number(unix.NFTA_IMMEDIATE_DREG)
	outer, ok2 := ReadFields(f.Raw(unix.NFTA_IMMEDIATE_DATA))
	v, ok3 := ReadData(outer)
	ok = ok && ok2 && ok3 && register == unix.NFT_REG_VERDICT && f.count == 2 && outer.count == 1
	return v, ok && v.Code != unix.NFT_CONTINUE
}

// ReadData reads data with a verdict, as in the elements of a map.
func ReadData(data Fields) (v Verdict, ok bool) {
	inner, complete := ReadFields(data.Raw(unix.NFTA_DATA_VERDICT))
	code, named := inner.Number(unix.NFTA_VERDICT_CODE)
	v = Verdict{int32(code), inner.Text(unix.NFTA_VERDICT_CHAIN)} //nolint:gosec // two's complement
	switch v.Code {
	case Drop, Accept, Return, unix.NFT_CONTINUE:
		ok = v.Chain == "" && inner.count == 1
	case Jump, Goto:
		ok = v.Chain != "" && inner.count == 2
	}
	return v, ok && complete && named
}

// In names a table and the chain or the set in a message about the chain's rules, the set or the set's elements: these attributes have
// the same numbers.
func (b *Buffer) In(table, name string) {
	b.String(unix.NFTA_RULE_TABLE, table)
	b.String(unix.NFTA_RULE_CHAIN, name)
}

// Chain names a chain in a message about it.
func (b *Buffer) Chain(table, name string) {
	b.String(unix.NFTA_CHAIN_TABLE, table)
	b.String(unix.NFTA_CHAIN_NAME, name)
}

// Hook is what makes a chain a base chain.
type Hook struct {
	Number   uint32
	Priority int32
	Type     string
}

// Base makes a chain with the policy accept a base chain.
func (b *Buffer) Base(h Hook) {
	b.Nested(unix.NFTA_CHAIN_HOOK, func() {
		b.Uint32(unix.NFTA_HOOK_HOOKNUM, h.Number)
		b.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority)) //nolint:gosec // two's complement
	})
	b.Uint32(unix.NFTA_CHAIN_POLICY, Accept)
	b.String(unix.NFTA_CHAIN_TYPE, h.Type)
}

// ReadHook returns the hook of a chain, whether the policy is drop, and whether it is a base chain.
func ReadHook(chain Attributes) (h Hook, drops, base bool) {
	nested := Attributes(chain.Get(unix.NFTA_CHAIN_HOOK).Value)
	h.Number, base = nested.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := nested.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, named := chain.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	h.Priority, h.Type = int32(priority), chain.Get(unix.NFTA_CHAIN_TYPE).Text() //nolint:gosec // two's complement
	return h, named && policy == Drop, base
}
