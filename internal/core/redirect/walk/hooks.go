package walk

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Bounds of a walk: rules judged, readings followed at once, nested chains, and hops shown that did not match. Above one
// of the first three the answer is CannotTell.
const (
	maxSteps    = 1 << 18
	maxReadings = 32
	maxDepth    = 1000
	maxShown    = 1000
)

// course is everything that packets of a family traverse, in a Namespace whose Loopback is set. It does not change.
type course struct {
	Namespace

	family ruleset.Family
	// proxy has the users and groups of the proxy.
	proxy []ruleset.Owner
	// stages are the base chains of each hook in the order of traversal.
	stages map[string][]stage
	wanted map[place]ruleset.Rule
	// reversed is set if two base chains with rules have the same hook and priority, and has them in the other order.
	reversed *course
}

// walker is one walk.
type walker struct {
	*course

	// state is the state of the packet's connection.
	state ruleset.States

	hops           []Hop
	omitted, steps int
	// calls are the hops of the jumps that lead to the current chain.
	calls []int
	// passed is the last hop that let the packet pass where the mesh decides, -1 without one: in nat (inNat) or, without one there, elsewhere.
	passed int
	inNat  bool
	ended  []reading
	limit  string
}

// stage is a base chain. Its Hop has what all hops of the base chain have.
type stage struct {
	Hop

	hook  ruleset.Hook
	chain *ruleset.Chain
	// chains has the chains of the table by name.
	chains map[string]*ruleset.Chain
}

// Priorities at which the kernel translates addresses. The priorities of nat chains only order these chains among themselves
// (net/netfilter/nf_nat_core.c, nf_nat_register_fn; NF_IP_PRI_NAT_DST and _SRC of linux/netfilter_ipv4.h).
const (
	natDestination = -100
	natSource      = 100
)

// hop returns the hop of a rule that matches, or of the policy.
func (s stage) hop(c *ruleset.Chain, number int, rule string) Hop {
	h := s.Hop
	h.Chain, h.Number, h.Rule, h.Answer = c.Name, number, rule, Yes
	return h
}

// order returns the priority at which a packet traverses the chain.
func (s stage) order() int32 {
	switch {
	case s.hook.Type != "nat":
		return s.hook.Priority
	case destination(s.hook.Name):
		return natDestination
	}
	return natSource
}

// reading is the packet and its verdict so far, for one choice among the rules that may match.
type reading struct {
	// because is the first uncertain hop that this reading treats as a match, -1 without one; decided is the hop of
	// the verdict, marked the hop of the last mark. Readings that differ only in these are equal.
	because, decided, marked int

	packet  Packet
	verdict Verdict
	to      netip.AddrPort
	zone    ruleset.Zone
	// rerouted is the new output interface; looped reports whether the packet arrived by lo from the pod itself.
	rerouted string
	looped   bool
	// routed is the mark at the last route lookup.
	routed uint32
	// Each connection passes nat once for its destination and once for its source.
	destination, source bool
	// given is the destination whose socket got the packet by TPROXY.
	given netip.Addr
	// copied is 1 + the hop of the rule that sent a copy elsewhere, 0 without a copy.
	copied int
	// late reports whether the packet ended behind the translation of its destination.
	late bool
}

// course returns the course of a family. wanted has the wanted rules.
func (n Namespace) course(f ruleset.Family, wanted map[place]ruleset.Rule) *course {
	n.Loopback = cmp.Or(n.Loopback, "lo")
	c := &course{Namespace: n, family: f, stages: map[string][]stage{}, wanted: wanted}
	if n.Wanted != nil {
		c.proxy = n.Wanted.Spec.Identities()
	}
	for i, set := range n.Live {
		if set.Family != f && set.Family != ruleset.Inet && set.Family != ruleset.Netdev {
			continue
		}
		for _, t := range set.Tables {
			c.table(Hop{Set: i, tool: set.Tool, Family: set.Family, Table: t.Name}, t.Chains)
		}
	}
	reversed := *c
	reversed.stages = map[string][]stage{}
	for hook, stages := range c.stages {
		turned := slices.Clone(stages)
		slices.Reverse(turned)
		slices.SortStableFunc(stages, stage.compare)
		slices.SortStableFunc(turned, stage.compare)
		reversed.stages[hook] = turned
		if !slices.EqualFunc(stages, turned, func(a, b stage) bool { return a.chain == b.chain }) {
			c.reversed = &reversed
		}
	}
	return c
}

