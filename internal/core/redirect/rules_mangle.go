package redirect

import (
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// The mangle table: TPROXY, and dropping packets in conntrack state INVALID.
//
// PREROUTING sends an incoming connection to ISTIO_INBOUND: a new one is handed to the proxy's socket and marked
// (ISTIO_TPROXY), packets of an established one are marked (ISTIO_DIVERT); the mark routes them to lo. The proxy then
// calls the app from the client's own address, with the mark on its socket; M1 saves it to the connection, so that the
// app's replies (OUTPUT) get it back and return to the proxy instead of leaving the pod.

// tproxyInbound reports whether incoming connections are handed over by TPROXY.
func (s Spec) tproxyInbound() bool { return s.Mode == TPROXY && !s.Inbound.Empty() }

func (b builder) manglePrerouting() []ruleset.Rule {
	return slices.Concat(
		when(b.Mode == TPROXY, b.excludedInterfaces(in)...),
		when(b.DropInvalid, b.rule("packets that fit no connection are dropped", b.jump(dropInvalid), ruleset.StateInvalid)),
		when(b.tproxyInbound(), b.rule("incoming TCP goes to the rules of the mesh", b.jump(inbound), tcp)),
		when(b.Mode == TPROXY, b.rule("the proxy's mark is kept with the connection", ruleset.CopyMark{}, tcp, ruleset.Mark{Value: b.Mark})))
}

func (b builder) mangleOutput() []ruleset.Rule {
	if b.Mode != TPROXY {
		return nil
	}
	rules := append(b.excludedInterfaces(out),
		b.rule("the proxy's connection to the app is marked already", ruleset.Return, out("lo"), tcp, ruleset.Mark{Value: b.Mark}))
	for _, o := range b.Identities() {
		for _, p := range b.loopbacks() {
			rules = append(rules, b.rule("the proxy calls its own pod: the inbound listener must see it",
				ruleset.SetMark{Value: SelfMark}, out("lo"), tcp, notTo(p), o))
		}
	}
	return append(rules, b.rule("the app's replies get the connection's mark back and return to the proxy",
		ruleset.CopyMark{Restore: true}, tcp, ruleset.Mark{Value: b.Mark, Connection: true}))
}

// mangleInbound begins with the rules that the reference inserts one by one. In its native tables the reference inserts
// the second rule of each family at the second place.
func (b builder) mangleInbound() []ruleset.Rule {
	if b.Mode != TPROXY {
		return nil
	}
	rules := []ruleset.Rule{b.rule("the proxy's own connection to the app", ruleset.Return, tcp, ruleset.Mark{Value: b.Mark})}
	for _, p := range b.passthroughs() {
		rules = slices.Insert(rules, 1, b.rule("the proxy hands an inbound connection to the app", ruleset.Return, in("lo"), tcp, from(p)))
	}
	rules = slices.Insert(rules, 2, b.rule("the app calls its own pod: directly",
		ruleset.Return, in("lo"), tcp, ruleset.Mark{Value: SelfMark, Not: true}))
	if b.Inbound.All {
		rules = append(rules, b.inboundExcluded()...)
		return append(rules, b.handOver(tcp)...)
	}
	for _, p := range b.Inbound.List {
		rules = append(rules, b.handOver(dport(ruleset.TCP, p))...)
	}
	return rules
}

// handOver sends the matched TCP to the proxy.
func (b builder) handOver(matched ruleset.Match) []ruleset.Rule {
	established := []ruleset.Match{tcp, ruleset.StateEstablished | ruleset.StateRelated}
	if matched != ruleset.Match(tcp) {
		established = append(established, matched)
	}
	return []ruleset.Rule{
		b.rule("a known connection of the proxy: deliver it locally", b.jump(divert), established...),
		b.rule("a new connection: hand it to the proxy", b.jump(tproxy), matched),
	}
}

func (b builder) divert() []ruleset.Rule {
	return when(b.tproxyInbound(),
		b.rule("the mark routes the packet to this pod", ruleset.SetMark{Value: b.Mark}),
		b.rule("the packet is accepted, so that no later rule of this table changes it", ruleset.Accept))
}

// tproxy hands connections over. iptables drops a connection that the target cannot hand over; nf_tables would go on
// with the next rule.
func (b builder) tproxy() []ruleset.Rule {
	if !b.tproxyInbound() {
		return nil
	}
	var rules []ruleset.Rule
	for _, p := range b.loopbacks() {
		f := ruleset.IPv4
		if p.Addr().Is6() {
			f = ruleset.IPv6
		}
		rules = append(rules, b.rule("the proxy's inbound listener takes the connection, both addresses kept",
			ruleset.TProxy{Family: f, Port: b.InboundPort, Mark: b.Mark}, tcp, notTo(p)))
		if b.native {
			rules = append(rules, b.rule("the proxy does not listen: the connection must not reach the app instead",
				ruleset.Drop, tcp, notTo(p)))
		}
	}
	return rules
}

func (b builder) dropInvalid() []ruleset.Rule {
	return when(b.DropInvalid, b.rule("packets that fit no connection are dropped", ruleset.Drop))
}
