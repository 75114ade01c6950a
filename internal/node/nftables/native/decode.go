package native

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Decode gives a rule's text from its attribute NFTA_RULE_EXPRESSIONS, and whether all of it is understood. The ports
// of a set are given by its name.
func Decode(expressions nfnetlink.Attributes, sets map[string][]uint16) (string, bool) {
	d := &decoder{sets: sets}
	for e := range expressions.All() {
		name, data, ok := expression.Split(e)
		if !ok || d.ended || !d.expression(name, &data) {
			return "", false
		}
	}
	return text(d.terms), expressions.Check() == nil && d.held == nil
}

// Ports reads the elements of a set (NFTA_SET_ELEM_LIST_ELEMENTS). It is false if there is anything but ports.
func Ports(elements nfnetlink.Attributes) ([]uint16, bool) {
	var ports []uint16
	for e := range elements.All() {
		f, ok := expression.Read(e.Value)
		key, ok2 := f.Value(unix.NFTA_SET_ELEM_KEY)
		if !ok || !ok2 || len(key) != 2 || f.Count() != 0 {
			return nil, false
		}
		ports = append(ports, binary.BigEndian.Uint16(key))
	}
	return ports, elements.Check() == nil
}

// load is what the register holds.
type load struct {
	kind           string // meta, ct, payload or value
	key            uint32 // of meta and ct; the base of a payload
	offset, length uint32
	mask, value    []byte
}

// decoder reads expressions in the order in which the kernel evaluates them.
type decoder struct {
	sets  map[string][]uint16
	terms []term
	held  *load
	ended bool
}

func (d *decoder) add(t term) bool {
	d.terms = append(d.terms, t)
	return true
}

// load fills the register, of which nothing may be left.
func (d *decoder) load(register uint32, l load) bool {
	free := d.held == nil && register == expression.Register
	d.held = &l
	return free
}

// take empties the register.
func (d *decoder) take(register uint32) (load, bool) {
	if d.held == nil || register != expression.Register {
		return load{}, false
	}
	l := *d.held
	d.held = nil
	return l, true
}

