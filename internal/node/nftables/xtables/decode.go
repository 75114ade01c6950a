package xtables

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/fnv"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Decode gives a rule as iptables-save prints it, without "-A CHAIN", from its attributes NFTA_RULE_EXPRESSIONS and
// NFTA_RULE_USERDATA. If something in it is not understood it gives Opaque's text and false.
func Decode(f ruleset.Family, expressions nfnetlink.Attributes, userdata []byte) (string, bool) {
	d := &decoder{rule: rule{family: f}}
	for e := range expressions.All() {
		if !d.expression(e) {
			return Opaque(expressions), false
		}
	}
	if expressions.Check() != nil || d.unused() || !d.portsFit() {
		return Opaque(expressions), false
	}
	if comment, ok := commentIn(userdata); ok {
		d.rule.matches = append(d.rule.matches, comment)
	}
	return d.rule.String(), true
}

// commentIn finds the comment that nft and some versions of iptables keep beside a rule, not in it: records of type,
// length and value, of which type 0 is a comment.
func commentIn(userdata []byte) (match, bool) {
	for len(userdata) >= 2 {
		kind, length := userdata[0], int(userdata[1])
		userdata = userdata[2:]
		if length > len(userdata) {
			break
		}
		if comment, ok := text(userdata[:length]); ok && kind == 0 {
			return printed("-m comment --comment " + quoted(comment)), true
		}
		userdata = userdata[length:]
	}
	return nil, false
}

// Opaque gives a text for a rule that is not understood: the names of its expressions and a digest of all but its
// counters. No rule of iptables reads so, as each begins with "-" or "!". A rule that leads to a chain still ends with
// "-j CHAIN", so that whoever removes the chain sees who needs it.
func Opaque(expressions nfnetlink.Attributes) string {
	var names []string
	digest, end := fnv.New128a(), ""
	for e := range expressions.All() {
		name, data, _ := expression.Split(e)
		if name == "counter" {
			continue
		}
		names = append(names, strings.Join(strings.Fields(name), "_"))
		_, _ = digest.Write(e.Value)
		if v, ok := data.ReadVerdict(); ok && name == "immediate" && chainName(v.Chain) {
			end = " " + verdict(v).String()
		}
	}
	return "[not understood: " + strings.Join(names, " ") + " " + hex.EncodeToString(digest.Sum(nil)) + "]" + end
}

// load is what a register holds: a part of the packet or of what is known about it.
type load struct {
	meta   bool
	key    uint32 // of meta; else the base of the payload
	offset uint32
	length uint32
	mask   []byte // nil is none
	set    bool
	used   bool
}

// decoder reads expressions in the order in which the kernel evaluates them.
type decoder struct {
	rule      rule
	registers [unix.NFT_REG_4 + 1]load
	lost      bool // a register was loaded anew before anything compared it
	ports     bool // the match of ports came as a struct
}

// expression reads one; it is false for what is not understood.
func (d *decoder) expression(element nfnetlink.Attribute) bool {
	name, data, ok := expression.Split(element)
	// Nothing stands behind a target.
	return ok && d.rule.target == nil && d.named(name, &data)
}

func (d *decoder) named(name string, f *expression.Fields) bool {
	switch name {
	case "counter":
		return true
	case "meta":
		return d.meta(f)
	case "payload":
		return d.payload(f)
	case "bitwise":
		return d.bitwise(f)
	case "cmp":
		return d.compare(f)
	case "range":
		return d.between(f)
	case "match":
		return d.match(f)
	case "target":
		return d.target(f)
	case "immediate":
		return d.immediate(f)
	}
	return false
}

// load fills one of the registers of 16 bytes; the smaller ones behind them are parts of these.
func (d *decoder) load(register uint32, l load) bool {
	if register < unix.NFT_REG_1 || register > unix.NFT_REG_4 {
		return false
	}
	d.lost = d.lost || d.registers[register].set && !d.registers[register].used
	l.set = true
	d.registers[register] = l
	return true
}

