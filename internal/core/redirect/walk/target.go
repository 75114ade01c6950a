package walk

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// act applies a target other than a jump.
func (w *walker) act(s *stage, target ruleset.Target, p *reading, hop int) onward {
	switch t := target.(type) {
	case nil:
		return next
	case ruleset.Neutral:
		if t.Copies && p.copied == 0 {
			p.copied = hop + 1
		}
		return next
	case ruleset.Verdict:
		return w.verdict(s, t, p, hop)
	case ruleset.Reject:
		return w.over(s, *p, Rejected, hop)
	case ruleset.SetMark, ruleset.CopyMark:
		p.remark(t)
		p.marked = hop
		return next
	case ruleset.NoTrack, ruleset.Zone:
		switch {
		case s.order() > tracking: // the packet already has its connection
			return next
		case s.order() == tracking:
			w.end(s, *p, CannotTell, hop)
			return end
		}
		if p.track(t); p.packet.State == ruleset.StateUntracked && p.decided < 0 {
			p.decided = w.cause(hop) // nat does not see it
		}
		return next
	case ruleset.TProxy:
		p.handOver(t, w.cause(hop))
		if t.Continues {
			return next
		}
		return leave
	}
	if n, is := translation(target); is && !n.Source && !n.Range {
		return w.translate(s, n, p, hop)
	} else if is && n.Source {
		p.packet.Src, p.source = netip.AddrPort{}, true
		p.packet.Translated |= ruleset.StateSNAT
		return leave
	}
	w.end(s, *p, CannotTell, hop)
	return end
}

// verdict applies ACCEPT, RETURN and DROP.
func (w *walker) verdict(s *stage, v ruleset.Verdict, p *reading, hop int) onward {
	if v == ruleset.Drop {
		return w.over(s, *p, Dropped, hop)
	}
	if nat := s.hook.Type == "nat"; p.because < 0 && destination(s.hook.Name) && (nat || !w.inNat) {
		w.passed, w.inNat = hop, nat
	}
	if v == ruleset.Return {
		return back
	}
	return leave
}

// over ends a packet.
func (w *walker) over(s *stage, p reading, v Verdict, hop int) onward {
	if p.copied > 0 { // the copy can be the connection
		w.end(s, p, CannotTell, p.copied-1)
		return end
	}
	w.end(s, p, v, w.cause(hop))
	return end
}

// cause returns the hop that decided: the jump into the chain of the last rule, because the jump has the condition.
func (w *walker) cause(hop int) int {
	if len(w.calls) == 0 {
		return hop
	}
	jump := w.calls[len(w.calls)-1]
	if hop >= 0 && jump >= 0 && w.hops[hop].Decides(w.hops[jump]) {
		return hop
	}
	return jump
}

// Decides reports whether the rule has the condition itself, and not the jump into its chain: hooks lead all packets to some chains
// of the mesh.
func (h Hop) Decides(jump Hop) bool {
	all := jump.Rule == "-j "+h.Chain || jump.Rule == "jump "+h.Chain
	return h.Why != "" && all && strings.EqualFold(jump.Chain, jump.Hook)
}

// translate applies REDIRECT and DNAT. A packet to another host follows the route of its mark; a packet of the pod to itself has
// a source address that no route leads out.
func (w *walker) translate(s *stage, n ruleset.NAT, p *reading, hop int) onward {
	looping := p.packet.Src.Addr().IsLoopback()
	if s.hook.Name == "prerouting" && n.To.IsLoopback() && !p.looped { // sysctls and the kernel version decide whether it is dropped
		w.end(s, *p, CannotTell, hop)
		return end
	}
	p.translate(w, s, n, hop)
	if p.rerouted != unknown {
		return leave
	}
	switch own := slices.Contains(w.Own, n.To); {
	case own && s.hook.Name == "output":
		p.packet.Type, p.rerouted = local, w.Loopback
	case own:
		p.packet.Type, p.rerouted = local, ""
	case s.hook.Name == "output" && w.delivers(p.packet.Mark):
		p.rerouted = w.Loopback
	case s.hook.Name == "output" && looping:
		return w.over(s, *p, Dropped, hop)
	}
	return leave
}

