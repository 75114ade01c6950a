package xtables

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

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

// other is the text of a match or target that is not known. The name is one word.
func (l layout) other(option string, handle uint64) ruleset.Other {
	name := strings.Join(strings.FieldsFunc(l.name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '"' }), "_")
	return ruleset.Other{Text: fmt.Sprintf("%s %s [see rule handle %d]", option, name, handle)}
}

// ReadMatch returns a match of x_tables from its attributes, in a rule of a family and, if it has been compared, a protocol. The handle is
// for the text of a match that is not known.
func ReadMatch(f ruleset.Family, protocol uint8, fields *nfnetlink.Fields, handle uint64) ruleset.Match {
	l, ok := readLayout(fields)
	if !ok {
		return ruleset.Other{Text: fmt.Sprintf("[a broken match, see rule handle %d]", handle)}
	}
	for _, m := range matchCandidates(l.name, l.info) {
		if !l.is(matchLayouts(m)) {
			continue
		}
		if ports, is := m.(ruleset.AnyPort); is {
			ports.Protocol = protocol
			return ports
		}
		return m
	}
	// What has the text of a match that is written, and other bytes, has more in it than was read.
	if m := l.match(f, protocol); m != nil && matchLayouts(m) == nil {
		return m
	}
	return l.other("-m", handle)
}

// match reads a struct of a match that this program does not write (include/uapi/linux/netfilter/xt_NAME.h).
func (l layout) match(f ruleset.Family, protocol uint8) ruleset.Match {
	info := view(l.info)
	if slices.Contains(ruleset.AbsentModules(), l.name) {
		return ruleset.Absent{Text: fmt.Sprintf("-m %s [%x]", l.name, l.info)}
	}
	switch l.key {
	case key{"comment", 0}:
		text, _, _ := bytes.Cut(l.info, []byte{0})
		return ruleset.Comment{Text: string(text)}
	case key{"tcp", 0}, key{"udp", 0}: // xt_tcp: spts[2], dpts[2], option, flg_mask, flg_cmp, invflags
		if info.u16(0) == 0 && info.u16(2) == lastPort && info.u16(4) == 0 && info.u16(6) == lastPort && info.u8(8) == 0 && info.u8(11)&^4 == 0 {
			if info.u8(9) == 0 && info.u8(11) == 0 && info.u8(10) == 0 {
				return ruleset.Neutral{Text: "-m " + l.name}
			}
			return ruleset.TCPFlags{Mask: info.u8(9), Set: info.u8(10), Not: info.u8(11) != 0}
		}
	case key{"multiport", 1}:
		return multiport(info, protocol)
	case key{"addrtype", 1}: // source, dest, flags
		return addressType(info.u16(0), info.u16(2), info.u32(4)&1 != 0, info.u32(4)&2 != 0, info.u32(4)&^3 != 0)
	case key{"addrtype", 0}: // source, dest, invert_source, invert_dest
		return addressType(info.u16(0), info.u16(2), info.u32(4) != 0, info.u32(8) != 0, false)
	case key{"iprange", 1}:
		return addresses(info, f)
	case key{"rpfilter", 0}: // xt_rpfilter_info: flags
		const loose, mark, local, inverted = 1, 2, 4, 8
		if info.u8(0)&^(loose|mark|local|inverted) == 0 {
			return ruleset.ReversePath{Missing: info.u8(0)&inverted != 0, ByMark: info.u8(0)&mark != 0}
		}
	case key{"owner", 1}:
		return owners(info)
	case key{"conntrack", 1}, key{"conntrack", 2}, key{"conntrack", 3}:
		return states(l.revision, info)
	}
	return nil
}

// multiport reads xt_multiport_v1: flags, count, ports[15], pflags[15], invert.
func multiport(info view, protocol uint8) ruleset.Match {
	m := ruleset.AnyPort{Protocol: protocol, Not: info.u8(multiportInvert) != 0}
	count := int(info.u8(1))
	if info.u8(0) > 2 || count > 15 {
		return nil
	}
	m.Side = [...]ruleset.Side{ruleset.SourcePort, ruleset.DestinationPort, ruleset.EitherPort}[info.u8(0)]
	for i := 0; i < count; i++ {
		r := ruleset.OnePort(info.u16(2 + 2*i))
		if ranged := info.u8(32+i) != 0; ranged && i+1 < count {
			i++
			r.Last = info.u16(2 + 2*i)
		}
		m.List = append(m.List, r)
	}
	return m
}

