package redirect

import (
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// The mangle table: TPROXY, and dropping what conntrack calls invalid.
//
// An incoming connection meets ISTIO_INBOUND in PREROUTING: a new one is handed to the proxy's socket and marked
// (ISTIO_TPROXY), packets of an established one are marked (ISTIO_DIVERT); the mark routes them to lo. The proxy then
// calls the app from the client's own address, with the mark on its socket; M1 saves it to the connection, so that the
// app's replies (OUTPUT) get it back and return to the proxy instead of leaving the pod.

// every is the mask under which marks are set: all bits.
const every = "0xffffffff"

func hex(mark uint32) string { return fmt.Sprintf("0x%x", mark) }

// tproxyInbound reports whether incoming connections are handed over by TPROXY.
func (b builder) tproxyInbound() bool { return b.Mode == TPROXY && !b.Inbound.Empty() }

func (b builder) manglePrerouting() []ruleset.Rule {
	var rules []ruleset.Rule
	if b.Mode == TPROXY {
		for _, x := range b.ExcludeInterfaces {
			rules = append(rules, rule("interface "+x+" is excluded", "-i %s -j RETURN", x))
		}
	}
	if b.DropInvalid {
		rules = append(rules, rule("packets that fit no connection are dropped",
			"-m conntrack --ctstate INVALID -j %s", dropChain))
	}
	if b.tproxyInbound() {
		rules = append(rules, rule("incoming TCP is looked at by the mesh", "-p tcp -j %s", inbound))
	}
	if b.Mode == TPROXY {
		rules = append(rules, rule("the proxy's mark is kept with the connection",
			"-p tcp -m mark --mark %s -j CONNMARK --save-mark --nfmask %s --ctmask %s", hex(b.Mark), every, every))
	}
	return rules
}

func (b builder) mangleOutput() []ruleset.Rule {
	if b.Mode != TPROXY {
		return nil
	}
	var rules []ruleset.Rule
	for _, x := range b.ExcludeInterfaces {
		rules = append(rules, rule("interface "+x+" is excluded", "-o %s -j RETURN", x))
	}
	rules = append(rules, rule("the proxy's connection to the app is marked already",
		"-o lo -p tcp -m mark --mark %s -j RETURN", hex(b.Mark)))
	self := func(kind string, id uint32) ruleset.Rule {
		return rule("the proxy calls its own pod: the inbound listener must see it",
			"%s-o lo -p tcp -m owner --%s-owner %d -j MARK --set-xmark %s/%s", b.notLoopback(), kind, id, hex(SelfMark), every)
	}
	for _, u := range b.UIDs {
		rules = append(rules, self("uid", u))
	}
	for _, g := range b.GIDs {
		rules = append(rules, self("gid", g))
	}
	return append(rules, rule("the app's replies get the connection's mark back and return to the proxy",
		"-p tcp -m connmark --mark %s -j CONNMARK --restore-mark --nfmask %s --ctmask %s", hex(b.Mark), every, every))
}

func (b builder) mangleInbound() []ruleset.Rule {
	if b.Mode != TPROXY {
		return nil
	}
	rules := []ruleset.Rule{
		rule("the proxy's own connection to the app", "-p tcp -m mark --mark %s -j RETURN", hex(b.Mark)),
		rule("the proxy hands an inbound connection to the app", "-s %s -i lo -p tcp -j RETURN", b.passthrough()),
		rule("the app calls its own pod: directly", "-i lo -p tcp -m mark ! --mark %s -j RETURN", hex(SelfMark)),
	}
	if b.Inbound.All {
		rules = append(rules, b.inboundExcluded()...)
		return append(rules, b.handOver("")...)
	}
	for _, p := range b.Inbound.List {
		rules = append(rules, b.handOver(fmt.Sprintf("-m tcp --dport %d ", p))...)
	}
	return rules
}

// handOver sends TCP that meets the extra match to the proxy.
func (b builder) handOver(extra string) []ruleset.Rule {
	return []ruleset.Rule{
		rule("a known connection of the proxy: deliver it locally",
			"-p tcp %s-m conntrack --ctstate RELATED,ESTABLISHED -j %s", extra, divert),
		rule("a new connection: hand it to the proxy", "-p tcp %s-j %s", extra, tproxy),
	}
}

func (b builder) divert() []ruleset.Rule {
	if !b.tproxyInbound() {
		return nil
	}
	return []ruleset.Rule{
		rule("the mark routes the packet to this pod", "-j MARK --set-xmark %s/%s", hex(b.Mark), every),
		rule("the packet is accepted, so that no later rule of this table changes it", "-j ACCEPT"),
	}
}

func (b builder) tproxy() []ruleset.Rule {
	if !b.tproxyInbound() {
		return nil
	}
	anyone := "0.0.0.0"
	if b.family == ruleset.IPv6 {
		anyone = "::"
	}
	return []ruleset.Rule{rule("the proxy's inbound listener takes the connection, both addresses kept",
		"%s-p tcp -j TPROXY --on-port %d --on-ip %s --tproxy-mark %s/%s",
		b.notLoopback(), b.InboundPort, anyone, hex(b.Mark), every)}
}

func (b builder) drop() []ruleset.Rule {
	if !b.DropInvalid {
		return nil
	}
	return []ruleset.Rule{rule("packets that fit no connection are dropped", "-j DROP")}
}
