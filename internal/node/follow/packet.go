package follow

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
)

// Bounds of the state: packets in progress, hops of each, flows whose answers are left out, and the text of a rule.
const (
	maxOpen    = 256
	maxHops    = 100
	maxAnswers = 4096
	maxText    = 1 << 10
)

// rereadEach is the minimum number of ticks between two readings of the rules, which may change during a trace. maxRereads bounds
// the number of readings because a process in the pod may change the rules all the time.
const (
	rereadEach = 10
	maxRereads = 20
)

// packet is a packet in progress.
type packet struct {
	document.TracePacket

	id uint32
	// first is the packet as it was sent or arrived, last the packet at its latest event, and at the place of that event.
	first, last nftrace.Packet
	at          string
	tick        int

	// hook is the hook of the current base chain, and calls are the jumps that lead to the current chain.
	hook    ruleset.Hook
	calls   []call
	hops    []walk.Hop
	omitted int
	// passed is the last hop that let the packet pass, in nat and elsewhere, as in a walk; decided is the hop of the verdict.
	passed  map[bool]walk.Hop
	decided *walk.Hop
	verdict walk.Verdict
	// port is the port of the socket to which TPROXY assigned the packet.
	port uint16
}

// call is a jump or a goto. After a goto the packet does not return to the chain.
type call struct {
	hop  walk.Hop
	goes bool
}

// flow is the pair of addresses of a UDP packet.
type flow struct{ source, destination netip.AddrPort }

// families maps the kernel's numbers (NFPROTO_…, linux/netfilter.h) to the families of tables.
var families = map[uint8]ruleset.Family{1: ruleset.Inet, 2: ruleset.IPv4, 10: ruleset.IPv6} //nolint:gochecknoglobals // a constant table

// event handles an event of the kernel. It ignores packets that another tracer marked.
func (f *follower) event(ctx context.Context, next *nftrace.Event) error {
	if next == nil {
		f.end.Lost++
		return nil
	}
	e := *next
	i := slices.IndexFunc(f.open, func(p *packet) bool { return p.id == e.ID })
	if e.Own && e.Packet.Present() {
		return f.own(i, e)
	}
	if i < 0 || e.Own {
		return nil
	}
	p := f.open[i]
	p.tick = f.ticks
	if e.Packet.Present() { // only the first event of a base chain has the packet
		p.hook, _ = f.rules.Owner.HookOf(families[e.Family], e.Table, e.Chain) // empty in other programs' tables
		p.calls = p.calls[:0]
	}
	switch {
	case e.Kind == nftrace.Return:
		p.back()
	case e.Kind == nftrace.Policy && e.Verdict == "drop":
		p.meet(walk.Hop{Table: e.Table, Chain: e.Chain, Rule: "policy DROP", Answer: walk.Yes}, e)
	case e.Kind == nftrace.Rule && e.Handle != 0:
		p.meet(f.rule(ctx, e), e)
	}
	return nil
}

// loopback is the index of lo in every namespace.
const loopback = 1

// own handles an event of the trace's own table: the packet begins, arrives again by lo, or ends.
func (f *follower) own(i int, e nftrace.Event) error {
	begins := e.Chain == "output" || e.Chain == "prerouting"
	switch {
	case begins && e.Handle != 0:
		if i >= 0 { // the kernel reuses the number
			if err := f.show(i); err != nil {
				return err
			}
		}
		return f.begin(e)
	case begins && e.Packet.In == loopback:
		i = slices.IndexFunc(f.open, func(p *packet) bool {
			return p.at == "postrouting" && p.last.Out == loopback && p.last.Protocol == e.Packet.Protocol && p.last.Source == e.Packet.Source
		})
		if i >= 0 {
			f.open[i].id = e.ID
		}
	}
	if i >= 0 {
		f.open[i].last, f.open[i].at, f.open[i].tick = e.Packet, e.Chain, f.ticks
		f.expect(e.Packet)
	}
	return nil
}

// expect records the expected answer to a UDP packet. The trace has only the first packet of a TCP connection.
func (f *follower) expect(p nftrace.Packet) {
	if p.Protocol != ruleset.UDP {
		return
	}
	if len(f.answers) >= maxAnswers {
		clear(f.answers)
	}
	f.answers[flow{p.Destination, p.Source}] = true
}

