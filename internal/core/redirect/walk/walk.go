// Package walk follows one packet through the live rules of a pod's network namespace, as netfilter does, and
// names each rule that the packet meets with its reason.
//
// It promises that no answer rests on a rule that it does not understand: if such a rule may match, it follows both
// readings, and if they end differently the answer is CannotTell and names the rule. Time and memory are bounded whatever
// the rules are. It never reads a namespace, and does not know whether a process listens where a packet ends.
//
// Start at Namespace.Walk. hooks.go has the order of hooks and the routing between them, chain.go the passage through one
// chain, target.go what a rule does, match.go whether it matches, reason.go the answer as a sentence.
package walk

import (
	"cmp"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Namespace holds everything that decides about packets: the rules, and the routing by marks.
type Namespace struct {
	// Live has the rules of all tables as they were read. Sets that share a hook and a priority come in any order.
	Live []ruleset.Set
	// Owner recognises the mesh's rules.
	Owner redirect.Owner
	// Wanted provides the reasons of rules; nil if unknown.
	Wanted *Wanted
	// Delivered has the marks that policy routing delivers locally, by family.
	Delivered map[ruleset.Family][]ruleset.Mark
	// Selected has the marks by which policy rules select other routes.
	Selected map[ruleset.Family][]ruleset.Mark
	// Tables has the routing tables of these marks.
	Tables map[uint32]uint32
	// Unread names, by family, the tables that could not be read. If a family has one, walks of its packets have no answer.
	Unread map[ruleset.Family][]string
	// Loopback is the name of the loopback device, "" for lo; Links has the names of the other interfaces that are up.
	Loopback string
	Links    []string
	// Own are the addresses of the namespace.
	Own []netip.Addr
}

// Wanted is the configuration that the live rules are explained by.
type Wanted struct {
	Spec redirect.Spec
	// Ambient is the configuration of a pod in ambient mode, nil for a sidecar; see WantedOf.
	Ambient  *ambient.Spec
	Families redirect.Families
	Native   bool
}

// Sets returns the wanted rules.
func (w Wanted) Sets() []ruleset.Set {
	if w.Native {
		return []ruleset.Set{w.Mode().NativeSet(w.Families)}
	}
	return w.Mode().Sets(w.Families)
}

// Fields is a set of packet fields.
type Fields uint8

// The fields that can be free, see [Packet.Free].
const (
	FreeDestination Fields = 1 << iota
	FreeDestinationPort
	FreeSource
	FreeSourcePort
	FreeUser
	// FreeOwn is the namespace's own address, if it has several.
	FreeOwn
)

// Packet is a packet where it enters the rules. In Src and Dst, an invalid address and port 0 mean unknown.
type Packet struct {
	// Outgoing is set if a process of the pod sends the packet; otherwise it arrives by the interface In.
	Outgoing bool
	// In is the input interface; Out is the output interface if no rule reroutes the packet, lo for the pod itself.
	In, Out  string
	Protocol uint8
	Src, Dst netip.AddrPort
	// UID and GID belong to the sending socket.
	UID, GID uint32
	// Mark is the packet's mark, ConnMark its connection's.
	Mark, ConnMark uint32
	// State is the state of the connection; 0 is StateNew. Translated says which of the connection's addresses are translated.
	State, Translated ruleset.States
	// Type is the destination's type, as addrtype spells it. "" is the usual type: LOCAL for incoming packets and for Out lo.
	Type string
	// Free has the fields that stand for any value where foreign rules match them: the address of another host, any port, and any user
	// except the proxy.
	Free Fields
	// reply is set for packets in the reply direction of the connection.
	reply bool
}

// Verdict says what happens to a packet.
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

func (v Verdict) redirects() bool { return v == Redirected || v == HandedOver }

// Answer says whether a rule matches a packet.
type Answer uint8

// The answers, in ascending order: a rule's answer is the least answer of its conditions. Unknown means that the rule may match.
const (
	No Answer = iota
	Unknown
	Yes
)

// String returns one word.
func (a Answer) String() string { return [...]string{"not-matched", "unknown", "matched"}[a] }

// Hop is a rule that the packet meets. Where a rule may match, the hops follow the reading in which it does not.
type Hop struct {
	Hook, Table, Chain string
	Family             ruleset.Family
	// Set is the index in Namespace.Live; Number counts the rules of the chain from 1, and is 0 for the policy.
	Set, Number int
	Rule        string
	Target      ruleset.Target
	Answer      Answer
	// Why is the rule's reason, "" for an unwanted rule.
	Why string

	wanted bool
	// other is set for a base chain of another program, see Namespace.other; priority is the base chain's.
	other    bool
	priority int32
	// tool is the variant of iptables that has the rule, see [ruleset.Diff.Tool].
	tool string
}

// HopOf returns the hop of the i-th rule of a chain, for a packet that matches.
func (n Namespace) HopOf(f ruleset.Family, table string, c ruleset.Chain, i int) Hop {
	r, other := c.Rules[i], n.other(f, table, c)
	return Hop{Family: f, Table: table, Chain: c.Name, Number: i + 1, Rule: r.String(), Target: r.Target, Answer: Yes, other: other}
}

// other reports whether a base chain belongs neither to iptables nor to the native tables.
func (n Namespace) other(f ruleset.Family, table string, c ruleset.Chain) bool {
	return c.Hook != nil || !n.Owner.KnownTable(f, table)
}

// Result is the answer for one packet.
type Result struct {
	Verdict Verdict
	// To is the target of the redirection or handover: without an address for a port of the pod itself.
	To netip.AddrPort
	// Zone is the conntrack zone that the raw table chose. Packet is the packet as it leaves the rules.
	Zone   ruleset.Zone
	Packet Packet
	Hops   []Hop
	// Omitted counts the omitted hops; none of them matched.
	Omitted int
	// Decided is the rule that decided or, for CannotTell, the rule that is not understood; nil without such a rule.
	Decided *Hop
	// Expected and ExpectedTo are the result of the wanted rules; CannotTell if these are unknown.
	Expected   Verdict
	ExpectedTo netip.AddrPort
	// Fails is the rule that breaks the connection although the packet arrives; nil without one.
	Fails *Hop
	// Settings has the settings that let the packet pass the wanted rules.
	Settings []Setting
	// Summary is one sentence.
	Summary string
}

// Walk follows the packet.
func (n Namespace) Walk(p Packet) Result {
	p = p.completed(n.Loopback)
	f := ruleset.FamilyOf(p.Dst.Addr())
	c := n.course(f, n.Wanted.rules())
	o := c.either(p)
	r := n.explained(o, p)
	if r.Fails = c.broken(p, o); r.Fails != nil {
		r.Summary += "; the connection fails, because of " + r.Fails.named()
	}
	return n.doubted(r, f)
}

// either walks in both orders of the sets that share a hook and a priority.
func (c *course) either(p Packet) outcome {
	r := c.walk(p)
	if c.reversed != nil {
		if other := c.reversed.walk(p); other.Verdict != r.Verdict || other.To != r.To {
			r.Verdict, r.Decided, r.limit = CannotTell, nil, "two sets of tables are at the same hook, in an order that is not known"
		}
	}
	return r
}

// doubted returns CannotTell if packets pass tables that could not be read.
func (n Namespace) doubted(r Result, f ruleset.Family) Result {
	if names := n.Unread[f]; len(names) > 0 && r.Verdict != CannotTell {
		r.Summary = "cannot tell, because packets pass " + printable.Text(strings.Join(names, ", "), maxText) +
			", which cannot be read here; by the readable tables alone the packet " + r.Summary
		r.Verdict, r.Decided, r.Settings = CannotTell, nil, nil
	}
	return r
}

// asWanted returns the packet as the wanted rules expect it: only the loopback device is named lo.
func (p Packet) asWanted(loopback string) Packet {
	for _, link := range []*string{&p.In, &p.Out} {
		switch *link {
		case cmp.Or(loopback, "lo"):
			*link = "lo"
		case "lo":
			*link = "not lo" // no rule uses this name
		}
	}
	return p
}

func (p Packet) completed(loopback string) Packet {
	if p.State == 0 {
		p.State = ruleset.StateNew
	}
	switch dst := p.Dst.Addr(); {
	case p.Type != "":
	case p.Outgoing == (p.Out == cmp.Or(loopback, "lo")):
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

// local is the type of the pod's own addresses.
const local = "LOCAL"