// unused reports whether something was loaded and never compared: the rule is not what it seems.
func (d *decoder) unused() bool {
	for _, l := range d.registers {
		d.lost = d.lost || l.set && !l.used
	}
	return d.lost
}

func (d *decoder) meta(f *expression.Fields) bool {
	n, ok := f.Numbers(unix.NFTA_META_KEY, unix.NFTA_META_DREG)
	return ok && d.load(n[1], load{meta: true, key: n[0]})
}

func (d *decoder) payload(f *expression.Fields) bool {
	n, ok := f.Numbers(unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
	return ok && d.load(n[0], load{key: n[1], offset: n[2], length: n[3]})
}

func (d *decoder) bitwise(f *expression.Fields) bool {
	register, mask, ok := f.BitwiseMask()
	if !ok {
		return false
	}
	l, held := d.held(register)
	if held {
		l.mask = mask
	}
	return held
}

func isSet(b byte) bool { return b != 0 }

// held gives what a register holds and nothing has compared yet.
func (d *decoder) held(register uint32) (*load, bool) {
	if int64(register) >= int64(len(d.registers)) {
		return nil, false
	}
	l := &d.registers[register]
	return l, l.set && !l.used
}

// take gives what is compared.
func (d *decoder) take(register uint32) (load, bool) {
	l, ok := d.held(register)
	if !ok {
		return load{}, false
	}
	l.used = true
	return *l, true
}

func (d *decoder) compare(f *expression.Fields) bool {
	register, negated, value, ok := f.Comparison()
	if !ok {
		return false
	}
	l, held := d.take(register)
	return held && d.term(l, negated, value)
}

func (d *decoder) between(f *expression.Fields) bool {
	first, ok := f.Value(unix.NFTA_RANGE_FROM_DATA)
	last, ok2 := f.Value(unix.NFTA_RANGE_TO_DATA)
	n, ok3 := f.Numbers(unix.NFTA_RANGE_SREG, unix.NFTA_RANGE_OP)
	if !ok || !ok2 || !ok3 || len(first) != 2 || len(last) != 2 || n[1] != unix.NFT_RANGE_EQ && n[1] != unix.NFT_RANGE_NEQ {
		return false
	}
	l, held := d.take(n[0])
	if !held || l.mask != nil || l.meta || l.key != unix.NFT_PAYLOAD_TRANSPORT_HEADER || l.length != 2 {
		return false
	}
	s := span{binary.BigEndian.Uint16(first), binary.BigEndian.Uint16(last)}
	return s.first != s.last && d.port(l.offset, portMatch{s, true, n[1] == unix.NFT_RANGE_NEQ})
}

// term reads one comparison.
func (d *decoder) term(l load, negated bool, value []byte) bool {
	switch {
	case l.meta:
		return d.metaTerm(l, negated, value)
	case int64(l.length) != int64(len(value)):
		return false
	case l.key == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return d.networkTerm(l, negated, value)
	case l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 2 && l.mask == nil:
		p := binary.BigEndian.Uint16(value)
		return d.port(l.offset, portMatch{span{p, p}, true, negated})
	case l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 1 && l.offset == tcpFlagsOffset && len(l.mask) == 1:
		return d.flags(flagMatch{l.mask[0], value[0], true, negated})
	}
	return false
}

func (d *decoder) metaTerm(l load, negated bool, value []byte) bool {
	if l.key == unix.NFT_META_MARK {
		m := mark{match: "mark", mask: allBits, negated: negated}
		if l.mask != nil {
			m.mask = binary.NativeEndian.Uint32(slices.Concat(l.mask, make([]byte, 4)))
		}
		if len(value) != 4 || l.mask != nil && (len(l.mask) != 4 || m.mask == allBits) {
			return false
		}
		m.value = binary.NativeEndian.Uint32(value)
		d.rule.matches = append(d.rule.matches, m)
		return true
	}
	if l.mask != nil {
		return false
	}
	switch l.key {
	case unix.NFT_META_IIFNAME:
		return d.link(&d.rule.in, negated, value)
	case unix.NFT_META_OIFNAME:
		return d.link(&d.rule.out, negated, value)
	case unix.NFT_META_L4PROTO:
		return d.protocol(negated, value)
	}
	return false
}

// link reads the name of an interface: with a zero byte behind it it is whole, else only a beginning.
func (d *decoder) link(to *link, negated bool, value []byte) bool {
	name, behind, whole := bytes.Cut(value, []byte{0})
	printable := !bytes.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f })
	if to.name != "" || len(name) == 0 || slices.ContainsFunc(behind, isSet) || !printable || whole && bytes.HasSuffix(name, []byte("+")) {
		return false
	}
	*to = link{string(name), negated}
	if !whole {
		to.name += "+"
	}
	return len(to.name) <= maxLink+1
}