// begin starts a packet, unless it answers a traced one.
func (f *follower) begin(e nftrace.Event) error {
	if e.Packet.Protocol == ruleset.UDP && f.answers[flow{e.Packet.Source, e.Packet.Destination}] {
		return nil
	}
	f.expect(e.Packet)
	if len(f.open) >= maxOpen {
		if err := f.show(0); err != nil {
			return err
		}
	}
	f.open = append(f.open, &packet{
		id: e.ID, first: e.Packet, last: e.Packet, at: e.Chain, tick: f.ticks, passed: map[bool]walk.Hop{},
		TracePacket: document.TracePacket{
			Time: f.Now(), Protocol: protocol(e.Packet.Protocol), Source: e.Packet.Source.String(), Destination: e.Packet.Destination.String(),
			Outgoing: e.Chain == "output",
		},
	})
	return nil
}

func protocol(number uint8) string {
	return map[uint8]string{ruleset.TCP: "TCP", ruleset.UDP: "UDP"}[number]
}

// rule returns the rule of an event. An unknown rule may be new, so rule reads the rules again, at a bounded rate.
func (f *follower) rule(ctx context.Context, e nftrace.Event) walk.Hop {
	handle := nftables.Handle{Family: families[e.Family], Table: e.Table, Number: e.Handle}
	hop, known := f.rules.Rules[handle]
	if !known && f.rereads < maxRereads && f.ticks-f.reread >= rereadEach {
		f.reread = f.ticks
		f.rereads++
		if rules, err := f.space.Traceable(ctx, f.want); err == nil {
			f.rules = rules
			hop, known = rules.Rules[handle]
		}
	}
	if !known {
		hop = walk.Hop{Table: e.Table, Chain: e.Chain, Rule: fmt.Sprintf("rule with handle %d", e.Handle), Answer: walk.Yes}
	}
	return hop
}

// meet adds a rule that the packet matched, and its effect on the packet.
func (p *packet) meet(h walk.Hop, e nftrace.Event) {
	h.Hook, h.Why = p.hook.Name, redirect.Reason(h.Why, p.first.Protocol)
	if len(p.hops) < maxHops {
		p.hops = append(p.hops, h)
	} else {
		p.omitted++
	}
	cause := h
	if last := len(p.calls) - 1; last >= 0 && !h.Decides(p.calls[last].hop) { // the condition is in the jump into the chain of the last rule
		cause = p.calls[last].hop
	}
	switch e.Verdict {
	case "jump", "goto":
		if len(p.calls) < maxHops {
			p.calls = append(p.calls, call{h, e.Verdict == "goto"})
		}
	case "drop":
		p.decide(walk.Dropped, cause)
		if _, rejects := part[ruleset.Reject](h.Target); rejects {
			p.verdict = walk.Rejected
		}
	case "accept":
		p.accept(h, cause)
	case "return":
		p.pass(h)
		p.back()
	}
}

// accept ends the way of the packet through a base chain. A socket assigned by TPROXY gets the packet even if a later rule
// changes the destination.
func (p *packet) accept(h, cause walk.Hop) {
	t, gives := part[ruleset.TProxy](h.Target)
	switch {
	case gives:
		p.decide(walk.HandedOver, cause)
		p.port = t.Port
	case !diverts(h.Target):
		p.pass(h)
	case p.verdict != walk.HandedOver:
		p.decide(walk.Redirected, cause)
	}
}

// pass stores a rule that lets the packet pass where the mesh decides.
func (p *packet) pass(h walk.Hop) {
	if p.hook.Name == "output" || p.hook.Name == "prerouting" {
		p.passed[p.hook.Type == "nat"] = h
	}
}

func (p *packet) decide(v walk.Verdict, h walk.Hop) { p.verdict, p.decided = v, &h }

// back returns from a called chain.
func (p *packet) back() {
	for len(p.calls) > 0 {
		last := p.calls[len(p.calls)-1]
		p.calls = p.calls[:len(p.calls)-1]
		if !last.goes {
			break
		}
	}
}

// part returns the part of an nf_tables target that has the type T. A rule can have several targets.
func part[T ruleset.Target](t ruleset.Target) (found T, is bool) {
	if all, several := t.(ruleset.Then); several {
		for _, one := range all {
			if found, is = part[T](one); is {
				return found, is
			}
		}
		return found, false
	}
	found, is = t.(T)
	return found, is
}

// diverts reports whether a target changes the destination.
func diverts(t ruleset.Target) bool {
	_, redirects := part[ruleset.RedirectTo](t)
	n, is := part[ruleset.NAT](t)
	return redirects || is && !n.Source
}

// flush shows the packets that had no event for a number of ticks.
func (f *follower) flush(ticks int) error {
	for i := 0; i < len(f.open); {
		if f.ticks-f.open[i].tick < ticks {
			i++
			continue
		}
		if err := f.show(i); err != nil {
			return err
		}
	}
	return nil
}

