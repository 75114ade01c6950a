package walk

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// act does what the target of a rule does, other than to lead to a chain.
func (w *walker) act(s *stage, r rule, p *reading, hop int) onward {
	switch r.target {
	case "ACCEPT", "RETURN":
		if p.because < 0 && destination(s.hook.Name) {
			w.passed[s.hook.Type == "nat"] = hop
		}
		if r.target == "RETURN" {
			return back
		}
		return leave
	case "DROP":
		return w.over(*p, Dropped, hop)
	case "REJECT":
		return w.over(*p, Rejected, hop)
	case "SNAT", "MASQUERADE":
		p.packet.Src, p.source = netip.AddrPort{}, true
		return leave
	case "REDIRECT", "DNAT", "TPROXY":
		if p.divert(s, r, w.cause(hop)) {
			return leave
		}
	case "MARK", "CONNMARK":
		if p.remark(r) {
			return next
		}
	case "CT", "NOTRACK":
		p.track(r)
		return next
	default:
		if ruleset.Neutral(r.target) && !r.opaque {
			return next
		}
	}
	w.end(*p, CannotTell, hop)
	return end
}

// over ends a packet.
func (w *walker) over(p reading, v Verdict, hop int) onward {
	w.end(p, v, w.cause(hop))
	return end
}

// cause is the hop that decided: the jump into the chain of the last rule, since the jump has the condition.
func (w *walker) cause(hop int) int {
	if len(w.calls) > 0 {
		return w.calls[len(w.calls)-1]
	}
	return hop
}

// divert does REDIRECT, DNAT and TPROXY. What the pod sends is redirected to loopback, what arrives to the interface's first
// address, which is not known here (net/netfilter/nf_nat_redirect.c).
func (r *reading) divert(s *stage, t rule, hop int) bool {
	p := &r.packet
	old := p.Dst.Addr()
	to, ok := t.end(p.Dst)
	value, mask, ok2 := t.number("--tproxy-mark")
	if !ok || !ok2 {
		return false
	}
	r.decided = hop
	if t.target == "TPROXY" {
		p.Mark = p.Mark&^mask ^ value
		r.verdict, r.to = HandedOver, to
		return true
	}
	r.destination = true
	if r.verdict != HandedOver { // the socket that it was given to gets it
		r.verdict, r.to = Redirected, to
	}
	switch p.Dst = to; {
	case to.Addr() == old: // another port only
	case to.Addr().IsValid() && !to.Addr().IsLoopback():
		p.Type, r.rerouted = "", unknown
	case s.hook.Name == "output":
		lo := netip.IPv6Loopback()
		if old.Is4() {
			lo = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		p.Dst, p.Type, r.rerouted = netip.AddrPortFrom(lo, to.Port()), local, "lo"
	default:
		p.Type = local
	}
	return true
}

// end is where REDIRECT and TPROXY (a port) or DNAT leads to.
func (r rule) end(old netip.AddrPort) (netip.AddrPort, bool) {
	text, address := strconv.Itoa(int(old.Port())), netip.Addr{}
	for i, option := range r.options[:max(0, len(r.options)-1)] {
		switch value := r.options[i+1]; option {
		case "--to-destination":
			if to, err := netip.ParseAddrPort(value); err == nil {
				return to, true
			}
			text, address = strings.TrimPrefix(value, ":"), old.Addr()
		case "--to-ports", "--on-port":
			text = value
		}
	}
	port, err := strconv.ParseUint(text, 10, 16)
	return netip.AddrPortFrom(address, uint16(port)), err == nil
}

// remark changes the mark of the packet or of its connection.
func (r *reading) remark(t rule) bool {
	p := &r.packet
	value, mask, ok := t.number("--set-xmark")
	packet, _, ok2 := t.number("--nfmask")
	connection, _, ok3 := t.number("--ctmask")
	switch {
	case t.target == "CONNMARK" && !p.connected():
	case slices.Contains(t.options, "--save-mark"):
		p.ConnMark = p.ConnMark&^connection ^ p.Mark&packet
	case slices.Contains(t.options, "--restore-mark"):
		p.Mark = p.Mark&^packet ^ p.ConnMark&connection
	case t.target == "MARK":
		p.Mark = p.Mark&^mask ^ value
	default:
		p.ConnMark = p.ConnMark&^mask ^ value
	}
	return ok && ok2 && ok3 && slices.ContainsFunc(t.options, func(o string) bool { return o == "--set-xmark" || o == "--nfmask" })
}

// track does CT, the first one: a packet that arrives by lo has its connection from the way out, and one with a zone a template
// (net/netfilter/xt_CT.c, xt_ct_target).
func (r *reading) track(t rule) {
	switch zone, _, ok := t.number("--zone"); {
	case r.looped || r.zone != 0 || r.packet.State == Untracked:
	case t.target == "NOTRACK" || slices.Contains(t.options, "--notrack"):
		r.packet.State = Untracked
	case ok && zone != 0:
		r.zone, r.packet.State = ruleset.Zone(zone), ruleset.StateNew //nolint:gosec // zones have 16 bits
	}
}