func (d *decoder) protocol(negated bool, value []byte) bool {
	if d.rule.protocol.set || len(value) != 1 {
		return false
	}
	d.rule.protocol = protocol{value[0], true, negated}
	return true
}

// protocolOffset is the place of the protocol in the header of IPv4, which versions before 1.8.3 compare.
const protocolOffset = 9

func (d *decoder) networkTerm(l load, negated bool, value []byte) bool {
	source, destination, _ := expression.AddressOffsets(d.rule.family == ruleset.IPv6)
	switch {
	case l.offset == source:
		return d.network(&d.rule.source, l, negated, value)
	case l.offset == destination:
		return d.network(&d.rule.destination, l, negated, value)
	case l.offset == protocolOffset && d.rule.family == ruleset.IPv4 && l.mask == nil:
		return d.protocol(negated, value)
	}
	return false
}

// network reads an address, or its first bytes, or what a mask leaves of it.
func (d *decoder) network(to *network, l load, negated bool, value []byte) bool {
	_, _, length := expression.AddressOffsets(d.rule.family == ruleset.IPv6)
	p, ok := expression.ReadNetwork(length, value, l.mask)
	first := !to.prefix.IsValid()
	*to = network{p, negated}
	return first && ok && p.Bits() > 0
}

// changePorts gives the rule's match of the protocol to change. iptables prints the comparisons of one header as one match.
func (d *decoder) changePorts(change func(*ports) bool) bool {
	number := d.rule.protocol.number
	if d.ports {
		return false
	}
	for i, m := range d.rule.matches {
		if p, ok := m.(ports); ok {
			ok = p.protocol == number && change(&p)
			d.rule.matches[i] = p
			return ok
		}
	}
	p := ports{protocol: number}
	d.rule.matches = append(d.rule.matches, p)
	ok := change(&p)
	d.rule.matches[len(d.rule.matches)-1] = p
	return ok
}

func (d *decoder) port(offset uint32, m portMatch) bool {
	return d.changePorts(func(p *ports) bool {
		to := &p.source
		if offset == destinationPortOffset {
			to = &p.destination
		}
		if to.set || offset != sourcePortOffset && offset != destinationPortOffset {
			return false
		}
		*to = m
		return true
	})
}

func (d *decoder) flags(f flagMatch) bool {
	return f.mask < 1<<6 && f.value < 1<<6 && d.changePorts(func(p *ports) bool {
		first := !p.flags.set
		p.flags = f
		return first && p.protocol == tcp
	})
}

// portsFit reports whether the rule looks at headers of the one protocol it is for.
func (d *decoder) portsFit() bool {
	for _, m := range d.rule.matches {
		p, ok := m.(ports)
		if ok && (d.rule.protocol != protocol{number: p.protocol, set: true} || p.protocol != tcp && p.protocol != udp) {
			return false
		}
	}
	return true
}

// extension reads name, revision and struct of a match or target of x_tables.
func extension(f *expression.Fields) (k key, info []byte, ok bool) {
	// Both have the same numbers: NFTA_MATCH_NAME, _REV, _INFO and NFTA_TARGET_NAME, _REV, _INFO.
	k.revision, ok = f.Number(unix.NFTA_MATCH_REV)
	k.name = f.Text(unix.NFTA_MATCH_NAME)
	return k, f.Raw(unix.NFTA_MATCH_INFO), ok && f.Count() == 3
}

