package xtables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// printed is a match or target that can be read and printed and is never written: rules of other programs, and what
// earlier versions of the reference left.
type printed string

// String is part of match and target.
func (p printed) String() string { return string(p) }

func (p printed) encode(e *encoder) { e.fail("%q can be read only", string(p)) }

// natRange is what DNAT, SNAT, MASQUERADE and REDIRECT hold, in one of three layouts of nf_nat.h.
type natRange struct {
	flags       uint32
	first, last netip.Addr
	ports       span
}

// multiRange is struct nf_nat_ipv4_multi_range_compat, for IPv4 only.
func (n natRange) multiRange() []byte {
	return record{}.u32(1, n.flags).u8(n.first.AsSlice()...).fill(12).u8(n.last.AsSlice()...).fill(16).
		be16(n.ports.first, n.ports.last).align()
}

// range1 is struct nf_nat_range.
func (n natRange) range1() []byte {
	return record{}.u32(n.flags).u8(n.first.AsSlice()...).fill(20).u8(n.last.AsSlice()...).fill(36).
		be16(n.ports.first, n.ports.last).align()
}

// range2 is struct nf_nat_range2, without an offset of ports.
func (n natRange) range2() []byte { return record(n.range1()).fill(48) }

// readNAT reads any of the three layouts; which one it is, the revision says.
func readNAT(f ruleset.Family, info []byte) (natRange, bool) {
	at, width, ports := 4, 16, 36
	if len(info) == 24 {
		at, width, ports = 8, 4, 16
	}
	if len(info) < ports+4 {
		return natRange{}, false
	}
	n := natRange{
		flags: binary.NativeEndian.Uint32(info[at-4:]),
		ports: span{binary.BigEndian.Uint16(info[ports:]), binary.BigEndian.Uint16(info[ports+2:])},
	}
	if n.flags&natAddresses != 0 {
		n.first, n.last = addressIn(f, info[at:]), addressIn(f, info[at+width:])
	}
	whole := n.flags&^(natAddresses|natPorts) == 0 && (n.flags&natPorts != 0 || n.ports == span{})
	same := map[int]func() []byte{24: n.multiRange, 40: n.range1, 48: n.range2}[len(info)]
	return n, whole && same != nil && bytes.Equal(same(), info)
}

// decodeNAT reads DNAT and SNAT to one address, with or without ports; option is what stands before it.
func decodeNAT(f ruleset.Family, option string, info []byte) (target, bool) {
	n, ok := readNAT(f, info)
	if !ok || n.flags&natAddresses == 0 || n.first != n.last {
		return nil, false
	}
	to := ruleset.Address(n.first)
	if n.flags&natPorts != 0 {
		if f == ruleset.IPv6 {
			to = "[" + to + "]"
		}
		to += ":" + n.ports.text("-")
	}
	return printed(option + to), true
}

func decodeMasquerade(f ruleset.Family, info []byte) (target, bool) {
	n, ok := readNAT(f, info)
	switch {
	case !ok || n.flags&natAddresses != 0:
		return nil, false
	case n.flags&natPorts != 0:
		return printed("-j MASQUERADE --to-ports " + n.ports.text("-")), true
	}
	return printed("-j MASQUERADE"), true
}

// decodeLog reads LOG: struct xt_log_info (xt_LOG.h), which is level, logflags and prefix[30].
func decodeLog(info []byte) (target, bool) {
	const usualLevel = 4
	if len(info) != 32 || info[1] != 0 || info[0] > 7 {
		return nil, false
	}
	prefix, ok := text(info[2:])
	if !ok {
		return nil, false
	}
	out := "-j LOG"
	if prefix != "" {
		out += " --log-prefix " + quoted(prefix)
	}
	if info[0] != usualLevel {
		out += fmt.Sprintf(" --log-level %d", info[0])
	}
	return printed(out), true
}

// decodeComment reads comment: struct xt_comment_info (xt_comment.h).
func decodeComment(info []byte) (match, bool) {
	comment, ok := text(info)
	return printed("-m comment --comment " + quoted(comment)), ok && len(info) == 256
}

// text reads a string that zeros fill up. One that cannot stand in a line of iptables-save is none.
func text(field []byte) (string, bool) {
	before, after, _ := bytes.Cut(field, []byte{0})
	printable := !bytes.ContainsFunc(before, func(r rune) bool { return r < ' ' || r == 0x7f })
	return string(before), printable && len(bytes.Trim(after, "\x00")) == 0
}

// quoted puts a string into quotes if iptables-save does.
func quoted(s string) string {
	plain := func(r rune) bool {
		return r == '_' || r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return `"` + strings.NewReplacer(`"`, `\"`, `\`, `\\`, `'`, `\'`).Replace(s) + `"`
}

// addressTypes are the names of the bits of struct xt_addrtype_info_v1 (xt_addrtype.h), from the lowest.
var addressTypes = []string{ //nolint:gochecknoglobals // a constant table
	"UNSPEC", "UNICAST", "LOCAL", "BROADCAST", "ANYCAST", "MULTICAST", "BLACKHOLE", "UNREACHABLE", "PROHIBIT", "THROW",
	"NAT", "XRESOLVE",
}

// decodeAddressType reads addrtype: source, dest and flags, of which the first four bits are known.
func decodeAddressType(info []byte) (match, bool) {
	if len(info) != 8 {
		return nil, false
	}
	source, destination := binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
	flags := binary.NativeEndian.Uint32(info[4:])
	known := uint16(1<<len(addressTypes) - 1)
	if flags > 15 || (source|destination)&^known != 0 || source|destination == 0 {
		return nil, false
	}
	out := "-m addrtype" + typeOption("--src-type", source, flags&1 != 0) + typeOption("--dst-type", destination, flags&2 != 0)
	if flags&4 != 0 {
		out += " --limit-iface-in"
	}
	if flags&8 != 0 {
		out += " --limit-iface-out"
	}
	return printed(out), true
}

func typeOption(option string, bits uint16, negated bool) string {
	var names []string
	for i, name := range addressTypes {
		if bits&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return " " + not(negated) + option + " " + strings.Join(names, ",")
}

// decodeSocket reads socket: struct xt_socket_mtinfo1 to 3 (xt_socket.h), which is a set of bits.
func decodeSocket(info []byte) (match, bool) {
	if len(info) != 8 || info[0] > 7 || !bytes.Equal(info[1:], make([]byte, 7)) {
		return nil, false
	}
	out := []string{"-m socket"}
	for i, option := range []string{"--transparent", "--nowildcard", "--restore-skmark"} {
		if info[0]&(1<<i) != 0 {
			out = append(out, option)
		}
	}
	return printed(strings.Join(out, " ")), true
}
