package xtables

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Read returns a match or target of x_tables from the attributes of an expression of the kind "match" or "target". Its rule has the
// family and, once compared, the protocol. The text of an unknown match or target contains the handle.
func Read(kind string, f ruleset.Family, protocol uint8, fields *nfnetlink.Fields, handle uint64) ruleset.Match {
	// NFTA_MATCH_NAME, _REV and _INFO have the numbers of NFTA_TARGET_….
	revision, ok := fields.Number(unix.NFTA_MATCH_REV)
	if !ok || fields.Count() != 3 {
		return ruleset.Other{Text: fmt.Sprintf("[a broken %s, see rule handle %d]", kind, handle)}
	}
	l := layout{key{fields.Text(unix.NFTA_MATCH_NAME), revision}, fields.Raw(unix.NFTA_MATCH_INFO)}
	for _, part := range append(l.targets(f), l.match(f, protocol)) {
		// If Encode would write other bytes, the struct has content that was not read.
		written := layouts(f, part)
		if part != nil && (written == nil || slices.ContainsFunc(written, l.equal)) {
			return part
		}
	}
	name := strings.Join(strings.FieldsFunc(l.name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '"' }), "_")
	option := map[string]string{"match": "-m", "target": "-j"}[kind]
	return ruleset.Other{Text: fmt.Sprintf("%s %s [see rule handle %d]", option, name, handle)}
}

func (l layout) equal(o layout) bool { return l.key == o.key && bytes.Equal(l.info, o.info) }

// match reads the struct of a match. It returns nil for an unknown one.
func (l layout) match(f ruleset.Family, protocol uint8) ruleset.Match {
	if slices.Contains(ruleset.AbsentModules(), l.name) {
		return ruleset.Absent{Text: fmt.Sprintf("-m %s [%x]", l.name, l.info)}
	}
	switch l.key {
	case key{"comment", 0}:
		text, _, _ := bytes.Cut(l.info, []byte{0})
		return ruleset.Comment{Text: string(text)}
	case key{"tcp", 0}:
		return unpack[tcpInfo](l.info).match()
	case key{"udp", 0}:
		return unpack[udpInfo](l.info).match()
	case key{"multiport", 1}:
		return unpack[multiportInfo](l.info).match(protocol)
	case key{"owner", 1}:
		return unpack[ownerInfo](l.info).match()
	case key{"mark", 1}, key{"connmark", 1}:
		info := unpack[markInfo](l.info)
		return ruleset.Mark{Value: info.Mark, Mask: maskOf(info.Mask), Connection: l.name == "connmark", Not: info.Inverted != 0}
	case key{"conntrack", 1}, key{"conntrack", 2}, key{"conntrack", 3}:
		info := unpack[conntrackInfo](l.info)
		if l.revision == 1 { // the state has 8 bits
			info.State = uint16(unpack[[151]uint8](l.info)[150])
		}
		return info.match()
	case key{"addrtype", 1}: // flags behind the types
		flags := unpack[[2]uint32](l.info)[1]
		return unpack[addrtypeInfo](l.info).match(flags&1 != 0, flags&2 != 0, flags&^3 != 0)
	case key{"addrtype", 0}: // whether each is inverted
		not := unpack[[3]uint32](l.info)
		return unpack[addrtypeInfo](l.info).match(not[1] != 0, not[2] != 0, false)
	case key{"iprange", 1}:
		return unpack[iprangeInfo](l.info).match(f)
	case key{"rpfilter", 0}:
		const loose, mark, local, inverted = 1, 2, 4, 8
		if flags := unpack[uint8](l.info); flags&^(loose|mark|local|inverted) == 0 {
			return ruleset.ReversePath{Missing: flags&inverted != 0, ByMark: flags&mark != 0}
		}
	}
	return nil
}

// maskOf returns a mask, 0 for all bits.
func maskOf(bits uint32) uint32 {
	if bits == allBits {
		return 0
	}
	return bits
}

func portMatch(protocol uint8, source, destination [2]uint16, inverted uint8) ruleset.Match {
	p := ruleset.Port{Protocol: protocol, Source: source != allPorts, Not: inverted != 0}
	if p.Range = (ruleset.PortRange{First: destination[0], Last: destination[1]}); p.Source {
		p.Range = ruleset.PortRange{First: source[0], Last: source[1]}
	}
	return p
}