// key names a match or target with the layout of its struct.
type key struct {
	name     string
	revision uint32
}

func (d *decoder) match(f *expression.Fields) bool {
	k, info, ok := extension(f)
	if !ok {
		return false
	}
	m, ok := decodeMatch(k, info)
	if p, isPorts := m.(ports); ok && isPorts {
		// A second look at the same header is printed as a second match; nothing here writes that.
		d.ports = true
		ok = !slices.ContainsFunc(d.rule.matches, func(m match) bool { _, twice := m.(ports); return twice })
		d.rule.matches = append(d.rule.matches, p)
		return ok
	}
	d.rule.matches = append(d.rule.matches, m)
	return ok
}

func decodeMatch(k key, info []byte) (match, bool) {
	switch k {
	case key{"tcp", 0}:
		return decodePorts(tcp, info)
	case key{"udp", 0}:
		return decodePorts(udp, info)
	case key{"multiport", 1}:
		return decodeMultiport(info)
	case key{"owner", 1}:
		return decodeOwner(info)
	case key{"mark", 1}, key{"connmark", 1}:
		return decodeMark(k.name, info)
	case key{"conntrack", 3}:
		return decodeConntrack(info)
	case key{"comment", 0}:
		return decodeComment(info)
	case key{"addrtype", 1}:
		return decodeAddressType(info)
	case key{"socket", 1}, key{"socket", 2}, key{"socket", 3}:
		return decodeSocket(info)
	}
	return nil, false
}

func (d *decoder) target(f *expression.Fields) bool {
	k, info, ok := extension(f)
	if !ok {
		return false
	}
	d.rule.target, ok = decodeTarget(d.rule.family, k, info)
	return ok
}

func decodeTarget(f ruleset.Family, k key, info []byte) (target, bool) {
	switch k {
	case key{"REDIRECT", 0}:
		return decodeRedirect(f, info)
	case key{"MARK", 2}:
		return decodeSetMark(info)
	case key{"CONNMARK", 1}, key{"CONNMARK", 2}:
		return decodeSetConnmark(k.revision == 1, info)
	case key{"TPROXY", 1}:
		return decodeTPROXY(f, info)
	case key{"CT", 1}, key{"CT", 2}:
		return decodeCT(info)
	case key{"REJECT", 0}:
		return decodeReject(f, info)
	case key{"DNAT", 0}, key{"DNAT", 1}, key{"DNAT", 2}:
		return decodeNAT(f, "-j DNAT --to-destination ", info)
	case key{"SNAT", 0}, key{"SNAT", 1}, key{"SNAT", 2}:
		return decodeNAT(f, "-j SNAT --to-source ", info)
	case key{"MASQUERADE", 0}:
		return decodeMasquerade(f, info)
	case key{"LOG", 0}:
		return decodeLog(info)
	}
	return nil, false
}

func (d *decoder) immediate(f *expression.Fields) bool {
	v, ok := f.ReadVerdict()
	d.rule.target = verdict(v)
	return ok && (v.Chain == "" || chainName(v.Chain))
}

// chainName reports whether iptables could have a chain of that name: not one that it takes for a target, or that would
// end early or be quoted in a line of text.
func chainName(name string) bool {
	if _, taken := verdictCode(name); taken || name == "" {
		return false
	}
	odd := func(r rune) bool { return r <= ' ' || r == '"' || r == '\'' || r == '\\' || r >= 0x7f }
	return strings.IndexFunc(name, odd) < 0 && !strings.HasPrefix(name, "-") && !strings.HasPrefix(name, "!") &&
		!slices.Contains(targetNames, name)
}

// targetNames are those that may stand behind -j and are no chain.
var targetNames = []string{ //nolint:gochecknoglobals // a constant table
	"REDIRECT", "MARK", "CONNMARK", "TPROXY", "CT", "REJECT", "DNAT", "SNAT", "MASQUERADE", "LOG",
}