// compare orders stages of a hook: 0 is an unknown order. Of two stages with the same priority, the kernel first runs the one created
// later (net/netfilter/core.c, nf_hook_entries_grow). Handles show the order of creation only within one table.
func (s stage) compare(o stage) int {
	order := cmp.Compare(s.order(), o.order())
	if order == 0 && s.hook.Type == "nat" && o.hook.Type == "nat" {
		order = cmp.Compare(s.hook.Priority, o.hook.Priority)
	}
	if order == 0 && s.Set == o.Set && s.Table == o.Table {
		order = cmp.Compare(o.chain.Handle, s.chain.Handle)
	}
	return order
}

// table adds the base chains of a table that have rules or a policy of DROP.
func (c *course) table(h Hop, all []ruleset.Chain) {
	chains := make(map[string]*ruleset.Chain, len(all))
	for i := range all {
		chain := &all[i]
		chains[chain.Name] = chain
		hook, base := c.Owner.HookOf(h.Family, h.Table, chain.Name)
		if chain.Hook != nil {
			hook, base = *chain.Hook, true
		}
		if base && (len(chain.Rules) > 0 || chain.Policy == string(ruleset.Drop)) {
			h.Hook, h.priority, h.other = hook.Name, hook.Priority, c.other(h.Family, h.Table, *chain)
			c.stages[hook.Name] = append(c.stages[hook.Name], stage{h, hook, chain, chains})
		}
	}
}

// walk runs the packet through all hooks.
func (c *course) walk(p Packet) outcome {
	w := c.walker(p.State)
	for _, r := range w.pass(p) {
		if astray := r.verdict == CannotTell && r.looped && r.packet.Type != local; astray { // no process can answer
			if w.end(nil, r, CannotTell, r.marked); r.marked < 0 {
				w.stop("a route leads it to the loopback device, although its address is not the pod's")
			}
			continue
		}
		w.end(nil, r, max(r.verdict, Passed), r.decided)
	}
	return w.outcome()
}

// pass returns the readings that traverse all hooks.
func (w *walker) pass(p Packet) []reading {
	if p.Outgoing {
		return w.send(begin(p))
	}
	return w.receive(begin(p))
}

// send runs an outgoing packet through output and postrouting, and through the input hooks if it leaves by lo.
func (w *walker) send(all []reading) []reading {
	all = w.hook("output", all)
	for i := range all {
		all[i].packet.Out = cmp.Or(all[i].rerouted, all[i].packet.Out)
	}
	all = w.hook("egress", w.hook("postrouting", all))
	looped, gone := split(all, func(r reading) bool { return r.packet.Out == w.Loopback })
	for i := range looped {
		looped[i].looped, looped[i].packet.In, looped[i].packet.Out = true, w.Loopback, ""
	}
	return append(gone, w.receive(looped)...)
}

// split separates the items for which is holds from the others.
func split[T any](all []T, is func(T) bool) (yes, no []T) {
	for _, r := range all {
		if is(r) {
			yes = append(yes, r)
		} else {
			no = append(no, r)
		}
	}
	return yes, no
}

// receive runs an incoming packet through ingress, prerouting and input, or through forward and postrouting.
func (w *walker) receive(all []reading) []reading {
	in, through := split(w.hook("prerouting", w.hook("ingress", all)), func(r reading) bool {
		return r.packet.Type == local || w.delivers(r.packet.Mark)
	})
	given, through := split(through, func(r reading) bool { return r.verdict == HandedOver })
	for _, r := range given { // a packet with a socket is not forwarded (net/ipv4/ip_forward.c, ip_forward)
		w.end(nil, r, Dropped, r.decided)
	}
	for i := range through {
		through[i].packet.Out = unknown
	}
	return append(w.hook("input", in), w.hook("postrouting", w.hook("forward", through))...)
}

// hook runs packets through the base chains of a hook.
func (w *walker) hook(name string, all []reading) []reading {
	for i := range w.stages[name] {
		s := &w.stages[name][i]
		pass, skip := split(all, func(r reading) bool { return s.passes(r.packet) && (s.hook.Type != "nat" || r.translatable(name)) })
		if s.hook.Priority < tracking && destination(name) || name == "ingress" {
			pass = early(pass)
		}
		all = w.merge(append(skip, w.leave(s, w.base(s, pass))...))
	}
	for i := range all {
		all[i].destination = all[i].destination || destination(name)
		all[i].source = all[i].source || name == "input" || name == "postrouting"
	}
	return all
}

// leave updates packets behind a base chain: they have their connection, and perhaps another route.
func (w *walker) leave(s *stage, all []reading) (on []reading) {
	for _, r := range all {
		if r.packet.State != ruleset.StateUntracked {
			r.packet.State = w.state
		}
		if s.hook.Name == "output" && s.hook.Type == "route" && w.reroute(&r) { // the kernel asks for the route again
			w.end(s, r, CannotTell, r.marked)
			continue
		}
		on = append(on, r)
	}
	return on
}

