package native

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Decode is the reverse of Encode: it returns the rule of an attribute NFTA_RULE_EXPRESSIONS, with the ports of its sets. It
// returns false for a rule that has any other expression; such a rule may do anything. A rule that differs from Encode's only in
// counters and in repeated comparisons has the same meaning, but not the same Fingerprint.
func Decode(expressions nfnetlink.Attributes, sets map[string]Set) (ruleset.Rule, bool) {
	d := decoder{sets: sets}
	for e := range expressions.All() {
		name, f, ok := nfnetlink.SplitExpression(e)
		if !ok || !d.expression(name, f) {
			return ruleset.Rule{}, false
		}
	}
	if expressions.Check() != nil || d.target == nil || d.loaded != nil || d.value != nil {
		return ruleset.Rule{}, false
	}
	if _, handsOver := d.target.(ruleset.TProxy); handsOver && !d.accepted {
		return ruleset.Rule{}, false
	}
	return ruleset.NFT("", d.target, d.matches...), true
}

// decoder reads expressions in the order in which the kernel evaluates them. All of them use one register.
type decoder struct {
	sets map[string]Set
	// loaded is what the register was loaded with, to be compared or stored; value is a constant in it.
	loaded *load
	value  []byte

	matches  []ruleset.Match
	protocol uint8
	family   ruleset.Family
	target   ruleset.Target
	accepted bool // behind tproxy
}

// load is a part of the packet (base, offset, length), or a key of meta or ct.
type load struct {
	from                      string
	key, base, offset, length uint32
	mask                      []byte
	// least is the low end of a range with which it was compared.
	least []byte
}

func (d *decoder) expression(name string, f nfnetlink.Fields) bool {
	_, handedOver := d.target.(ruleset.TProxy)
	if d.target != nil && !handedOver {
		return false
	}
	switch name {
	case "counter":
		return true
	case "meta", "ct":
		return d.metadata(name, f)
	case "payload":
		n, ok := f.Numbers(unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
		return ok && d.load(n[0], load{from: name, base: n[1], offset: n[2], length: n[3]})
	case "bitwise":
		register, mask, ok := f.BitwiseMask()
		if !ok || register != nfnetlink.Register || d.loaded == nil || d.loaded.mask != nil {
			return false
		}
		d.loaded.mask = mask
		return true
	case "cmp":
		register, op, value, ok := f.Comparison()
		return ok && register == nfnetlink.Register && d.loaded != nil && d.comparison(op, value)
	case "lookup":
		return d.lookup(f)
	case "immediate":
		return d.immediate(f)
	}
	return d.act(name, f)
}

// comparison reads one comparison of what was loaded: of the two of a range, the first keeps it for the second.
func (d *decoder) comparison(op uint32, value []byte) bool {
	l := *d.loaded
	switch first := l.least; {
	case op == unix.NFT_CMP_GTE && first == nil && l.from == "payload":
		d.loaded.least = value
		return true
	case op == unix.NFT_CMP_LTE && first != nil:
		d.loaded = nil
		return d.transport(l, false, first, value)
	case first != nil:
		return false
	}
	d.loaded = nil
	return op <= unix.NFT_CMP_NEQ && d.compare(l, op == unix.NFT_CMP_NEQ, value)
}

func (d *decoder) load(register uint32, l load) bool {
	free := register == nfnetlink.Register && d.loaded == nil && d.value == nil
	d.loaded = &l
	return free
}

// metadata reads a load of meta or ct, or a store of what was loaded.
func (d *decoder) metadata(name string, f nfnetlink.Fields) bool {
	kind, into, from := uint16(unix.NFTA_META_KEY), uint16(unix.NFTA_META_DREG), uint16(unix.NFTA_META_SREG)
	if name == "ct" {
		kind, into, from = unix.NFTA_CT_KEY, unix.NFTA_CT_DREG, unix.NFTA_CT_SREG
	}
	if n, ok := f.Numbers(kind, into); ok {
		return d.load(n[1], load{from: name, key: n[0]})
	}
	n, ok := f.Numbers(kind, from)
	return ok && n[1] == nfnetlink.Register && d.store(name, n[0])
}

// store reads what is set by a constant or by another mark.
func (d *decoder) store(name string, key uint32) bool {
	value, l := d.value, d.loaded
	d.value, d.loaded = nil, nil
	mark := name == "meta" && key == unix.NFT_META_MARK
	connection := name == "ct" && key == unix.NFT_CT_MARK
	switch {
	case mark && len(value) == 4:
		number := binary.NativeEndian.Uint32(value)
		if t, handsOver := d.target.(ruleset.TProxy); handsOver {
			t.Mark = number
			d.target = t
			return true
		}
		d.target = ruleset.SetMark(number)
	case name == "ct" && key == unix.NFT_CT_ZONE && len(value) == 2 && d.target == nil:
		d.target = ruleset.Zone(binary.NativeEndian.Uint16(value))
	case l == nil || l.mask != nil || d.target != nil:
		return false
	case mark && l.from == "ct" && l.key == unix.NFT_CT_MARK:
		d.target = ruleset.RestoreMark{}
	case connection && l.from == "meta" && l.key == unix.NFT_META_MARK:
		d.target = ruleset.SaveMark{}
	default:
		return false
	}
	return true
}

func (d *decoder) add(m ruleset.Match) bool {
	d.matches = append(d.matches, m)
	return d.target == nil
}

func (d *decoder) compare(l load, negated bool, value []byte) bool {
	switch {
	case l.from == "ct":
		return d.connection(l, negated, value)
	case l.from == "payload" && l.base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return d.address(l, negated, value)
	case l.from == "payload":
		return d.transport(l, negated, value, value)
	case l.mask != nil:
		return false
	}
	switch l.key {
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
		name, rest, whole := bytes.Cut(value, []byte{0})
		odd := bytes.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '"' || r == '+' })
		return whole && !odd && len(name) > 0 && len(bytes.Trim(rest, "\x00")) == 0 && len(value) == nameLength &&
			d.add(ruleset.Interface{Name: string(name), Out: l.key == unix.NFT_META_OIFNAME, Not: negated})
	case unix.NFT_META_NFPROTO:
		return !negated && len(value) == 1 && d.setFamily(value[0])
	case unix.NFT_META_L4PROTO:
		return d.setProtocol(negated, value)
	case unix.NFT_META_SKUID, unix.NFT_META_SKGID:
		return len(value) == 4 &&
			d.add(ruleset.Owner{ID: binary.NativeEndian.Uint32(value), Group: l.key == unix.NFT_META_SKGID, Not: negated})
	case unix.NFT_META_MARK:
		return len(value) == 4 && d.add(ruleset.Mark{Value: binary.NativeEndian.Uint32(value), Not: negated})
	}
	return false
}