func (d *decoder) expression(name string, f *expression.Fields) bool {
	switch name {
	case "counter":
		return d.held == nil && d.add(counterTerm{})
	case "meta":
		return d.metaOrCT("meta", f, unix.NFTA_META_KEY, unix.NFTA_META_DREG, unix.NFTA_META_SREG)
	case "ct":
		return d.metaOrCT("ct", f, unix.NFTA_CT_KEY, unix.NFTA_CT_DREG, unix.NFTA_CT_SREG)
	case "payload":
		n, ok := f.Numbers(unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
		return ok && d.load(n[0], load{kind: "payload", key: n[1], offset: n[2], length: n[3]})
	case "bitwise":
		register, mask, ok := f.BitwiseMask()
		if !ok || d.held == nil || d.held.mask != nil || register != expression.Register {
			return false
		}
		d.held.mask = mask
		return true
	case "cmp":
		register, negated, value, ok := f.Comparison()
		l, held := d.take(register)
		return ok && held && d.compare(l, negated, value)
	case "lookup":
		return d.lookup(f)
	case "immediate":
		return d.immediate(f)
	}
	return d.end(name, f)
}

// metaOrCT reads a load, or what sets a mark or a zone.
func (d *decoder) metaOrCT(kind string, f *expression.Fields, key, to, from uint16) bool {
	if n, ok := f.Numbers(key, to); ok {
		return d.load(n[1], load{kind: kind, key: n[0]})
	}
	n, ok := f.Numbers(key, from)
	if !ok {
		return false
	}
	l, held := d.take(n[1])
	return held && l.mask == nil && d.set(kind, n[0], l)
}

func (d *decoder) set(kind string, key uint32, l load) bool {
	s := setTerm{}
	switch {
	case kind == "meta" && key == unix.NFT_META_MARK:
		s.name = "meta mark"
	case kind == "ct" && key == unix.NFT_CT_MARK:
		s.name = "ct mark"
	case kind == "ct" && key == unix.NFT_CT_ZONE:
		s.name = "ct zone"
	default:
		return false
	}
	switch {
	case s.name == "meta mark" && l.kind == "ct" && l.key == unix.NFT_CT_MARK:
		s.from = "ct mark"
	case s.name == "ct mark" && l.kind == "meta" && l.key == unix.NFT_META_MARK:
		s.from = "meta mark"
	case s.name == "ct zone" && l.kind == "value" && len(l.value) == 2:
		s.value = uint32(binary.NativeEndian.Uint16(l.value))
	case s.name == "meta mark" && l.kind == "value" && len(l.value) == 4:
		s.value = binary.NativeEndian.Uint32(l.value)
	default:
		return false
	}
	return d.add(s)
}

// compare reads a match.
func (d *decoder) compare(l load, negated bool, value []byte) bool {
	switch {
	case l.kind == "payload" && int64(l.length) == int64(len(value)):
		return d.payload(l, negated, value)
	case l.kind == "ct" && l.key == unix.NFT_CT_STATE:
		return d.state(l, negated, value)
	case l.mask != nil:
		return false
	}
	for _, n := range numbers {
		if n.expression == l.kind && n.key == l.key {
			return len(value) == 4 && d.add(numberTerm{n.name, negated, binary.NativeEndian.Uint32(value)})
		}
	}
	return l.kind == "meta" && !negated && d.meta(l.key, value)
}

func (d *decoder) meta(key uint32, value []byte) bool {
	switch key {
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
		name := bytes.TrimRight(value, "\x00")
		odd := bytes.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == '"' || r == '*' || r >= 0x7f })
		return len(value) == linkLength && len(name) > 0 && len(name) < linkLength && !odd && d.add(linkTerm{key, string(name)})
	case unix.NFT_META_L4PROTO:
		return len(value) == 1 && protocolName(value[0]) != "" && d.add(protocolTerm{value[0]})
	case unix.NFT_META_NFPROTO:
		for _, ipv6 := range []bool{false, true} {
			if bytes.Equal(value, []byte{familyNumber(ipv6)}) {
				return d.add(familyTerm{ipv6})
			}
		}
	}
	return false
}

// state reads "ct state", which compares what a mask leaves with nothing.
func (d *decoder) state(l load, negated bool, value []byte) bool {
	if len(l.mask) != 4 || !negated || !bytes.Equal(value, make([]byte, 4)) {
		return false
	}
	bits, known := binary.NativeEndian.Uint32(l.mask), uint32(0)
	for _, s := range states {
		known |= s.bit
	}
	return bits != 0 && bits&^known == 0 && d.add(stateTerm{bits})
}

func (d *decoder) payload(l load, negated bool, value []byte) bool {
	switch {
	case l.key == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return d.address(l, negated, value)
	case l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 1:
		reset := []byte{tcpReset}
		is := l.offset == tcpFlagsOffset && !negated && bytes.Equal(l.mask, reset) && bytes.Equal(value, reset)
		return is && d.add(resetTerm{}) && d.implied(tcp)
	case l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 2 && l.mask == nil:
		return d.port(l, portTerm{negated: negated, ports: []uint16{binary.BigEndian.Uint16(value)}})
	}
	return false
}

// address reads a match on an address, whose family must have been asked for just before.
func (d *decoder) address(l load, negated bool, value []byte) bool {
	if len(d.terms) == 0 {
		return false
	}
	family, ok := d.terms[len(d.terms)-1].(familyTerm)
	source, destination, length := expression.AddressOffsets(family.ipv6)
	p, ok2 := expression.ReadNetwork(length, value, l.mask)
	if !ok || !ok2 || l.offset != source && l.offset != destination {
		return false
	}
	d.terms = d.terms[:len(d.terms)-1]
	return d.add(addressTerm{l.offset == source, negated, p})
}

