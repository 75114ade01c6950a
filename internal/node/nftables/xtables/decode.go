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
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Decode returns a rule, with the text of iptables-save, from its attributes NFTA_RULE_EXPRESSIONS and NFTA_RULE_USERDATA.
// If it cannot decode a part, the rule has Opaque's text, and Decode returns false.
func Decode(f ruleset.Family, expressions nfnetlink.Attributes, userdata []byte) (ruleset.Rule, bool) {
	d := &decoder{family: f}
	for e := range expressions.All() {
		if !d.expression(e) {
			return ruleset.Opaque(Opaque(expressions, userdata)), false
		}
	}
	if expressions.Check() != nil || !d.whole() || hasComment(userdata) {
		return ruleset.Opaque(Opaque(expressions, userdata)), false
	}
	return ruleset.IPTables("", d.target, d.matches...), true
}

// hasComment finds the comment that nft and some versions of iptables keep beside a rule, not in it: records of type,
// length and value, of which type 0 is a comment.
func hasComment(userdata []byte) bool {
	for len(userdata) >= 2 {
		if userdata[0] == 0 {
			return true
		}
		userdata = userdata[min(2+int(userdata[1]), len(userdata)):]
	}
	return false
}

// Opaque returns a text for a rule that cannot be decoded: the names of its expressions and a digest of all but its
// counters. No rule of iptables reads so, as each begins with "-" or "!". A rule that leads to a chain still ends with
// "-j CHAIN": the chain cannot be removed before it.
func Opaque(expressions nfnetlink.Attributes, userdata []byte) string {
	var names []string
	digest, end := fnv.New128a(), ""
	for e := range expressions.All() {
		name, data, _ := nfnetlink.SplitExpression(e)
		if name == "counter" {
			continue
		}
		if target := data.Text(unix.NFTA_TARGET_NAME); name == "target" && chainName(target) {
			name += ":" + target
		}
		names = append(names, nfnetlink.Label(name, data))
		_, _ = digest.Write(e.Value)
		if v, ok := data.ReadVerdict(); ok && name == "immediate" && chainName(v.Chain) {
			end = " " + ruleset.IPTables("", ruleset.Jump{Chain: v.Chain, Goto: v.Code == nfnetlink.Goto}).String()
		}
	}
	_, _ = digest.Write(userdata)
	return "[not understood: " + strings.Join(names, " ") + " " + hex.EncodeToString(digest.Sum(nil)) + "]" + end
}

// load is the content of a register: a part of the packet or of its metadata.
type load struct {
	meta           bool
	key            uint32 // of meta; else the base of the payload
	offset, length uint32
	mask           []byte // nil is none
}

// decoder reads expressions in the order in which the kernel evaluates them.
type decoder struct {
	family   ruleset.Family
	matches  []ruleset.Match
	target   ruleset.Target
	protocol ruleset.Protocol
	seen     once
	// extended is set by a match behind which no match on ports may come.
	extended bool
	// registers hold loaded values that were not compared yet.
	registers [unix.NFT_REG_4 + 1]*load
}