// show ends a packet.
func (f *follower) show(i int) error {
	p := f.open[i]
	f.open = slices.Delete(f.open, i, i+1)
	f.explain(p)
	if err := f.emit(document.TraceEvent{Packet: &p.TracePacket}); err != nil {
		return err
	}
	if f.end.Packets == MaxPackets {
		return errEnough
	}
	return nil
}

// explain fills in the answer.
func (f *follower) explain(p *packet) {
	r := p.result()
	cause := f.cause(p, r)
	r = f.rules.Explained(r, p.walked(), cause)
	p.Way = document.Way{Verdict: r.Verdict.String(), Sentence: r.Summary, Settings: walk.Texts(r.Settings), Omitted: p.omitted, Wanted: f.wanted(r)}
	if f.toProxy(r.To.Port()) {
		to := r.To
		if !to.Addr().IsValid() {
			to = netip.AddrPortFrom(p.first.Destination.Addr(), to.Port())
		}
		_ = inspect.Lands(&p.Way, f.space, p.first.Protocol, to) // without listeners the other answers remain
	}
	if p.Wanted == "" {
		p.Sentence += "; rules of legacy tables are not traced, see their counters"
	}
	for _, h := range p.hops {
		p.Hops = append(p.Hops, hopOf(h))
	}
}

// walked returns the packet as it began, as far as the kernel reports it.
func (p *packet) walked() walk.Packet {
	as := walk.Packet{Outgoing: p.Outgoing, Protocol: p.first.Protocol, Src: p.first.Source, Dst: p.first.Destination}
	if p.first.Out == loopback {
		as.Out = "lo"
	}
	return as
}

// cause says why the rule that decided is unknown; "" for a packet that the mesh leaves alone.
func (f *follower) cause(p *packet, r walk.Result) string {
	switch {
	case r.Verdict == walk.CannotTell:
		return "its last event is at " + p.at + ", and no known rule dropped it: check routes, rp_filter and other tables"
	case r.Verdict == walk.Passed && f.rules.Legacy:
		return "no rule of nf_tables takes it"
	case r.Verdict == walk.Passed && p.first.Protocol != ruleset.TCP && !f.rules.Wanted.Takes(p.walked()):
		return ""
	case r.Verdict == walk.Passed:
		return "no rule takes it"
	case f.rules.Legacy:
		return "by a rule of a legacy table"
	case p.first.Protocol != ruleset.TCP:
		return "like the first packet of its connection"
	}
	return "by a rule of a table that is not read"
}

// hopOf returns a hop with texts that are safe to print.
func hopOf(h walk.Hop) document.Hop {
	return document.Hop{
		Hook: h.Hook, Table: printable.Text(h.Table, maxText), Chain: printable.Text(h.Chain, maxText), Number: h.Number,
		Rule: printable.Text(h.Rule, maxText), Answer: h.Answer.String(), Why: h.Why,
	}
}

// result returns the outcome for the packet, from its addresses at the latest event and the rules that it matched.
func (p *packet) result() walk.Result {
	r := walk.Result{Verdict: p.verdict, Decided: p.decided}
	ended := p.at == "postrouting" || p.at == "input"
	switch {
	case p.verdict == walk.Dropped || p.verdict == walk.Rejected:
	case !ended:
		r.Verdict, r.Decided = walk.CannotTell, nil
	case p.verdict == walk.HandedOver:
		r.To = netip.AddrPortFrom(netip.Addr{}, p.port)
	case p.last.Destination != p.first.Destination:
		r.Verdict, r.To = walk.Redirected, p.last.Destination
	default:
		r.Verdict, r.Decided = walk.Passed, nil
		for _, nat := range []bool{false, true} {
			if hop, some := p.passed[nat]; some {
				r.Decided = &hop
			}
		}
	}
	return r
}

// wanted judges like the walk of a packet, except for what only a real packet shows. It is "" if a rule in a legacy table may have
// decided.
func (f *follower) wanted(r walk.Result) document.Wanted {
	switch {
	case r.Verdict == walk.Redirected || r.Verdict == walk.HandedOver:
		if f.toProxy(r.To.Port()) {
			return document.AsWanted
		}
		return document.Past
	case r.Verdict == walk.Passed && r.Decided == nil && f.rules.Legacy:
		return ""
	}
	return inspect.Judge(r)
}

// toProxy reports whether a port is a port of the proxy to which rules of the mesh redirect.
func (f *follower) toProxy(port uint16) bool {
	spec := redirect.Default()
	if f.rules.Wanted != nil {
		spec = f.rules.Wanted.Spec
	}
	return slices.Contains([]uint16{spec.OutboundPort, spec.InboundPort, redirect.DNSPort}, port)
}

// address formats a network, or a single address without a prefix length.
func address(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}
