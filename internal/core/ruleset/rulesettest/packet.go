// Package rulesettest answers, for tests, what rules mean: Trace follows a packet through a ruleset.Set, and
// Namespace is a model of what "iptables-restore --noflush" does with a ruleset.Program.
//
// It promises to understand exactly the matches and targets that this project emits and to return an error on any
// other, wherever it stands in the Set, so that an answer never rests on a rule that was skipped. It never touches the
// system; what the kernel does is written down from its sources, named where it is not obvious.
//
// Start at Packet and Trace, or at Namespace.
package rulesettest

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Hook is the way a packet takes through the pod's namespace.
type Hook uint8

// Outgoing packets are sent by a process of the pod (OUTPUT); Incoming ones arrive by an interface (PREROUTING, then
// INPUT).
const (
	Outgoing Hook = iota
	Incoming
)

// Proto is a packet's protocol. ICMP stands for the one of the packet's family.
type Proto string

// The protocols that rules tell apart.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	ICMP Proto = "icmp"
)

// State is what conntrack knows of a packet's connection. The empty State is New.
type State string

// The states, spelled as --ctstate spells them.
const (
	New         State = "NEW"
	Established State = "ESTABLISHED"
	Related     State = "RELATED"
	Invalid     State = "INVALID"
)

// Packet is a packet as it enters the chains.
type Packet struct {
	Hook Hook
	// In and Out name the interface it arrived by or will leave by; the other one is empty.
	In, Out      string
	Src, Dst     netip.Addr
	Proto        Proto
	Sport, Dport uint16
	// UID and GID are those of the sending socket; they mean nothing for an Incoming packet.
	UID, GID uint32
	// NoSocket says that the kernel itself sends the packet, as it does a reset or an ICMP error.
	NoSocket bool
	// RST says that a TCP packet is a reset.
	RST bool
	// Mark is the packet's own, Connmark that of its connection.
	Mark, Connmark uint32
	State          State
}

// Loop gives the packet as it arrives again after it left by lo: the mark and the connection stay with it
// (drivers/net/loopback.c passes the same buffer on), the sender is forgotten.
func (p Packet) Loop() Packet {
	p.Hook, p.In, p.Out = Incoming, "lo", ""
	p.UID, p.GID, p.NoSocket = 0, 0, false
	return p
}

// check refuses packets that cannot be, so that a slip in a test is not answered.
func (p Packet) check(family ruleset.Family) error {
	want := family == ruleset.IPv4 || family == ruleset.Inet && p.Src.Is4()
	switch {
	case !p.Src.IsValid() || !p.Dst.IsValid():
		return fmt.Errorf("packet has no source or no destination")
	case p.Src.Is4() != want || p.Dst.Is4() != want:
		return fmt.Errorf("packet from %s to %s is not %s", p.Src, p.Dst, family)
	case p.Hook == Outgoing && (p.Out == "" || p.In != ""), p.Hook == Incoming && (p.In == "" || p.Out != ""):
		return fmt.Errorf("packet has interfaces in %q and out %q, want exactly the one of its hook", p.In, p.Out)
	case p.Proto != TCP && p.Proto != UDP && p.Proto != ICMP:
		return fmt.Errorf("packet has protocol %q", p.Proto)
	case p.Proto == ICMP && (p.Sport != 0 || p.Dport != 0):
		return fmt.Errorf("packet of protocol icmp has ports")
	}
	return nil
}

// Action is what becomes of a packet.
type Action uint8

// Accept lets it go where it was going; Redirect rewrites its destination to a port of the pod; TPROXY hands it to a
// listener with its addresses kept; Drop and Reject end it.
const (
	Accept Action = iota
	Redirect
	TPROXY
	Drop
	Reject
)

// Verdict is the answer of Trace.
type Verdict struct {
	Action Action
	// Port is the listener's for Redirect and TPROXY.
	Port uint16
	// With is the answer to the sender of a Reject.
	With string
	// Zone is the conntrack zone that the raw table chose; 0 is the ordinary one.
	Zone uint16
	// Packet is the packet as it leaves the chains: its marks, and after a Redirect its new destination.
	Packet Packet
	// Path holds the rules that matched, in the order in which they did.
	Path []Step
}

// Step is a rule that matched.
type Step struct {
	Table, Chain string
	Rule         ruleset.Rule
}

// String gives the step as one line, with the rule's reason if it has one.
func (s Step) String() string {
	text := fmt.Sprintf("%s/%s: %s", s.Table, s.Chain, s.Rule.String())
	if s.Rule.Why != "" {
		text += "    # " + s.Rule.Why
	}
	return text
}

// String says what became of the packet, and with which mark and zone if it has one.
func (v Verdict) String() string {
	var b strings.Builder
	switch v.Action {
	case Accept:
		b.WriteString("accepted")
	case Redirect:
		fmt.Fprintf(&b, "redirected to %d", v.Port)
	case TPROXY:
		fmt.Fprintf(&b, "handed to %d", v.Port)
	case Drop:
		b.WriteString("dropped")
	case Reject:
		fmt.Fprintf(&b, "rejected with %s", v.With)
	}
	if v.Packet.Mark != 0 {
		fmt.Fprintf(&b, ", mark %d", v.Packet.Mark)
	}
	if v.Zone != 0 {
		fmt.Fprintf(&b, ", zone %d", v.Zone)
	}
	return b.String()
}

// Explain lists the rules that led to the verdict, one per line.
func (v Verdict) Explain() string {
	var b strings.Builder
	for _, s := range v.Path {
		fmt.Fprintf(&b, "  %s\n", s)
	}
	return b.String()
}