func (d *decoder) connection(l load, negated bool, value []byte) bool {
	switch {
	case len(value) != 4:
		return false
	case l.key == unix.NFT_CT_MARK && l.mask == nil:
		return d.add(ruleset.Mark{Value: binary.NativeEndian.Uint32(value), Connection: true, Not: negated})
	case l.key == unix.NFT_CT_STATE && len(l.mask) == 4 && negated && binary.NativeEndian.Uint32(value) == 0:
		const all = ruleset.StateInvalid | ruleset.StateEstablished | ruleset.StateRelated | ruleset.StateNew
		states := binary.NativeEndian.Uint32(l.mask)
		return states&^uint32(all) == 0 && d.add(ruleset.States(states)) //nolint:gosec // four bits
	}
	return false
}

func (d *decoder) setFamily(number byte) bool {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if protocolFamily(f) == number && (d.family == 0 || d.family == f) {
			d.family = f
			return d.add(ruleset.OfFamily(f))
		}
	}
	return false
}

// setProtocol adds a match that one on a port replaces.
func (d *decoder) setProtocol(negated bool, value []byte) bool {
	if len(value) != 1 || d.protocol != 0 || negated {
		return false
	}
	d.protocol = value[0]
	return d.add(ruleset.Protocol{Number: value[0]})
}

// address reads the comparison of an address, of which the family was compared before. That comparison is part of the match.
func (d *decoder) address(l load, negated bool, value []byte) bool {
	source, destination, length := nfnetlink.AddressOffsets(d.family == ruleset.IPv6)
	p, ok := nfnetlink.ReadNetwork(length, value, l.mask)
	if !ok || d.family == 0 || int64(l.length) != int64(len(value)) || l.offset != source && l.offset != destination {
		return false
	}
	i := slices.IndexFunc(d.matches, func(m ruleset.Match) bool { return m == ruleset.Match(ruleset.OfFamily(d.family)) })
	if i >= 0 {
		d.matches = slices.Delete(d.matches, i, i+1)
	}
	return d.add(ruleset.Network{Prefix: p, Source: l.offset == source, Not: negated})
}