// expression decodes one expression; it returns false for an unknown one, and for one behind a target.
func (d *decoder) expression(element nfnetlink.Attribute) bool {
	name, f, ok := nfnetlink.SplitExpression(element)
	if !ok || d.target != nil {
		return false
	}
	switch name {
	case "counter":
		return true
	case "meta":
		n, ok := f.Numbers(unix.NFTA_META_KEY, unix.NFTA_META_DREG)
		return ok && d.load(n[1], load{meta: true, key: n[0]})
	case "payload":
		n, ok := f.Numbers(unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
		return ok && d.load(n[0], load{key: n[1], offset: n[2], length: n[3]})
	case "bitwise":
		register, mask, ok := f.BitwiseMask()
		l, held := d.take(register)
		l.mask = mask
		return ok && held && d.load(register, l)
	case "cmp":
		register, op, value, ok := f.Comparison()
		l, held := d.take(register)
		return ok && held && op <= unix.NFT_CMP_NEQ && d.compare(l, op == unix.NFT_CMP_NEQ, value)
	case "range":
		register, negated, first, last, ok := f.Range()
		l, held := d.take(register)
		return ok && held && !l.meta && l.key == unix.NFT_PAYLOAD_TRANSPORT_HEADER && d.port(l, negated, first, last)
	case "match":
		return d.match(&f)
	case "target":
		return d.extensionTarget(&f)
	case "immediate":
		return d.verdict(&f)
	}
	return false
}

// whole reports whether the rule is complete: all loaded values were compared, and ports are those of the rule's protocol.
func (d *decoder) whole() bool {
	needs := map[uint8]bool{}
	for _, m := range d.matches {
		switch m := m.(type) {
		case ruleset.Port:
			needs[m.Protocol] = true
		case ruleset.Reset:
			needs[ruleset.TCP] = true
		case ruleset.Ports:
			needs[d.protocol.Number] = true
		}
	}
	for number := range needs {
		if d.protocol != (ruleset.Protocol{Number: number}) || number != ruleset.TCP && number != ruleset.UDP {
			return false
		}
	}
	return !slices.ContainsFunc(d.registers[:], func(l *load) bool { return l != nil })
}

// load fills one of the registers of 16 bytes; the smaller ones behind them are parts of these.
func (d *decoder) load(register uint32, l load) bool {
	free := register >= unix.NFT_REG_1 && register <= unix.NFT_REG_4 && d.registers[register] == nil
	if free {
		d.registers[register] = &l
	}
	return free
}

// take empties a register.
func (d *decoder) take(register uint32) (load, bool) {
	if int64(register) >= int64(len(d.registers)) || d.registers[register] == nil {
		return load{}, false
	}
	l := *d.registers[register]
	d.registers[register] = nil
	return l, true
}

// once names the matches of which iptables has one in each rule.
type once uint8

const (
	inInterface once = 1 << iota
	outInterface
	protocol
	source
	destination
	ports
)

// add adds one of these. Ports come ahead of other extensions: that is the order in which rules are printed.
func (d *decoder) add(is once, m ruleset.Match) bool {
	fits := d.seen&is == 0 && (is != ports || !d.extended)
	d.seen |= is
	d.matches = append(d.matches, m)
	return fits
}

// extension adds a match of which there may be several.
func (d *decoder) extension(m ruleset.Match) bool {
	d.extended = true
	d.matches = append(d.matches, m)
	return true
}

// compare reads one comparison.
func (d *decoder) compare(l load, negated bool, value []byte) bool {
	switch {
	case l.meta:
		return l.mask == nil && d.meta(l.key, negated, value)
	case int64(l.length) != int64(len(value)):
		return false
	case l.key == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return d.header(l, negated, value)
	case l.key != unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return false
	case l.length == 2:
		return d.port(l, negated, value, value)
	}
	reset := []byte{nfnetlink.TCPReset}
	return l.offset == nfnetlink.TCPFlagsOffset && !negated && bytes.Equal(l.mask, reset) && bytes.Equal(value, reset) && d.add(ports, ruleset.Reset{})
}

// port decodes the comparison of a port with the ends of a range.
func (d *decoder) port(l load, negated bool, first, last []byte) bool {
	if l.length != 2 || l.mask != nil || l.offset != nfnetlink.SourcePortOffset && l.offset != nfnetlink.DestinationPortOffset || len(first) != 2 || len(last) != 2 {
		return false
	}
	return d.add(ports, ruleset.Port{
		Protocol: d.protocol.Number, Source: l.offset == nfnetlink.SourcePortOffset, Not: negated,
		Range: ruleset.PortRange{First: binary.BigEndian.Uint16(first), Last: binary.BigEndian.Uint16(last)},
	})
}

func (d *decoder) meta(key uint32, negated bool, value []byte) bool {
	switch {
	case key == unix.NFT_META_IIFNAME:
		return d.link(inInterface, ruleset.Interface{Not: negated}, value)
	case key == unix.NFT_META_OIFNAME:
		return d.link(outInterface, ruleset.Interface{Not: negated, Out: true}, value)
	case key == unix.NFT_META_L4PROTO:
		return d.setProtocol(negated, value)
	case key == unix.NFT_META_MARK && len(value) == 4:
		return d.extension(ruleset.Mark{Value: binary.NativeEndian.Uint32(value), Not: negated})
	}
	return false
}

// longestName is that of a network interface (IFNAMSIZ less the zero byte).
const longestName = 15

// link reads the name of an interface: with a zero byte behind it it is whole, else only a beginning.
func (d *decoder) link(is once, i ruleset.Interface, value []byte) bool {
	name, behind, whole := bytes.Cut(value, []byte{0})
	odd := bytes.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f })
	if len(name) == 0 || len(bytes.Trim(behind, "\x00")) > 0 || odd || whole && bytes.HasSuffix(name, []byte("+")) {
		return false
	}
	i.Name = string(name)
	if !whole {
		i.Name += "+"
	}
	return len(i.Name) <= longestName+1 && d.add(is, i)
}

