package xtables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// span is a port, or all from the first to the last.
type span struct{ first, last uint16 }

func (s span) text(separator string) string {
	if s.first == s.last {
		return fmt.Sprint(s.first)
	}
	return fmt.Sprintf("%d%s%d", s.first, separator, s.last)
}

// portMatch is --sport or --dport; nothing if it is not set.
type portMatch struct {
	span
	set     bool
	negated bool
}

func (p portMatch) option(name string) string {
	if !p.set {
		return ""
	}
	return " " + not(p.negated) + name + " " + p.text(":")
}

// flagMatch is --tcp-flags; nothing if it is not set.
type flagMatch struct {
	mask, value  uint8
	set, negated bool
}

// tcpFlags are the names of the bits of byte 13 of a TCP header, from the lowest.
var tcpFlags = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"} //nolint:gochecknoglobals // a constant table

func flagNames(bits uint8) string {
	var names []string
	for i, name := range tcpFlags {
		if bits&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "NONE"
	}
	return strings.Join(names, ",")
}

func (w *words) flagBits() uint8 {
	word := w.next()
	if word == "NONE" {
		return 0
	}
	bits := uint8(0)
	for name := range strings.SplitSeq(word, ",") {
		at := indexOf(tcpFlags, name)
		if at < 0 {
			w.fail("nothing is known of TCP flag %q", name)
			return 0
		}
		bits |= 1 << at
	}
	return bits
}

func indexOf(list []string, name string) int {
	for i, n := range list {
		if n == name {
			return i
		}
	}
	return -1
}

func (f flagMatch) option() string {
	if !f.set {
		return ""
	}
	return " " + not(f.negated) + "--tcp-flags " + flagNames(f.mask) + " " + flagNames(f.value)
}

// ports is "-m tcp" or "-m udp". iptables-nft writes it as comparisons of the packet since version 1.8.8, before that as
// struct xt_tcp or xt_udp (xt_tcpudp.h); without any option it is the struct still.
type ports struct {
	protocol            uint8
	source, destination portMatch
	flags               flagMatch
}

// String is part of match.
func (p ports) String() string {
	return "-m " + protocolName(p.protocol) + p.source.option("--sport") + p.destination.option("--dport") + p.flags.option()
}

func (w *words) ports(number uint8, of protocol) match {
	if name := protocolName(number); w.err == nil && of != (protocol{number: number, set: true}) {
		w.fail("match %q needs -p %s", name, name)
	}
	p := ports{protocol: number}
	options := []string{"--sport", "--dport"}
	if number == tcp {
		options = append(options, "--tcp-flags")
	}
	for {
		name, negated := w.option(options...)
		switch name {
		case "--sport":
			p.source = portMatch{w.span(w.next(), ":"), true, negated}
		case "--dport":
			p.destination = portMatch{w.span(w.next(), ":"), true, negated}
		case "--tcp-flags":
			p.flags = flagMatch{w.flagBits(), w.flagBits(), true, negated}
		default:
			return p
		}
	}
}

// Places in the header of TCP, of which UDP shares the first two.
const (
	sourcePortOffset      = 0
	destinationPortOffset = 2
	tcpFlagsOffset        = 13
)

func (p ports) encode(e *encoder) {
	if p == (ports{protocol: p.protocol}) {
		e.xtMatch(p.xt())
		return
	}
	e.port(sourcePortOffset, p.source)
	e.port(destinationPortOffset, p.destination)
	if p.flags.set {
		e.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, tcpFlagsOffset, 1)
		e.And([]byte{p.flags.mask})
		e.Compare(p.flags.negated, []byte{p.flags.value})
	}
}

func (e *encoder) port(offset uint32, p portMatch) {
	if !p.set {
		return
	}
	e.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, 2)
	first, last := binary.BigEndian.AppendUint16(nil, p.first), binary.BigEndian.AppendUint16(nil, p.last)
	if p.first == p.last {
		e.Compare(p.negated, first)
	} else {
		e.Between(p.negated, first, last)
	}
}

// Bits of the field invflags of struct xt_tcp; struct xt_udp has the first two.
const (
	invertSource = 1 << iota
	invertDestination
	invertFlags
)

// bit gives the bit if it is wanted.
func bit[T uint8 | uint16 | uint32](wanted bool, value T) T {
	if wanted {
		return value
	}
	return 0
}