func (i tcpInfo) match() ruleset.Match {
	const flagsInverted = 4
	switch {
	case i.Source != allPorts || i.Destination != allPorts:
		return portMatch(ruleset.TCP, i.Source, i.Destination, i.Inverted)
	case i.Option != 0 || i.Inverted&^flagsInverted != 0:
		return nil
	case i.Mask == 0 && i.Compare == 0 && i.Inverted == 0:
		return ruleset.Header(ruleset.TCP)
	}
	return ruleset.TCPFlags{Mask: i.Mask, Set: i.Compare, Not: i.Inverted != 0}
}

func (i udpInfo) match() ruleset.Match {
	switch {
	case i.Source != allPorts || i.Destination != allPorts:
		return portMatch(ruleset.UDP, i.Source, i.Destination, i.Inverted)
	case i.Inverted != 0:
		return nil
	}
	return ruleset.Header(ruleset.UDP)
}

func (i multiportInfo) match(protocol uint8) ruleset.Match {
	m := ruleset.AnyPort{Protocol: protocol, Not: i.Inverted != 0}
	if i.Side > 2 || int(i.Count) > len(i.Ports) {
		return nil
	}
	m.Side = [...]ruleset.Side{ruleset.SourcePort, ruleset.DestinationPort, ruleset.EitherPort}[i.Side]
	for at := 0; at < int(i.Count); at++ {
		r := ruleset.OnePort(i.Ports[at])
		if i.Ranged[at] != 0 && at+1 < int(i.Count) {
			at++
			r.Last = i.Ports[at]
		}
		m.List = append(m.List, r)
	}
	return m
}

func (i addrtypeInfo) match(notSource, notDestination, more bool) ruleset.Match {
	switch {
	case more || i.Source != 0 && i.Destination != 0:
		return nil
	case i.Source != 0:
		return ruleset.AddressType{Types: i.Source, Source: true, Not: notSource}
	}
	return ruleset.AddressType{Types: i.Destination, Not: notDestination}
}

func address(f ruleset.Family, a [16]byte) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.AddrFrom16(a)
	}
	return netip.AddrFrom4([4]byte(a[:]))
}

func (i iprangeInfo) match(f ruleset.Family) ruleset.Match {
	const source, destination, notSource, notDestination = 1, 2, 1 << 4, 1 << 5
	switch i.Flags &^ (notSource | notDestination) {
	case source:
		return ruleset.Addresses{First: address(f, i.Source[0]), Last: address(f, i.Source[1]), Source: true, Not: i.Flags&notSource != 0}
	case destination:
		return ruleset.Addresses{First: address(f, i.Destination[0]), Last: address(f, i.Destination[1]), Not: i.Flags&notDestination != 0}
	}
	return nil
}

func (i ownerInfo) match() ruleset.Match {
	ids, not := i.UIDs, i.Inverted != 0
	switch i.Match {
	case ownerSocket:
		if not {
			return ruleset.Not{Match: ruleset.SocketExists{}}
		}
		return ruleset.SocketExists{}
	case ownerGID:
		ids = i.GIDs
	case ownerUID:
	default:
		return nil
	}
	o := ruleset.Owner{ID: ids[0], Last: ids[1], Group: i.Match == ownerGID, Not: not}
	if o.Last == o.ID {
		o.Last = 0
	} else if o.Last < o.ID {
		return nil
	}
	return o
}

// match reads the state: the kernel's bits, and SNAT, DNAT and UNTRACKED.
func (i conntrackInfo) match() ruleset.Match {
	const alias, snat, dnat, untracked = 1 << 13, 1 << 6, 1 << 7, 1 << 8
	//nolint:gosec // few bits of each
	s := ruleset.States(i.State)&trackedStates | ruleset.States(i.State>>1)&(ruleset.StateSNAT|ruleset.StateDNAT) |
		ruleset.States(i.State>>4)&ruleset.StateUntracked
	switch {
	case i.Match&^alias != conntrackByState || i.Inverted&^(conntrackByState|alias) != 0 || i.State&^(uint16(trackedStates)|snat|dnat|untracked) != 0:
		return nil
	case i.Inverted&conntrackByState != 0:
		return ruleset.Not{Match: s}
	case i.Match&alias != 0:
		return ruleset.StateAlias(s)
	case s == 0:
		return nil
	}
	return s
}