func addressType(source, destination uint16, notSource, notDestination, more bool) ruleset.Match {
	switch {
	case more || source != 0 && destination != 0:
		return nil
	case source != 0:
		return ruleset.AddressType{Types: source, Source: true, Not: notSource}
	}
	return ruleset.AddressType{Types: destination, Not: notDestination}
}

// addresses reads xt_iprange_mtinfo: src_min, src_max, dst_min, dst_max, flags.
func addresses(info view, f ruleset.Family) ruleset.Match {
	const source, destination, notSource, notDestination = 1, 2, 1 << 4, 1 << 5
	flags := info.u8(64)
	at := func(offset int) netip.Addr {
		if f == ruleset.IPv6 {
			return netip.AddrFrom16([16]byte(info.from(offset, 16)))
		}
		return info.address(offset)
	}
	switch flags &^ (notSource | notDestination) {
	case source:
		return ruleset.Addresses{First: at(0), Last: at(16), Source: true, Not: flags&notSource != 0}
	case destination:
		return ruleset.Addresses{First: at(32), Last: at(48), Not: flags&notDestination != 0}
	}
	return nil
}

// owners reads xt_owner_match_info: uid_min, uid_max, gid_min, gid_max, match, invert.
func owners(info view) ruleset.Match {
	const socket = 1 << 2
	is, not := info.u8(16), info.u8(17) != 0
	switch {
	case is == socket && not:
		return ruleset.Not{Match: ruleset.SocketExists{}}
	case is == socket:
		return ruleset.SocketExists{}
	case is == ownerUID && info.u32(0) < info.u32(4):
		return ruleset.Owner{ID: info.u32(0), Last: info.u32(4), Not: not}
	case is == ownerGID && info.u32(8) < info.u32(12):
		return ruleset.Owner{ID: info.u32(8), Last: info.u32(12), Group: true, Not: not}
	}
	return nil
}

// states reads the state of xt_conntrack_mtinfo1, 2 and 3. Bits of the state are those of the kernel, and SNAT, DNAT and UNTRACKED.
func states(revision uint32, info view) ruleset.Match {
	const (
		alias                 = 1 << 13
		snat, dnat, untracked = 1 << 6, 1 << 7, 1 << 8
		known                 = ruleset.StateInvalid | ruleset.StateEstablished | ruleset.StateRelated | ruleset.StateNew
	)
	match, invert, bits := info.u16(conntrackMatch), info.u16(conntrackMatch+2), info.u16(conntrackState)
	if revision == 1 { // the state has 8 bits
		bits = uint16(info.u8(conntrackState))
	}
	s := ruleset.States(bits) & known //nolint:gosec // four bits
	for bit, is := range map[uint16]ruleset.States{snat: ruleset.StateSNAT, dnat: ruleset.StateDNAT, untracked: ruleset.StateUntracked} {
		if bits&bit != 0 {
			s |= is
		}
	}
	switch {
	case match&^alias != conntrackByState || invert&^(conntrackByState|alias) != 0 || bits&^(uint16(known)|snat|dnat|untracked) != 0:
		return nil
	case invert&conntrackByState != 0:
		return ruleset.Not{Match: s}
	case match&alias != 0:
		return ruleset.StateAlias(s)
	}
	return s
}

// ReadTarget returns a target of x_tables from its attributes. The handle is for the text of a target that is not known.
func ReadTarget(f ruleset.Family, fields *nfnetlink.Fields, handle uint64) ruleset.Target {
	l, ok := readLayout(fields)
	if !ok {
		return ruleset.Other{Text: fmt.Sprintf("[a broken target, see rule handle %d]", handle)}
	}
	for _, t := range targetCandidates(f, l.name, l.info) {
		if l.is(targetLayouts(f, t)) {
			return t
		}
	}
	if t := l.target(f); t != nil && targetLayouts(f, t) == nil {
		return t
	}
	return l.other("-j", handle)
}

