// Package walk follows one packet through the live rules of a pod's network namespace, as netfilter would pass it, and
// names each rule that the packet meets with its reason.
//
// It promises that no answer rests on a rule that it does not understand: if such a rule may match, both readings are
// followed, and unless they end alike the answer is CannotTell and names the rule. Time and memory are bounded whatever
// the rules are. It never reads a namespace, and does not know whether a process listens where a packet ends.
//
// Start at Namespace.Walk. hooks.go has the order of hooks and the routing between them, chain.go the passage through one
// chain, target.go what a rule does, match.go whether it matches, reason.go the answer as a sentence.
package walk

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Namespace is what decides about packets: rules, and the routing by their marks.
type Namespace struct {
	// Live are the rules as they were read: by family, those of iptables (nf_tables, legacy or both), and the native
	// tables. Sets that share a hook and a priority come in any order.
	Live []ruleset.Set
	// Wanted gives the rules their reasons, and the rules of native tables their meaning. Nil knows neither.
	Wanted *Wanted
	// Delivered are the marks that policy routing delivers locally, by family.
	Delivered map[ruleset.Family][]uint32
	// Tables are the routing tables of these marks.
	Tables map[uint32]uint32
	// Unread names tables that Live does not have; the summary says so.
	Unread []string
	// Hooked names, by family, what is not read and may decide about packets; Inet are those of both. With one, no walk of a packet of
	// the family has an answer.
	Hooked map[ruleset.Family][]string
}

// Wanted is the configuration that the live rules are explained by.
type Wanted struct {
	Spec     redirect.Spec
	Families redirect.Families
	Native   bool
}

// Sets returns the wanted rules.
func (w Wanted) Sets() []ruleset.Set {
	if w.Native {
		return []ruleset.Set{redirect.NativeRules(w.Spec, w.Families)}
	}
	return w.Spec.Sets(w.Families)
}

// Packet is a packet where it enters the rules. Of Src and Dst an invalid address and port 0 are not known.
type Packet struct {
	// Outgoing is a packet that a process of the pod sends; any other arrives by the interface In.
	Outgoing bool
	// In is the interface that it arrives by; Out the one it leaves by if no rule reroutes it, lo for the pod itself.
	In, Out  string
	Protocol uint8
	Src, Dst netip.AddrPort
	// UID and GID are those of the sending socket.
	UID, GID uint32
	// Mark is the packet's, ConnMark that of its connection.
	Mark, ConnMark uint32
	// State is that of the connection; 0 is StateNew, and Untracked has none.
	State ruleset.States
	// Type is that of the destination, as addrtype spells it. "" is the usual one: LOCAL for what arrives and for Out lo.
	Type string
}

// Untracked is the state of a packet that conntrack does not follow.
const Untracked ruleset.States = 1 << 6

// Verdict is what becomes of a packet.
type Verdict uint8

// The verdicts. Passed: it reaches its destination unredirected. Redirected: its destination was rewritten.
// HandedOver: TPROXY gave it to a socket, both addresses kept.
const (
	CannotTell Verdict = iota
	Passed
	Redirected
	HandedOver
	Dropped
	Rejected
)

// String returns one word.
func (v Verdict) String() string {
	return [...]string{"cannot-tell", "passed", "redirected", "handed-over", "dropped", "rejected"}[v]
}

// Answer says whether a rule matches a packet.
type Answer uint8

// The answers, in this order: the least answer of its conditions is a rule's. Unknown is a rule that may match.
const (
	No Answer = iota
	Unknown
	Yes
)

// String returns one word.
func (a Answer) String() string { return [...]string{"not-matched", "unknown", "matched"}[a] }

// Hop is a rule that the packet meets. Where a rule may match, the hops are those of a packet that it does not match.
type Hop struct {
	Hook, Table, Chain string
	// Set is the place in Namespace.Live; Number counts the rules of the chain from 1, and is 0 for the policy.
	Set, Number int
	Rule        string
	Answer      Answer
	// Why is the rule's reason, "" for a rule that is not wanted.
	Why string
}

// Result is the answer for one packet.
type Result struct {
	Verdict Verdict
	// To is where it was redirected to or handed over: without an address for a port of the pod itself.
	To netip.AddrPort
	// Zone is the conntrack zone that the raw table chose. Packet is as it leaves the rules.
	Zone   ruleset.Zone
	Packet Packet
	Hops   []Hop
	// Omitted counts hops that did not match and are left out.
	Omitted int
	// Decided is the rule that decided or, for CannotTell, that is not understood; nil if no rule did.
	Decided *Hop
	// Expected and ExpectedTo are what the wanted rules would do; CannotTell if they are not known.
	Expected   Verdict
	ExpectedTo netip.AddrPort
	// Settings are those by which the packet passes the wanted rules.
	Settings []Setting
	// Summary is one sentence.
	Summary string
}

// Walk follows the packet.
func (n Namespace) Walk(p Packet) Result {
	p = p.completed()
	w := n.walker(p, n.Live)
	r := w.walk(p)
	if w.ambiguous {
		reversed := slices.Clone(n.Live)
		slices.Reverse(reversed)
		if other := n.walker(p, reversed).walk(p); other.Verdict != r.Verdict || other.To != r.To {
			r.Verdict, r.Decided, r.limit = CannotTell, nil, "two sets of tables are at the same hook, in an order that is not known"
		}
	}
	return n.doubted(n.explained(r, p), familyOf(p.Dst.Addr()))
}

// doubted takes an answer back if packets pass tables that are not read.
func (n Namespace) doubted(r Result, f ruleset.Family) Result {
	if hooked := slices.Concat(n.Hooked[f], n.Hooked[ruleset.Inet]); len(hooked) > 0 && r.Verdict != CannotTell {
		r.Summary = "cannot tell, because packets pass " + printable.Text(strings.Join(hooked, ", "), maxText) +
			", which is not read here; by the tables that are read the packet " + r.Summary
		r.Verdict, r.Decided, r.Settings = CannotTell, nil, nil
	}
	return r
}

func (p Packet) completed() Packet {
	if p.State == 0 {
		p.State = ruleset.StateNew
	}
	switch dst := p.Dst.Addr(); {
	case p.Type != "":
	case p.Outgoing == (p.Out == "lo"):
		p.Type = local
	case dst.IsMulticast():
		p.Type = "MULTICAST"
	case dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		p.Type = "BROADCAST"
	default:
		p.Type = "UNICAST"
	}
	return p
}

// local is the type of an address of the pod.
const local = "LOCAL"

func familyOf(a netip.Addr) ruleset.Family {
	if a.Is6() {
		return ruleset.IPv6
	}
	return ruleset.IPv4
}