// xt is the match as a struct: spts[2], dpts[2], for TCP option, flg_mask and flg_cmp, and invflags.
func (p ports) xt() xt {
	all := func(m portMatch) span {
		if m.set {
			return m.span
		}
		return span{0, 1<<16 - 1}
	}
	s, d := all(p.source), all(p.destination)
	info := record{}.u16(s.first, s.last, d.first, d.last)
	if p.protocol == tcp {
		info = info.u8(0, p.flags.mask, p.flags.value)
	}
	info = info.u8(bit[uint8](p.source.negated, invertSource) | bit[uint8](p.destination.negated, invertDestination) |
		bit[uint8](p.flags.negated, invertFlags))
	return xt{name: protocolName(p.protocol), info: info.align()}
}

// decodePorts reads the struct; it knows nothing of TCP options.
func decodePorts(protocol uint8, info []byte) (match, bool) {
	if len(info) < 12 {
		return nil, false
	}
	p := ports{protocol: protocol}
	inverted := info[8]
	if protocol == tcp {
		inverted = info[11]
		p.flags = flagMatch{info[9], info[10], info[9] != 0 || info[10] != 0 || inverted&invertFlags != 0, inverted&invertFlags != 0}
	}
	read := func(at int, negated bool) portMatch {
		s := span{binary.NativeEndian.Uint16(info[at:]), binary.NativeEndian.Uint16(info[at+2:])}
		return portMatch{s, negated || s != span{0, 1<<16 - 1}, negated}
	}
	p.source, p.destination = read(0, inverted&invertSource != 0), read(4, inverted&invertDestination != 0)
	for _, m := range []*portMatch{&p.source, &p.destination} {
		if !m.set {
			*m = portMatch{}
		}
	}
	return p, bytes.Equal(p.xt().info, info)
}

// multiport is "-m multiport": struct xt_multiport_v1 (xt_multiport.h), which is flags, count, ports[15], pflags[15] and
// invert.
type multiport struct {
	option  string
	negated bool
	list    []span
}

// multiportOptions are indexed by enum xt_multiport_flags.
var multiportOptions = []string{"--sports", "--dports", "--ports"} //nolint:gochecknoglobals // a constant table

// multiportMost is XT_MULTI_PORTS.
const multiportMost = 15

// String is part of match.
func (m multiport) String() string {
	var list []string
	for _, s := range m.list {
		list = append(list, s.text(":"))
	}
	return "-m multiport " + not(m.negated) + m.option + " " + strings.Join(list, ",")
}

func (w *words) multiport() match {
	m := multiport{}
	m.option, m.negated = w.option(multiportOptions...)
	if m.option == "" {
		w.fail("match \"multiport\" has none of %s", strings.Join(multiportOptions, ", "))
		return nil
	}
	slots := 0
	for text := range strings.SplitSeq(w.next(), ",") {
		s := w.span(text, ":")
		m.list = append(m.list, s)
		slots += slotsOf(s)
	}
	if slots > multiportMost {
		w.fail("match \"multiport\" holds %d ports at most (a range counts as two), not %d", multiportMost, slots)
	}
	return m
}

// slotsOf is how many of the struct's places a span takes.
func slotsOf(s span) int {
	if s.first == s.last {
		return 1
	}
	return 2
}

func (m multiport) encode(e *encoder) { e.xtMatch(m.xt()) }

func (m multiport) xt() xt {
	var list []uint16
	var more []uint8 // whether the next one ends a range that this one begins
	for _, s := range m.list {
		if s.first == s.last {
			list, more = append(list, s.first), append(more, 0)
		} else {
			list, more = append(list, s.first, s.last), append(more, 1, 0)
		}
	}
	//nolint:gosec // one of three options; at most 15 ports
	info := record{}.u8(uint8(indexOf(multiportOptions, m.option)), uint8(len(list))).
		u16(list...).fill(2 + 2*multiportMost).u8(more...).fill(2 + 3*multiportMost).u8(bit[uint8](m.negated, 1))
	return xt{"multiport", 1, info.align()}
}

func decodeMultiport(info []byte) (match, bool) {
	if len(info) != 48 || int(info[0]) >= len(multiportOptions) || info[1] > multiportMost {
		return nil, false
	}
	m := multiport{option: multiportOptions[info[0]], negated: info[47] != 0}
	count := int(info[1])
	for i := 0; i < count; i++ {
		s := span{binary.NativeEndian.Uint16(info[2+2*i:]), binary.NativeEndian.Uint16(info[2+2*i:])}
		if info[32+i] != 0 && i+1 < count {
			i++
			s.last = binary.NativeEndian.Uint16(info[2+2*i:])
		}
		m.list = append(m.list, s)
	}
	return m, count > 0 && bytes.Equal(m.xt().info, info)
}