// target reads a struct of a target that this program does not write.
func (l layout) target(f ruleset.Family) ruleset.Target {
	info := view(l.info)
	switch {
	case l.name == "LOG": // xt_log_info: level, logflags, prefix
		text, _, _ := strings.Cut(string(info.from(2, 30)[:30]), "\x00")
		if text != "" {
			return ruleset.Neutral{Text: fmt.Sprintf("-j LOG --log-prefix %q", text)}
		}
		return ruleset.Neutral{Text: "-j LOG"}
	case ruleset.NeutralTarget(l.name) && l.name != "":
		return ruleset.Neutral{Text: "-j " + l.name, Copies: l.name == "TEE"}
	}
	switch l.name {
	case "MASQUERADE":
		return ruleset.NAT{Source: true, Range: true, Text: "-j MASQUERADE"}
	case "SNAT":
		return ruleset.NAT{Source: true, Range: true, Text: "-j SNAT"}
	case "REDIRECT", "DNAT":
		return l.translation(f)
	case "CT":
		return track(info, l.revision)
	case "REJECT":
		return ruleset.Reject(fmt.Sprintf("type %d", info.u32(0)))
	}
	return nil
}

// natRanges reads struct nf_nat_ipv4_multi_range_compat (size, flags, min_ip, max_ip, min, max), which revision 0 has for IPv4, or
// nf_nat_range and nf_nat_range2 (flags, min_addr, max_addr, min_proto, max_proto).
func (l layout) natRanges(f ruleset.Family) (first, last natRange) {
	info := view(l.info)
	if f == ruleset.IPv4 && l.revision == 0 {
		flags := info.u32(4)
		return natRange{flags, info.address(8), info.be16(16)}, natRange{flags, info.address(12), info.be16(18)}
	}
	flags := info.u32(0)
	a, b := info.address(4), info.address(20)
	if f == ruleset.IPv6 {
		a, b = netip.AddrFrom16([16]byte(info.from(4, 16))), netip.AddrFrom16([16]byte(info.from(20, 16)))
	}
	return natRange{flags, a, info.be16(36)}, natRange{flags, b, info.be16(38)}
}

// translation reads REDIRECT and DNAT in the forms that this program does not write.
func (l layout) translation(f ruleset.Family) ruleset.Target {
	n := ruleset.NAT{Local: l.name == "REDIRECT"}
	first, last := l.natRanges(f)
	if first.flags&natPorts != 0 {
		n.Port, n.Range = first.port, first.port != last.port
	}
	if first.flags&natAddresses != 0 && !n.Local {
		n.To, n.Range = first.address, n.Range || first.address != last.address
	}
	more := first.flags &^ (natPorts | natAddresses)
	several := f == ruleset.IPv4 && l.revision == 0 && view(l.info).u32(0) != 1
	written := n.Local || f == ruleset.IPv4 && n.To.IsValid()
	if several || written && !n.Range && n.Port != 0 && more == 0 {
		return nil // one that is written has other bytes
	}
	n.Text = natText(l.name, n, last.port)
	if more != 0 {
		n.Text += fmt.Sprintf(" [flags %d]", more)
	}
	return n
}

// natText is the text of iptables.
func natText(name string, n ruleset.NAT, last uint16) string {
	text := "-j " + name
	switch {
	case n.Local && n.Port != 0:
		text += fmt.Sprintf(" --to-ports %d", n.Port)
	case !n.Local:
		text += " --to-destination " + toText(n)
	}
	if n.Range && last != n.Port {
		text += fmt.Sprintf("-%d", last)
	}
	return text
}

func toText(n ruleset.NAT) string {
	switch {
	case n.To.IsValid() && n.Port != 0:
		return netip.AddrPortFrom(n.To, n.Port).String()
	case n.To.IsValid():
		return n.To.String()
	}
	return fmt.Sprintf(":%d", n.Port)
}

// track reads xt_ct_target_info and _v1: flags, zone, ct_events, exp_events, helper[16]. What it sets besides is for conntrack alone.
func track(info view, revision uint32) ruleset.Target {
	const notrack, alias = 1 << 0, 1 << 1
	switch flags, zone := info.u16(0), info.u16(2); {
	case flags&^alias == notrack && zone == 0:
		return ruleset.NoTrack{}
	case flags == 0 && zone == 0 && revision <= math.MaxUint8:
		return ruleset.Neutral{Text: "-j CT"}
	}
	return nil
}