func (d *decoder) setProtocol(negated bool, value []byte) bool {
	if len(value) != 1 {
		return false
	}
	d.protocol = ruleset.Protocol{Number: value[0], Not: negated}
	return d.add(protocol, d.protocol)
}

// protocolOffset is the place of the protocol in the header of IPv4, which versions before 1.8.3 compare.
const protocolOffset = 9

// header decodes the comparison of an address, of its first bytes, or of the address under a mask.
func (d *decoder) header(l load, negated bool, value []byte) bool {
	sourceOffset, destinationOffset, length := nfnetlink.AddressOffsets(d.family == ruleset.IPv6)
	p, ok := nfnetlink.ReadNetwork(length, value, l.mask)
	ok = ok && p.Bits() > 0
	switch l.offset {
	case sourceOffset:
		return ok && d.add(source, ruleset.Network{Prefix: p, Source: true, Not: negated})
	case destinationOffset:
		return ok && d.add(destination, ruleset.Network{Prefix: p, Not: negated})
	}
	return l.offset == protocolOffset && d.family == ruleset.IPv4 && l.mask == nil && d.setProtocol(negated, value)
}

// readLayout reads name, revision and struct of a match or target of x_tables: NFTA_MATCH_NAME, _REV and _INFO have the
// numbers of NFTA_TARGET_….
func readLayout(f *nfnetlink.Fields) (layout, bool) {
	revision, ok := f.Number(unix.NFTA_MATCH_REV)
	return layout{key{f.Text(unix.NFTA_MATCH_NAME), revision}, f.Raw(unix.NFTA_MATCH_INFO)}, ok && f.Count() == 3
}

// is reports whether a struct is one of those.
func (l layout) is(all []layout) bool {
	return slices.ContainsFunc(all, func(o layout) bool { return l.key == o.key && bytes.Equal(l.info, o.info) })
}

func (d *decoder) match(f *nfnetlink.Fields) bool {
	l, ok := readLayout(f)
	if !ok {
		return false
	}
	for _, m := range matchCandidates(l.name, l.info) {
		if !l.is(matchLayouts(m)) {
			continue
		}
		switch m := m.(type) {
		case ruleset.Port, ruleset.Reset:
			return d.add(ports, m)
		case ruleset.Ports:
			m.Protocol = d.protocol.Number
			return d.add(ports, m)
		}
		return d.extension(m)
	}
	return false
}

func (d *decoder) extensionTarget(f *nfnetlink.Fields) bool {
	l, ok := readLayout(f)
	if !ok {
		return false
	}
	for _, t := range targetCandidates(d.family, l.name, l.info) {
		if l.is(targetLayouts(d.family, t)) {
			d.target = t
			return true
		}
	}
	return false
}

func (d *decoder) verdict(f *nfnetlink.Fields) bool {
	v, ok := f.ReadVerdict()
	if !ok {
		return false
	}
	if v.Chain != "" {
		d.target = ruleset.Jump{Chain: v.Chain, Goto: v.Code == nfnetlink.Goto}
		return chainName(v.Chain)
	}
	for verdict, code := range codes {
		if code == v.Code {
			d.target = verdict
		}
	}
	return true
}

// chainName reports whether iptables accepts a chain of that name: no verdict, and no character that would end the name or
// need quotes in a line of text.
func chainName(name string) bool {
	_, verdict := codes[ruleset.Verdict(name)]
	odd := func(r rune) bool { return r <= ' ' || r == '"' || r == '\'' || r == '\\' || r >= 0x7f }
	return !verdict && name != "" && strings.IndexFunc(name, odd) < 0 && !strings.HasPrefix(name, "-") && !strings.HasPrefix(name, "!")
}