// passes reports whether a packet traverses the chain: chains of ingress and egress are bound to interfaces.
func (s stage) passes(p Packet) bool {
	name := p.In
	if s.hook.Name == "egress" {
		name = p.Out
	}
	return s.hook.Device == "" || name == unknown || slices.Contains(strings.Split(s.hook.Device, ","), name)
}

// reroute sends a packet to lo if its new mark has a route there, and reports whether a policy rule may select another route by the mark.
func (w *walker) reroute(r *reading) (elsewhere bool) {
	p, old := &r.packet, r.routed
	r.routed = p.Mark
	if p.Mark != old && w.delivers(p.Mark) {
		r.rerouted = cmp.Or(r.rerouted, w.Loopback)
		return false
	}
	return slices.ContainsFunc(w.Selected[w.family], func(m ruleset.Mark) bool { return m.Of(p.Mark) != m.Of(old) })
}

// delivers reports whether a mark has a route only to lo.
func (c *course) delivers(mark uint32) bool {
	return slices.ContainsFunc(c.Delivered[c.family], func(m ruleset.Mark) bool { return m.Of(mark) })
}

// tracking is the priority at which a packet finds its connection (NF_IP_PRI_CONNTRACK, linux/netfilter_ipv4.h).
const tracking = -200

// early gives packets the state of a packet without a connection. A packet that arrives by lo keeps the state of its way out; a packet
// with a zone has a template, which acts like a new connection.
func early(all []reading) []reading {
	for i := range all {
		if p := &all[i].packet; !all[i].looped && all[i].zone == 0 && p.State != ruleset.StateUntracked {
			p.State = ruleset.StateInvalid
		}
	}
	return all
}

// connected reports whether a packet has a connection.
func (p Packet) connected() bool { return p.State&(ruleset.StateInvalid|ruleset.StateUntracked) == 0 }

// translatable reports whether a packet traverses nat: the first packet of a connection does, once for its destination and once
// for its source. A packet that arrives by lo from the pod has done both (net/netfilter/nf_nat_core.c, nf_nat_inet_fn).
func (r reading) translatable(hook string) bool {
	done := destination(hook) && r.destination || !destination(hook) && r.source
	return !done && r.packet.State&(ruleset.StateNew|ruleset.StateRelated) != 0
}

// destination reports whether nat translates destinations at a hook. The mesh decides at these hooks.
func destination(hook string) bool { return hook == "output" || hook == "prerouting" }

// base runs packets through a base chain and its policy.
func (w *walker) base(s *stage, all []reading) []reading {
	if len(all) == 0 {
		return nil
	}
	p := w.chain(s, s.chain, all)
	if s.chain.Policy != string(ruleset.Drop) {
		return append(p[leave], p[back]...)
	}
	for _, r := range p[back] {
		hop := -1
		if r.because < 0 {
			hop = w.show(s.hop(s.chain, 0, "policy DROP"))
		}
		w.over(s, r, Dropped, hop)
	}
	return p[leave]
}

// merge drops equal readings.
func (w *walker) merge(all []reading) []reading {
	if len(all) < 2 {
		return all
	}
	var distinct []reading
	for _, r := range all {
		i := slices.IndexFunc(distinct, func(d reading) bool {
			d.because, d.decided, d.marked = r.because, r.decided, r.marked
			return d == r
		})
		if i < 0 {
			distinct = append(distinct, r)
		} else if r.because < 0 {
			distinct[i] = r
		}
	}
	if len(distinct) > maxReadings {
		w.stop("the rules that are not understood can be read in more than %d ways", maxReadings)
	}
	return distinct
}

// end records a packet's verdict at a stage; nil is behind all stages.
func (w *walker) end(s *stage, r reading, v Verdict, hop int) {
	r.late = s != nil && s.behind()
	if v != Redirected && v != HandedOver {
		r.to = netip.AddrPort{}
	}
	same := func(e reading) bool { return e.verdict == v && e.to == r.to && e.late == r.late }
	if r.because < 0 || !slices.ContainsFunc(w.ended, same) {
		r.verdict, r.decided = v, hop
		w.ended = append(w.ended, r)
	}
}

// stop ends the walk.
func (w *walker) stop(format string, args ...any) {
	if w.limit == "" {
		w.limit = fmt.Sprintf(format, args...)
	}
}

// show adds a hop and returns its index, or -1 if it is omitted.
func (w *walker) show(h Hop) int {
	if h.Answer == No && len(w.hops) >= maxShown {
		w.omitted++
		return -1
	}
	w.hops = append(w.hops, h)
	return len(w.hops) - 1
}
