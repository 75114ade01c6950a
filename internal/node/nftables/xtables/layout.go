package xtables

import (
	"encoding/binary"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// layout is a match or target as a struct of x_tables.
type layout struct {
	key
	info []byte
}

// key names a match or target with the revision of its struct.
type key struct {
	name     string
	revision uint32
}

// The structs (include/uapi/linux/netfilter/xt_NAME.h), with the fields that are written or read. A blank field stands for other fields.
type (
	tcpInfo struct {
		Source, Destination             [2]uint16
		Option, Mask, Compare, Inverted uint8
	}
	udpInfo struct {
		Source, Destination [2]uint16
		Inverted            uint8
	}
	multiportInfo struct { // xt_multiport_v1
		Side, Count uint8
		Ports       [15]uint16
		Ranged      [15]uint8
		Inverted    uint8
	}
	ownerInfo struct {
		UIDs, GIDs      [2]uint32
		Match, Inverted uint8
	}
	markInfo struct { // xt_mark_mtinfo1, xt_connmark_mtinfo1
		Mark, Mask uint32
		Inverted   uint8
	}
	conntrackInfo struct { // xt_conntrack_mtinfo2 and 3; version 2 lacks the last ports
		_                      [146]byte
		Match, Inverted, State uint16
		_                      [10]byte
	}
	addrtypeInfo struct{ Source, Destination uint16 }
	iprangeInfo  struct {
		Source, Destination [2][16]byte
		Flags               uint8
	}
	markTarget     struct{ Mark, Mask uint32 } // xt_mark_tginfo2
	connmarkTarget struct {                    // xt_connmark_tginfo1
		Mark, ConnectionMask, PacketMask uint32
		Mode                             uint8
	}
	connmarkTarget2 struct {
		Mark, ConnectionMask, PacketMask uint32
		_                                [2]uint8 // shifts
		Mode                             uint8
	}
	tproxyTarget struct { // xt_tproxy_target_info_v1
		Mask, Mark uint32
		_          [16]byte // the address
		Port       port
	}
	ctTarget struct { // xt_ct_target_info_v1
		Flags, Zone uint16
		_           [68]byte // events, helper, timeout, a pointer
	}
	natMulti struct { // nf_nat_ipv4_multi_range_compat with one range
		Size, Flags uint32
		Addresses   [2][4]byte
		Ports       [2]port
	}
	natRange struct { // nf_nat_range, the start of nf_nat_range2
		Flags     uint32
		Addresses [2][16]byte
		Ports     [2]port
	}
)

// port is a port in network byte order.
type port [2]byte

func portOf(number uint16) port { return port(nfnetlink.PortValue(number)) }

func (p port) number() uint16 { return binary.BigEndian.Uint16(p[:]) }

// pack returns a struct in host byte order, padded like XT_ALIGN: to a multiple of the alignment of a 64-bit number.
func pack(name string, revision uint32, info any) layout {
	data, _ := binary.Append(nil, binary.NativeEndian, info) // all structs have a fixed size
	return layout{key{name, revision}, append(data, make([]byte, -len(data)&7)...)}
}

// unpack reads a struct. It pads a short one with zeros: the caller compares what it would write with the whole input.
func unpack[S any](info []byte) (s S) {
	_, _ = binary.Decode(slices.Concat(info, make([]byte, binary.Size(s))), binary.NativeEndian, &s)
	return s
}

// Values of the structs.
const (
	allBits          = 1<<32 - 1
	ownerUID         = 1 << 0
	ownerGID         = 1 << 1
	ownerSocket      = 1 << 2
	conntrackByState = 1 << 0
	natAddresses     = 1 << 0
	natPorts         = 1 << 1
)

var allPorts = [2]uint16{0, 1<<16 - 1} //nolint:gochecknoglobals // a constant

// trackedStates are the states whose bits equal the kernel's.
const trackedStates = ruleset.StateInvalid | ruleset.StateNew | ruleset.StateRelated | ruleset.StateEstablished

// layouts returns all structs by which versions of iptables write a match or target, 1.8.9 first. A match that is never written has none.
func layouts(f ruleset.Family, part ruleset.Match) []layout {
	switch p := part.(type) {
	case ruleset.Port: // before 1.8.8
		return []layout{portLayout(p)}
	case ruleset.Header:
		switch uint8(p) {
		case ruleset.TCP:
			return []layout{pack("tcp", 0, tcpInfo{Source: allPorts, Destination: allPorts})}
		case ruleset.UDP:
			return []layout{pack("udp", 0, udpInfo{Source: allPorts, Destination: allPorts})}
		}
	case ruleset.TCPFlags:
		if p == ruleset.Reset {
			return []layout{pack("tcp", 0, tcpInfo{allPorts, allPorts, 0, nfnetlink.TCPReset, nfnetlink.TCPReset, 0})}
		}
	case ruleset.AnyPort:
		single := func(r ruleset.PortRange) bool { return r.First == r.Last }
		if p.Side == ruleset.DestinationPort && len(p.List) == 2 && single(p.List[0]) && single(p.List[1]) {
			ports := [15]uint16{p.List[0].First, p.List[1].First}
			return []layout{pack("multiport", 1, multiportInfo{Side: 1, Count: 2, Ports: ports, Inverted: bit(p.Not, 1)})}
		}
	case ruleset.Owner:
		switch ids := [2]uint32{p.ID, p.ID}; {
		case p.Last != 0:
		case p.Group:
			return []layout{pack("owner", 1, ownerInfo{GIDs: ids, Match: ownerGID, Inverted: bit(p.Not, ownerGID)})}
		default:
			return []layout{pack("owner", 1, ownerInfo{UIDs: ids, Match: ownerUID, Inverted: bit(p.Not, ownerUID)})}
		}
	case ruleset.Mark:
		name := "mark"
		if p.Connection {
			name = "connmark"
		}
		return []layout{pack(name, 1, markInfo{p.Value, ruleset.WholeMark(p.Mask), bit(p.Not, 1)})}
	case ruleset.States:
		if p&^trackedStates == 0 {
			return []layout{pack("conntrack", 3, conntrackInfo{Match: conntrackByState, State: uint16(p)})}
		}
	}
	return targetLayouts(f, part)
}

func targetLayouts(f ruleset.Family, target ruleset.Target) []layout {
	switch t := target.(type) {
	case ruleset.RedirectTo:
		ports := [2]port{portOf(uint16(t)), portOf(uint16(t))}
		if f == ruleset.IPv6 {
			return []layout{pack("REDIRECT", 0, natRange{Flags: natPorts, Ports: ports})}
		}
		return []layout{pack("REDIRECT", 0, natMulti{Size: 1, Flags: natPorts, Ports: ports})}
	case ruleset.SetMark:
		if t.Connection { // nfmask is all bits, or 0
			set := connmarkTarget{Mark: t.Value, ConnectionMask: ruleset.WholeMark(t.Mask)}
			whole := set
			whole.PacketMask = allBits
			return append(whole.layouts(), set.layouts()...)
		}
		return []layout{pack("MARK", 2, markTarget{t.Value, ruleset.WholeMark(t.Mask)})}
	case ruleset.CopyMark:
		return connmarkTarget{0, ruleset.WholeMark(t.ConnectionMask), ruleset.WholeMark(t.PacketMask), 1 + bit(t.Restore, 1)}.layouts()
	case ruleset.TProxy:
		if !t.Continues {
			return []layout{pack("TPROXY", 1, tproxyTarget{Mask: ruleset.WholeMark(t.Mask), Mark: t.Mark, Port: portOf(t.Port)})}
		}
	case ruleset.Zone:
		return []layout{pack("CT", 2, ctTarget{Zone: uint16(t)}), pack("CT", 1, ctTarget{Zone: uint16(t)})}
	case ruleset.Reject:
		if with, ok := rejectWith[f][t]; ok {
			return []layout{pack("REJECT", 0, with)}
		}
	}
	return nil
}

// rejectWith are the values of ipt_reject_info and ip6t_reject_info (netfilter_ipv4/ipt_REJECT.h, netfilter_ipv6/ip6t_REJECT.h).
var rejectWith = map[ruleset.Family]map[ruleset.Reject]uint32{ //nolint:gochecknoglobals // a constant table
	ruleset.IPv4: {ruleset.PortUnreachable: 3, ruleset.TCPReset: 7},
	ruleset.IPv6: {ruleset.PortUnreachableV6: 4, ruleset.TCPReset: 6},
}

func portLayout(p ruleset.Port) layout {
	source, destination, inverted := allPorts, [2]uint16{p.Range.First, p.Range.Last}, bit(p.Not, 2)
	if p.Source {
		source, destination, inverted = destination, source, bit(p.Not, 1)
	}
	if p.Protocol == ruleset.UDP {
		return pack("udp", 0, udpInfo{source, destination, inverted})
	}
	return pack("tcp", 0, tcpInfo{Source: source, Destination: destination, Inverted: inverted})
}

func (c connmarkTarget) layouts() []layout {
	two := connmarkTarget2{Mark: c.Mark, ConnectionMask: c.ConnectionMask, PacketMask: c.PacketMask, Mode: c.Mode}
	return []layout{pack("CONNMARK", 2, two), pack("CONNMARK", 1, c)}
}

// bit returns the bit if it is wanted, else 0.
func bit(wanted bool, value uint8) uint8 {
	if wanted {
		return value
	}
	return 0
}