// port reads a match on a port, whose protocol must have been asked for.
func (d *decoder) port(l load, p portTerm) bool {
	if l.offset > 2 || l.offset == 1 {
		return false
	}
	p.source = l.offset == 0
	for _, t := range d.terms {
		switch t := t.(type) {
		case protocolTerm:
			p.protocol = t.number
		case portTerm:
			p.protocol = t.protocol
		}
	}
	return p.protocol != 0 && d.add(p) && d.implied(p.protocol)
}

// implied takes the protocol away that stands just before the last term, which says it as well.
func (d *decoder) implied(number uint8) bool {
	asked := false
	for _, t := range d.terms {
		if p, ok := t.(protocolTerm); ok {
			asked = p.number == number
		} else if p, ok := t.(portTerm); ok {
			asked = asked || p.protocol == number
		}
	}
	last := len(d.terms) - 1
	if last > 0 {
		if _, ok := d.terms[last-1].(protocolTerm); ok {
			d.terms = slices.Delete(d.terms, last-1, last)
		}
	}
	return asked
}

func (d *decoder) lookup(f *expression.Fields) bool {
	ports, known := d.sets[f.Text(unix.NFTA_LOOKUP_SET)]
	register, ok := f.Number(unix.NFTA_LOOKUP_SREG)
	flags, ok2 := f.Number(unix.NFTA_LOOKUP_FLAGS)
	l, held := d.take(register)
	if !known || len(ports) == 0 || !ok || !ok2 || !held || f.Count() != 3 || flags > unix.NFT_LOOKUP_F_INV || l.mask != nil {
		return false
	}
	transport := l.kind == "payload" && l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 2
	return transport && d.port(l, portTerm{negated: flags == unix.NFT_LOOKUP_F_INV, set: true, ports: ports}.canonical())
}

// immediate reads a verdict, or a value for what comes next.
func (d *decoder) immediate(f *expression.Fields) bool {
	if v, ok := f.ReadVerdict(); ok {
		d.ended = true
		return d.held == nil && d.add(verdictTerm(v))
	}
	value, ok := f.Value(unix.NFTA_IMMEDIATE_DATA)
	n, ok2 := f.Numbers(unix.NFTA_IMMEDIATE_DREG)
	return ok && ok2 && d.load(n[0], load{kind: "value", value: value})
}

// end reads what a rule does with a packet at last.
func (d *decoder) end(name string, f *expression.Fields) bool {
	switch name {
	case "redir":
		return d.redirect(f)
	case "tproxy":
		n, ok := f.Numbers(tproxyFamily, tproxyPort)
		port, ok2 := d.portValue(n[1])
		ipv6 := n[0] == unix.NFPROTO_IPV6
		return ok && ok2 && (ipv6 || n[0] == unix.NFPROTO_IPV4) && d.add(tproxyTerm{ipv6, port})
	case "reject":
		d.ended = true
		code := f.Raw(unix.NFTA_REJECT_ICMP_CODE)
		kind, ok := f.Number(unix.NFTA_REJECT_TYPE)
		if !ok || d.held != nil || f.Count() != 1+len(code) || len(code) > 1 {
			return false
		}
		r := rejectTerm{kind: kind}
		if len(code) == 1 {
			r.code = uint32(code[0])
		}
		return r.String() != "" && d.add(r)
	}
	return false
}

// redirect reads a redirection to one port. Kernels repeat the port as the end of a range.
func (d *decoder) redirect(f *expression.Fields) bool {
	d.ended = true
	if last, ranged := f.Take(unix.NFTA_REDIR_REG_PROTO_MAX); ranged && last != expression.Register {
		return false
	}
	n, ok := f.Numbers(unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_FLAGS)
	port, ok2 := d.portValue(n[0])
	return ok && ok2 && n[1] == rangeProto && d.add(redirectTerm{port})
}

// portValue takes a port out of the register.
func (d *decoder) portValue(register uint32) (uint16, bool) {
	l, held := d.take(register)
	if !held || l.kind != "value" || len(l.value) != 2 {
		return 0, false
	}
	return binary.BigEndian.Uint16(l.value), true
}
