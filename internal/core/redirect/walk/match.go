package walk

import (
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// unknown is the name of an unknown interface.
const unknown = "?"

// question is a packet at a hook, for the matches of a rule.
type question struct {
	Packet
	*course

	hook string
	// free has the packet's fields that may have any value for this rule.
	free Fields
}

// all reports whether all matches hold.
func (q question) all(matches []ruleset.Match) Answer {
	answer := Yes
	for _, m := range matches {
		if answer = min(answer, q.match(m)); answer == No {
			break
		}
	}
	return answer
}

// match reports whether a match holds.
func (q question) match(m ruleset.Match) Answer {
	switch m := m.(type) {
	case ruleset.Interface:
		return not(q.link(m), m.Not)
	case ruleset.Network:
		if m.Prefix.Bits() == 0 && !m.Not {
			return sure(ruleset.FamilyOf(m.Prefix.Addr()) == q.family)
		}
		return q.match(ruleset.Addresses{First: m.Prefix.Masked().Addr(), Last: last(m.Prefix), Source: m.Source, Not: m.Not})
	case ruleset.Addresses:
		if ruleset.FamilyOf(m.First) != q.family {
			return No
		}
		return not(q.address(m), m.Not)
	case ruleset.Protocol:
		return not(sure(m.Number == 0 || m.Number == q.Protocol), m.Not)
	case ruleset.Port:
		return min(q.transport(m.Protocol), not(q.port(m.Source, m.Range), m.Not))
	case ruleset.AnyPort:
		return min(q.transport(m.Protocol), not(q.anyPort(m), m.Not))
	case ruleset.OfFamily:
		return sure(ruleset.Family(m) == q.family)
	case ruleset.Comment, ruleset.Counter, ruleset.Neutral, ruleset.Header:
		return Yes
	case ruleset.Not:
		return Yes - q.match(m.Match)
	case ruleset.AnyOf:
		return not(q.anyOf(m), m.Not)
	}
	return q.stateful(m)
}

// stateful is match for data that the packet itself does not carry: socket, connection and mark.
func (q question) stateful(m ruleset.Match) Answer {
	switch m := m.(type) {
	case ruleset.TCPFlags:
		return min(q.transport(ruleset.TCP), not(q.flags(m), m.Not))
	case ruleset.SocketExists:
		return sure(q.Outgoing)
	case ruleset.Owner:
		return q.owner(m)
	case ruleset.Mark:
		mark := q.Mark
		if m.Connection {
			if mark = q.ConnMark; !q.connected() {
				return No // no connection: a negated match does not hold either (net/netfilter/xt_connmark.c)
			}
		}
		return not(sure(m.Of(mark)), m.Not)
	case ruleset.StateAlias:
		return q.match(ruleset.States(m))
	case ruleset.States:
		return sure((q.State|q.Translated)&m != 0)
	case ruleset.AddressType:
		return not(q.addressType(m), m.Not)
	case ruleset.Absent:
		if q.State == ruleset.StateEstablished || q.family == ruleset.IPv6 && q.Outgoing && q.free != 0 { // an app can send extension headers
			return Unknown
		}
		return No
	case ruleset.Reply:
		return sure(q.reply)
	case ruleset.ReversePath:
		if q.free&FreeSource != 0 && len(q.Links) > 1 {
			return Unknown
		}
		// Packets are assumed to come from valid sources. A mark of the mesh has a route only to lo.
		back := !m.ByMark || !q.delivers(q.Mark)
		return sure(back != m.Missing)
	}
	return Unknown
}

func sure(b bool) Answer {
	if b {
		return Yes
	}
	return No
}

func not(a Answer, negated bool) Answer {
	if negated {
		return Yes - a
	}
	return a
}

// anyOf reports whether one alternative holds.
func (q question) anyOf(m ruleset.AnyOf) Answer {
	if m.Changes && q.free != 0 {
		return Unknown
	}
	answer := No
	for _, one := range m.List {
		if answer = max(answer, q.all(one)); answer == Yes {
			break
		}
	}
	return answer
}

// link compares the interface.
func (q question) link(m ruleset.Interface) Answer {
	name := q.In
	if m.Out {
		name = q.Out
	}
	if name == unknown {
		return Unknown
	}
	return sure(m.Of(name))
}

// last returns the last address of a network.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := range b {
		if at := p.Bits() - 8*i; at < 8 {
			b[i] |= 0xff >> max(0, at)
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// address compares an address with a range.
func (q question) address(m ruleset.Addresses) Answer {
	inside := func(a netip.Addr) bool { return m.First.Compare(a) <= 0 && a.Compare(m.Last) <= 0 }
	a, free := q.Dst.Addr(), q.free&FreeDestination != 0
	if m.Source {
		a, free = q.Src.Addr(), q.free&FreeSource != 0
	}
	mine := m.Source == q.Outgoing || q.Type == local
	switch {
	case !a.IsValid():
		return Unknown
	case mine && q.free&FreeOwn != 0 && !a.IsLoopback() && slices.Contains(q.Own, a):
		return q.anyOwn(inside)
	case !free:
		return sure(inside(a))
	case q.near(m.First) && q.near(m.Last):
		return No
	}
	return Unknown
}

// anyOwn reports whether the namespace's addresses are inside; the packet has one of them.
func (q question) anyOwn(inside func(netip.Addr) bool) Answer {
	all, some := true, false
	for _, a := range q.Own {
		if ruleset.FamilyOf(a) == q.family && !a.IsLoopback() {
			all, some = all && inside(a), some || inside(a)
		}
	}
	switch {
	case all:
		return Yes
	case some:
		return Unknown
	}
	return No
}

// near reports whether an address cannot belong to another host. A packet to it takes another path or does not concern the mesh.
func (q question) near(a netip.Addr) bool {
	return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() || q.Outgoing && a == q.Src.Addr() || !q.Outgoing && a == q.Dst.Addr()
}

// transport reports whether the packet has the given protocol, or any protocol with ports for 0.
func (q question) transport(protocol uint8) Answer {
	return sure(protocol == q.Protocol || protocol == 0)
}

func (q question) port(source bool, in ruleset.PortRange) Answer {
	number, free := q.Dst.Port(), q.free&FreeDestinationPort != 0
	if source {
		number, free = q.Src.Port(), q.free&FreeSourcePort != 0
	}
	if in.First == 0 && in.Last == 1<<16-1 {
		return Yes
	}
	if number == 0 || free {
		return Unknown
	}
	return sure(in.First <= number && number <= in.Last)
}

func (q question) anyPort(m ruleset.AnyPort) Answer {
	answer := No
	for _, one := range m.List {
		if m.Side != ruleset.SourcePort {
			answer = max(answer, q.port(false, one))
		}
		if m.Side != ruleset.DestinationPort {
			answer = max(answer, q.port(true, one))
		}
	}
	return answer
}

// flags compares TCP flags. The first packet of a connection has SYN only.
func (q question) flags(m ruleset.TCPFlags) Answer {
	if q.State&(ruleset.StateEstablished|ruleset.StateRelated) != 0 {
		return Unknown
	}
	const syn, ecn = 2, 0xc0
	switch {
	case syn&m.Mask&^ecn != m.Set&^ecn:
		return No
	case m.Mask&ecn != 0: // a connection that asks for ECN sets them
		return Unknown
	}
	return Yes
}

// owner compares the sender. Without a sender neither a match nor its negation holds. A free sender may be any user except the proxy.
func (q question) owner(m ruleset.Owner) Answer {
	id, known := q.UID, q.free&FreeUser == 0
	if m.Group {
		id = q.GID
	}
	switch first, last := m.Range(); {
	case !q.Outgoing || q.hook != "output" && q.hook != "postrouting":
		return No
	case known:
		return not(sure(first <= id && id <= last), m.Not)
	case first == last && slices.Contains(q.proxy, ruleset.Owner{ID: first, Group: m.Group}):
		return not(No, m.Not)
	}
	return Unknown
}

// addressType compares the type of an address.
func (q question) addressType(m ruleset.AddressType) Answer {
	name := q.Type
	switch {
	case !m.Source:
	case !q.Src.Addr().IsValid():
		name = ""
	case q.Outgoing:
		name = local
	default:
		name = "UNICAST"
	}
	if name == "" {
		return Unknown
	}
	return sure(m.Has(name))
}
