package xtables

import (
	"encoding/binary"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// layout is a match or target as a struct of x_tables (include/uapi/linux/netfilter/xt_NAME.h).
type layout struct {
	key
	info []byte
}

// key names a match or target with the revision of its struct.
type key struct {
	name     string
	revision uint32
}

// matchLayouts returns all structs by which versions of iptables write a match, that of 1.8.9 first.
func matchLayouts(m ruleset.Match) []layout {
	switch m := m.(type) {
	case ruleset.Port:
		return []layout{tcpUDP(m)}
	case ruleset.TCPFlags:
		if m != ruleset.Reset {
			return nil
		}
		return []layout{{key{"tcp", 0}, record{}.u16(0, lastPort, 0, lastPort).u8(0, nfnetlink.TCPReset, nfnetlink.TCPReset, 0).align()}}
	case ruleset.AnyPort: // xt_multiport_v1: flags, count, ports[15], pflags[15], invert
		if m.Side != ruleset.DestinationPort || len(m.List) != 2 || m.List[0].First != m.List[0].Last || m.List[1].First != m.List[1].Last {
			return nil
		}
		info := record{}.u8(1, 2).u16(m.List[0].First, m.List[1].First).fill(multiportInvert).u8(bit(m.Not, 1))
		return []layout{{key{"multiport", 1}, info.align()}}
	case ruleset.Owner: // xt_owner_match_info: uid_min, uid_max, gid_min, gid_max, match, invert
		if m.Last != 0 {
			return nil
		}
		info := record{}.u32(m.ID, m.ID).fill(16).u8(ownerUID, bit(m.Not, ownerUID))
		if m.Group {
			info = record{}.fill(8).u32(m.ID, m.ID).u8(ownerGID, bit(m.Not, ownerGID))
		}
		return []layout{{key{"owner", 1}, info.align()}}
	case ruleset.Mark: // xt_mark_mtinfo1 and xt_connmark_mtinfo1: mark, mask, invert
		k := key{"mark", 1}
		if m.Connection {
			k.name = "connmark"
		}
		return []layout{{k, record{}.u32(m.Value, ruleset.WholeMark(m.Mask)).u8(bit(m.Not, 1)).align()}}
	case ruleset.States: // xt_conntrack_mtinfo3, whose bits of states are the kernel's numbers of them
		if m&^trackedStates != 0 {
			return nil
		}
		info := record{}.fill(conntrackMatch).u16(conntrackByState, 0, uint16(m)).fill(conntrackLength)
		return []layout{{key{"conntrack", 3}, info.align()}}
	}
	return nil
}

const (
	allBits         = 1<<32 - 1
	lastPort        = 1<<16 - 1
	ownerUID        = 1 << 0
	ownerGID        = 1 << 1
	multiportInvert = 47

	conntrackMatch   = 146 // match_flags, invert_flags, state_mask
	conntrackState   = 150
	conntrackByState = 1 << 0
	conntrackLength  = 162
)

// tcpUDP is struct xt_tcp or xt_udp (xt_tcpudp.h), which versions before 1.8.8 wrote: spts[2], dpts[2], for TCP option,
// flg_mask and flg_cmp, and invflags.
func tcpUDP(p ruleset.Port) layout {
	info := record{}.u16(0, lastPort, p.Range.First, p.Range.Last)
	inverted := bit(p.Not, 2)
	if p.Source {
		info, inverted = record{}.u16(p.Range.First, p.Range.Last, 0, lastPort), bit(p.Not, 1)
	}
	if p.Protocol == ruleset.UDP {
		return layout{key{"udp", 0}, info.u8(inverted).align()}
	}
	return layout{key{"tcp", 0}, info.u8(0, 0, 0, inverted).align()}
}

// matchCandidates returns the matches that a name allows, with the numbers of the struct.
func matchCandidates(name string, info view) []ruleset.Match {
	switch name {
	case "tcp":
		return append(portCandidates(ruleset.TCP, info, info.u8(11)), ruleset.Reset)
	case "udp":
		return portCandidates(ruleset.UDP, info, info.u8(8))
	case "multiport":
		return []ruleset.Match{ruleset.AnyPort{List: ruleset.PortList(info.u16(2), info.u16(4)), Not: info.u8(multiportInvert) != 0}}
	case "owner":
		return []ruleset.Match{
			ruleset.Owner{ID: info.u32(0), Not: info.u8(17) != 0}, ruleset.Owner{ID: info.u32(8), Group: true, Not: info.u8(17) != 0},
		}
	case "mark", "connmark":
		return []ruleset.Match{ruleset.Mark{Value: info.u32(0), Mask: maskOf(info.u32(4)), Connection: name == "connmark", Not: info.u8(8) != 0}}
	case "conntrack":
		if states := ruleset.States(info.u16(conntrackState) & uint16(trackedStates)); states != 0 {
			return []ruleset.Match{states}
		}
	}
	return nil
}

// trackedStates are those whose bits are the kernel's.
const trackedStates = ruleset.StateInvalid | ruleset.StateNew | ruleset.StateRelated | ruleset.StateEstablished

// maskOf is a mask, 0 for all bits.
func maskOf(bits uint32) uint32 {
	if bits == allBits {
		return 0
	}
	return bits
}

// portCandidates leaves out the range of all ports, which is no match.
func portCandidates(protocol uint8, info view, inverted uint8) []ruleset.Match {
	var all []ruleset.Match
	for i, source := range []bool{true, false} {
		ports := ruleset.PortRange{First: info.u16(4 * i), Last: info.u16(4*i + 2)}
		if ports != (ruleset.PortRange{Last: lastPort}) {
			all = append(all, ruleset.Port{Protocol: protocol, Range: ports, Source: source, Not: inverted != 0})
		}
	}
	return all
}

// targetLayouts is matchLayouts for targets.
func targetLayouts(f ruleset.Family, t ruleset.Target) []layout {
	switch t := t.(type) {
	case ruleset.RedirectTo:
		n := natRange{flags: natPorts, address: anyAddress(f), port: uint16(t)}
		return n.layouts(f, "REDIRECT")[:1]
	case ruleset.DNAT:
		return natRange{natAddresses | natPorts, netip.AddrPort(t).Addr(), netip.AddrPort(t).Port()}.layouts(f, "DNAT")
	case ruleset.SNAT:
		return natRange{natAddresses, netip.Addr(t), 0}.layouts(f, "SNAT")
	case ruleset.SetMark: // xt_mark_tginfo2: mark, mask
		if t.Connection {
			return connmark(0, t.Value, ruleset.WholeMark(t.Mask), 0)
		}
		return []layout{{key{"MARK", 2}, record{}.u32(t.Value, ruleset.WholeMark(t.Mask)).align()}}
	case ruleset.CopyMark:
		mode := uint8(1)
		if t.Restore {
			mode = 2
		}
		return connmark(mode, 0, ruleset.WholeMark(t.ConnectionMask), ruleset.WholeMark(t.PacketMask))
	case ruleset.TProxy: // xt_tproxy_target_info_v1: mark_mask, mark_value, laddr, lport
		return []layout{{key{"TPROXY", 1}, record{}.u32(ruleset.WholeMark(t.Mask), t.Mark).fill(24).be16(t.Port).align()}}
	case ruleset.Zone: // xt_ct_target_info_v1: flags, zone, ct_events, exp_events, helper[16], timeout[32], a pointer
		info := record{}.u16(0, uint16(t)).fill(72).align()
		return []layout{{key{"CT", 2}, info}, {key{"CT", 1}, info}}
	case ruleset.Reject: // ipt_reject_info or ip6t_reject_info, each an enum of its own
		if with, ok := rejectWith[f][t]; ok {
			return []layout{{key{"REJECT", 0}, record{}.u32(with).align()}}
		}
	}
	return nil
}

// rejectWith are the values of the enums (netfilter_ipv4/ipt_REJECT.h, netfilter_ipv6/ip6t_REJECT.h).
var rejectWith = map[ruleset.Family]map[ruleset.Reject]uint32{ //nolint:gochecknoglobals // a constant table
	ruleset.IPv4: {ruleset.PortUnreachable: 3, ruleset.TCPReset: 7},
	ruleset.IPv6: {ruleset.PortUnreachableV6: 4, ruleset.TCPReset: 6},
}

// connmark is CONNMARK: xt_connmark_tginfo2 is ctmark, ctmask, nfmask, shift_dir, shift_bits and mode, of which revision 1 lacks the
// shifts. To set a mark, iptables leaves nfmask 0, or has all bits in it.
func connmark(mode uint8, mark, connection, packet uint32) []layout {
	all := []layout{
		{key{"CONNMARK", 2}, record{}.u32(mark, connection, packet).u8(0, 0, mode).align()},
		{key{"CONNMARK", 1}, record{}.u32(mark, connection, packet).u8(mode).align()},
	}
	if mode == 0 && packet == 0 {
		all = append(all, connmark(mode, mark, connection, allBits)...)
	}
	return all
}

// targetCandidates is matchCandidates for targets.
func targetCandidates(f ruleset.Family, name string, info view) []ruleset.Target {
	switch name {
	case "REDIRECT":
		return []ruleset.Target{ruleset.RedirectTo(info.be16(16)), ruleset.RedirectTo(info.be16(36))}
	case "DNAT", "SNAT":
		return natCandidates(f, name, info)
	case "MARK":
		return []ruleset.Target{ruleset.SetMark{Value: info.u32(0), Mask: maskOf(info.u32(4))}}
	case "CONNMARK":
		connection, packet := maskOf(info.u32(4)), maskOf(info.u32(8))
		return []ruleset.Target{
			ruleset.SetMark{Value: info.u32(0), Mask: connection, Connection: true},
			ruleset.CopyMark{ConnectionMask: connection, PacketMask: packet},
			ruleset.CopyMark{Restore: true, ConnectionMask: connection, PacketMask: packet},
		}
	case "TPROXY":
		return []ruleset.Target{ruleset.TProxy{Family: f, Port: info.be16(24), Mark: info.u32(4), Mask: maskOf(info.u32(0))}}
	case "CT":
		if zone := info.u16(2); zone != 0 {
			return []ruleset.Target{ruleset.Zone(zone)}
		}
	case "REJECT":
		return []ruleset.Target{ruleset.TCPReset, ruleset.PortUnreachable, ruleset.PortUnreachableV6}
	}
	return nil
}

// natCandidates reads rules of versions of the reference before ISTIO_OUTPUT_DNS. They were of IPv4.
func natCandidates(f ruleset.Family, name string, info view) []ruleset.Target {
	switch {
	case f == ruleset.IPv6:
		return nil
	case name == "SNAT":
		return []ruleset.Target{ruleset.SNAT(info.address(8)), ruleset.SNAT(info.address(4))}
	}
	return []ruleset.Target{
		ruleset.DNAT(netip.AddrPortFrom(info.address(8), info.be16(16))), ruleset.DNAT(netip.AddrPortFrom(info.address(4), info.be16(36))),
	}
}

// natRange is the range of DNAT, SNAT and REDIRECT: one address, one port (nf_nat.h).
type natRange struct {
	flags   uint32
	address netip.Addr
	port    uint16
}

// Bits of natRange.flags.
const (
	natAddresses = 1 << 0
	natPorts     = 1 << 1
)

// layouts returns struct nf_nat_ipv4_multi_range_compat, which only IPv4 has, nf_nat_range and nf_nat_range2.
func (n natRange) layouts(f ruleset.Family, name string) []layout {
	address := n.address.AsSlice()
	range1 := record{}.u32(n.flags).u8(address...).fill(20).u8(address...).fill(36).be16(n.port, n.port).align()
	if f == ruleset.IPv6 {
		return []layout{{key{name, 0}, range1}}
	}
	multi := record{}.u32(1, n.flags).u8(address...).u8(address...).be16(n.port, n.port).align()
	return []layout{{key{name, 0}, multi}, {key{name, 1}, range1}, {key{name, 2}, record(range1).fill(48)}}
}

func anyAddress(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// bit returns the bit if it is wanted, else 0.
func bit(wanted bool, value uint8) uint8 {
	if wanted {
		return value
	}
	return 0
}

// record builds a struct of the kernel's headers in the machine's own byte order.
type record []byte

func (r record) u8(values ...uint8) record { return append(r, values...) }

func (r record) u16(values ...uint16) record {
	return numbers(r, binary.NativeEndian.AppendUint16, values)
}

func (r record) u32(values ...uint32) record {
	return numbers(r, binary.NativeEndian.AppendUint32, values)
}

// be16 adds values in the byte order of packets.
func (r record) be16(values ...uint16) record {
	return numbers(r, binary.BigEndian.AppendUint16, values)
}

func numbers[T uint16 | uint32](r record, add func([]byte, T) []byte, values []T) record {
	for _, v := range values {
		r = add(r, v)
	}
	return r
}

// fill adds zeros up to a length.
func (r record) fill(length int) record { return append(r, make([]byte, max(0, length-len(r)))...) }

// align pads a struct as XT_ALIGN does: to a multiple of the alignment of a 64-bit number.
func (r record) align() []byte { return r.fill((len(r) + 7) &^ 7) }

// view reads such a struct. Reads behind its end return zero: the caller compares the whole struct afterwards.
type view []byte

func (v view) from(at, length int) []byte {
	if at+length > len(v) {
		return make([]byte, length)
	}
	return v[at:]
}

func (v view) u8(at int) uint8           { return v.from(at, 1)[0] }
func (v view) u16(at int) uint16         { return binary.NativeEndian.Uint16(v.from(at, 2)) }
func (v view) u32(at int) uint32         { return binary.NativeEndian.Uint32(v.from(at, 4)) }
func (v view) be16(at int) uint16        { return binary.BigEndian.Uint16(v.from(at, 2)) }
func (v view) address(at int) netip.Addr { return netip.AddrFrom4([4]byte(v.from(at, 4))) }