// translation returns the translation that a target does, if any.
func translation(t ruleset.Target) (n ruleset.NAT, is bool) {
	switch t := t.(type) {
	case ruleset.NAT:
		return t, true
	case ruleset.RedirectTo:
		return ruleset.NAT{Local: true, Port: uint16(t)}, true
	}
	return n, false
}

// handOver applies TPROXY: the packet goes to a socket, both addresses kept.
func (r *reading) handOver(t ruleset.TProxy, hop int) {
	if !t.Continues {
		r.packet.Mark = r.packet.Mark&^ruleset.WholeMark(t.Mask) ^ t.Mark
	}
	r.verdict, r.to, r.decided, r.given = HandedOver, netip.AddrPortFrom(netip.Addr{}, t.Port), hop, r.packet.Dst.Addr()
}

// translate applies REDIRECT and DNAT. REDIRECT sends outgoing packets to loopback, incoming packets to the interface's first
// address, which is unknown here (net/netfilter/nf_nat_redirect.c).
func (r *reading) translate(w *walker, s *stage, n ruleset.NAT, hop int) {
	p := &r.packet
	old := p.Dst.Addr()
	to := netip.AddrPortFrom(n.To, cmp.Or(n.Port, p.Dst.Port()))
	r.decided, r.destination = w.cause(hop), true
	p.Translated |= ruleset.StateDNAT
	if n.Port != 0 {
		p.Free &^= FreeDestinationPort
	}
	if n.To.IsValid() || n.Local {
		p.Free &^= FreeDestination
	}
	shown := to
	if !n.Local && !n.To.IsValid() {
		shown = netip.AddrPortFrom(old, to.Port())
	}
	if r.verdict != HandedOver { // after TPROXY its socket gets the packet
		r.verdict, r.to = Redirected, shown
	}
	switch p.Dst = to; {
	case !n.Local && (!n.To.IsValid() || n.To == old): // only another port
		p.Dst = netip.AddrPortFrom(old, to.Port())
	case !n.Local && !n.To.IsLoopback():
		p.Type, r.rerouted = "", unknown
	case s.hook.Name == "output":
		lo := n.To
		if n.Local {
			lo = loopback(old)
		}
		p.Dst, p.Type, r.rerouted = netip.AddrPortFrom(lo, to.Port()), local, w.Loopback
	default:
		p.Type = local
	}
}

// loopback returns the loopback address of the same family.
func loopback(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// remark changes the mark of the packet or of its connection.
func (r *reading) remark(target ruleset.Target) {
	p := &r.packet
	switch t := target.(type) {
	case ruleset.SetMark:
		mark := &p.Mark
		if t.Connection {
			if mark = &p.ConnMark; !p.connected() {
				return
			}
		}
		*mark = *mark&^ruleset.WholeMark(t.Mask) ^ t.Value
	case ruleset.CopyMark:
		packet, connection := ruleset.WholeMark(t.PacketMask), ruleset.WholeMark(t.ConnectionMask)
		switch {
		case !p.connected():
		case t.Restore:
			p.Mark = p.Mark&^packet ^ p.ConnMark&connection
		default:
			p.ConnMark = p.ConnMark&^connection ^ p.Mark&packet
		}
	}
}

// track applies the first CT target: a packet that arrives by lo has its connection from the way out, and a packet with a zone has
// a template (net/netfilter/xt_CT.c, xt_ct_target).
func (r *reading) track(target ruleset.Target) {
	if r.looped || r.zone != 0 || r.packet.State == ruleset.StateUntracked {
		return
	}
	if zone, is := target.(ruleset.Zone); is {
		r.zone, r.packet.State = zone, ruleset.StateNew
		return
	}
	r.packet.State = ruleset.StateUntracked
}

// behind reports whether a packet has passed the translation of its destination at a stage.
func (s stage) behind() bool {
	return s.hook.Name != "ingress" && (!destination(s.hook.Name) || s.order() > natDestination)
}