// targets returns the possible meanings of the struct of a target.
func (l layout) targets(f ruleset.Family) []ruleset.Target {
	switch {
	case l.name == "LOG": // xt_log_info: level, logflags, prefix
		prefix := unpack[[32]byte](l.info)
		text, _, _ := strings.Cut(string(prefix[2:]), "\x00")
		if text != "" {
			return []ruleset.Target{ruleset.Neutral{Text: fmt.Sprintf("-j LOG --log-prefix %q", text)}}
		}
		return []ruleset.Target{ruleset.Neutral{Text: "-j LOG"}}
	case ruleset.NeutralTarget(l.name) && l.name != "":
		return []ruleset.Target{ruleset.Neutral{Text: "-j " + l.name, Copies: l.name == "TEE"}}
	}
	switch l.name {
	case "MASQUERADE":
		return []ruleset.Target{ruleset.NAT{Source: true, Range: true, Text: "-j MASQUERADE"}}
	case "SNAT", "REDIRECT", "DNAT":
		return []ruleset.Target{l.translation(f)}
	case "MARK":
		info := unpack[markTarget](l.info)
		return []ruleset.Target{ruleset.SetMark{Value: info.Mark, Mask: maskOf(info.Mask)}}
	case "CONNMARK":
		info := unpack[connmarkTarget](l.info)
		connection, packet := maskOf(info.ConnectionMask), maskOf(info.PacketMask)
		return []ruleset.Target{
			ruleset.SetMark{Value: info.Mark, Mask: connection, Connection: true},
			ruleset.CopyMark{ConnectionMask: connection, PacketMask: packet},
			ruleset.CopyMark{Restore: true, ConnectionMask: connection, PacketMask: packet},
		}
	case "TPROXY":
		info := unpack[tproxyTarget](l.info)
		return []ruleset.Target{ruleset.TProxy{Family: f, Port: info.Port.number(), Mark: info.Mark, Mask: maskOf(info.Mask)}}
	case "CT":
		return unpack[ctTarget](l.info).targets()
	case "REJECT":
		with := unpack[uint32](l.info)
		all := []ruleset.Target{ruleset.Reject(fmt.Sprintf("type %d", with))}
		for answer, number := range rejectWith[f] {
			if number == with {
				all = []ruleset.Target{answer, all[0]}
			}
		}
		return all
	}
	return nil
}

// targets returns a zone, or the options that affect only conntrack.
func (i ctTarget) targets() []ruleset.Target {
	const notrack, alias = 1 << 0, 1 << 1
	switch {
	case i.Zone != 0:
		return []ruleset.Target{ruleset.Zone(i.Zone)}
	case i.Flags&^alias == notrack:
		return []ruleset.Target{ruleset.NoTrack{}}
	case i.Flags == 0:
		return []ruleset.Target{ruleset.Neutral{Text: "-j CT"}}
	}
	return nil
}

// translation reads a range of addresses and ports.
func (l layout) translation(f ruleset.Family) ruleset.Target {
	r, single := l.natRange(f)
	if !single {
		return nil
	}
	n, to := ruleset.NAT{Local: l.name == "REDIRECT", Source: l.name == "SNAT"}, ""
	if r.Flags&natAddresses != 0 && !n.Local {
		n.To, n.Range = address(f, r.Addresses[0]), r.Addresses[0] != r.Addresses[1]
		if to = upTo(n.To, address(f, r.Addresses[1])); f == ruleset.IPv6 && r.Flags&natPorts != 0 {
			to = "[" + to + "]"
		}
	}
	if r.Flags&natPorts != 0 {
		n.Port, n.Range = r.Ports[0].number(), n.Range || r.Ports[0] != r.Ports[1]
		if !n.Local {
			to += ":"
		}
		to += upTo(n.Port, r.Ports[1].number())
	}
	if n.Local && r.Flags == natPorts && !n.Range {
		return ruleset.RedirectTo(n.Port)
	}
	if n.Text = "-j " + l.name; to != "" {
		n.Text += map[string]string{"REDIRECT": " --to-ports ", "DNAT": " --to-destination ", "SNAT": " --to-source "}[l.name] + to
	}
	more := r.Flags &^ (natPorts | natAddresses)
	if n.Local { // a redirection has no address
		more = r.Flags &^ natPorts
	}
	if more != 0 {
		n.Text += fmt.Sprintf(" [flags %d]", more)
	}
	return n
}

// natRange reads the range of revision 0, which IPv4 has as the only one of a list, or of a later revision.
func (l layout) natRange(f ruleset.Family) (r natRange, single bool) {
	if f != ruleset.IPv4 || l.revision != 0 {
		return unpack[natRange](l.info), true
	}
	multi := unpack[natMulti](l.info)
	r = natRange{Flags: multi.Flags, Ports: multi.Ports}
	for i := range multi.Addresses {
		copy(r.Addresses[i][:], multi.Addresses[i][:])
	}
	return r, multi.Size == 1
}

// upTo returns the text of a range.
func upTo[T comparable](first, last T) string {
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprint(first, "-", last)
}