// transport reads the comparison of a port with the ends of a range, or of the flag RST, of which the protocol was compared before.
func (d *decoder) transport(l load, negated bool, first, last []byte) bool {
	if l.base != unix.NFT_PAYLOAD_TRANSPORT_HEADER || d.protocol != ruleset.TCP && d.protocol != ruleset.UDP ||
		int64(l.length) != int64(len(first)) || len(first) != len(last) {
		return false
	}
	d.impliedProtocol()
	switch reset := []byte{nfnetlink.TCPReset}; {
	case l.length == 2 && l.mask == nil && (l.offset == nfnetlink.SourcePortOffset || l.offset == nfnetlink.DestinationPortOffset):
		return d.add(ruleset.Port{
			Protocol: d.protocol, Source: l.offset == nfnetlink.SourcePortOffset, Not: negated,
			Range: ruleset.PortRange{First: binary.BigEndian.Uint16(first), Last: binary.BigEndian.Uint16(last)},
		})
	case l.offset == nfnetlink.TCPFlagsOffset && d.protocol == ruleset.TCP && !negated && bytes.Equal(l.mask, reset) && bytes.Equal(first, reset):
		return d.add(ruleset.Reset{})
	}
	return false
}

// impliedProtocol drops a match on the protocol that the next match implies.
func (d *decoder) impliedProtocol() {
	last := len(d.matches) - 1
	if last >= 0 && d.matches[last] == ruleset.Match(ruleset.Protocol{Number: d.protocol}) {
		d.matches = d.matches[:last]
	}
}

// lookup reads a lookup of the destination port in a set of two.
func (d *decoder) lookup(f nfnetlink.Fields) bool {
	l, ports := d.loaded, d.sets[f.Text(unix.NFTA_LOOKUP_SET)]
	d.loaded = nil
	register, ok := f.Number(unix.NFTA_LOOKUP_SREG)
	flags, _ := f.Number(unix.NFTA_LOOKUP_FLAGS)
	if !ok || register != nfnetlink.Register || l == nil || l.from != "payload" || l.base != unix.NFT_PAYLOAD_TRANSPORT_HEADER ||
		l.offset != nfnetlink.DestinationPortOffset || l.length != 2 || l.mask != nil || l.least != nil || len(ports) != 2 ||
		d.protocol != ruleset.TCP && d.protocol != ruleset.UDP || flags&^unix.NFT_LOOKUP_F_INV != 0 {
		return false
	}
	d.impliedProtocol()
	return d.add(ruleset.Ports{Protocol: d.protocol, List: [2]uint16{min(ports[0], ports[1]), max(ports[0], ports[1])}, Not: flags != 0})
}

// immediate reads a verdict or a constant.
func (d *decoder) immediate(f nfnetlink.Fields) bool {
	if v, ok := f.ReadVerdict(); ok {
		if _, handedOver := d.target.(ruleset.TProxy); handedOver {
			accepts := v.Code == nfnetlink.Accept && !d.accepted
			d.accepted = true
			return accepts
		}
		d.target = map[int32]ruleset.Target{
			nfnetlink.Drop: ruleset.Drop, nfnetlink.Accept: ruleset.Accept, nfnetlink.Return: ruleset.Return,
			nfnetlink.Jump: ruleset.Jump{Chain: v.Chain}, nfnetlink.Goto: ruleset.Jump{Chain: v.Chain, Goto: true},
		}[v.Code]
		return d.target != nil
	}
	register, ok := f.Number(unix.NFTA_IMMEDIATE_DREG)
	value, ok2 := f.Value(unix.NFTA_IMMEDIATE_DATA)
	free := d.value == nil && d.loaded == nil
	d.value = value
	return ok && ok2 && free && register == nfnetlink.Register && len(value) > 0
}

// act reads redir, tproxy and reject.
func (d *decoder) act(name string, f nfnetlink.Fields) bool {
	if d.target != nil {
		return false
	}
	value := d.value
	d.value = nil
	switch name {
	case "redir":
		register, ok := f.Number(unix.NFTA_REDIR_REG_PROTO_MIN)
		if !ok || register != nfnetlink.Register || len(value) != 2 {
			return false
		}
		d.target = ruleset.RedirectTo(binary.BigEndian.Uint16(value))
		return true
	case "tproxy":
		n, ok := f.Numbers(tproxyFamily, tproxyPort)
		if !ok || n[1] != nfnetlink.Register || len(value) != 2 {
			return false
		}
		t := ruleset.TProxy{Family: ruleset.IPv4, Port: binary.BigEndian.Uint16(value)}
		if n[0] == uint32(protocolFamily(ruleset.IPv6)) {
			t.Family = ruleset.IPv6
		}
		d.target = t
		return n[0] == uint32(protocolFamily(t.Family))
	case "reject":
		kind, ok := f.Number(unix.NFTA_REJECT_TYPE)
		if d.target = ruleset.PortUnreachable; kind == unix.NFT_REJECT_TCP_RST {
			d.target = ruleset.TCPReset
		} else if d.family == ruleset.IPv6 {
			d.target = ruleset.PortUnreachableV6
		}
		return ok && value == nil
	}
	return false
}
