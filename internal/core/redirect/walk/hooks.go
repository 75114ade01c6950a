package walk

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Bounds of a walk: rules judged, readings of the rules followed at once, chains within chains, and hops shown that did
// not match. Above one of the first three the answer is CannotTell.
const (
	maxSteps    = 1 << 18
	maxReadings = 32
	maxDepth    = 1000
	maxShown    = 1000
)

// walker is one walk.
type walker struct {
	family    ruleset.Family
	delivered []uint32
	// state is that of the packet's connection.
	state ruleset.States
	// stages are the base chains of each hook in the order of their priorities.
	stages map[string][]stage
	wanted map[place]ruleset.Rule
	// ambiguous is set if two base chains with rules have the same hook and priority.
	ambiguous bool

	hops           []Hop
	omitted, steps int
	// calls are the hops of the jumps that lead to the current chain.
	calls []int
	// passed is the last hop that let the packet pass, in nat and elsewhere.
	passed map[bool]int
	ended  []reading
	limit  string
}

// stage is a base chain.
type stage struct {
	set   int
	table string
	hook  ruleset.Hook
	chain *ruleset.Chain
	// chains are those of its table by name.
	chains map[string]*ruleset.Chain
}

// reading is the packet and its verdict so far, for one choice of the rules that may match.
type reading struct {
	// because is the first hop that this reading takes for a match, -1 for the reading without one; decided is the hop of
	// the verdict. Both are no difference between readings.
	because, decided int

	packet  Packet
	verdict Verdict
	to      netip.AddrPort
	zone    ruleset.Zone
	// rerouted is the interface it leaves by from now on; looped says that it arrived by lo from the pod itself.
	rerouted string
	looped   bool
	// Each connection passes nat once for its destination and once for its source.
	destination, source bool
}

func (n Namespace) walker(p Packet, live []ruleset.Set) *walker {
	f := familyOf(p.Dst.Addr())
	w := &walker{family: f, state: p.State, delivered: n.Delivered[f], stages: map[string][]stage{}, wanted: n.Wanted.rules(), passed: map[bool]int{}}
	for i, set := range live {
		if set.Family != f && set.Family != ruleset.Inet {
			continue
		}
		for _, t := range set.Tables {
			w.table(i, set.Family, t)
		}
	}
	for _, stages := range w.stages {
		slices.SortStableFunc(stages, func(a, b stage) int { return cmp.Compare(a.hook.Priority, b.hook.Priority) })
		for i := range stages[1:] {
			w.ambiguous = w.ambiguous || stages[i].hook.Priority == stages[i+1].hook.Priority
		}
	}
	return w
}

// table adds the base chains of a table that decide anything.
func (w *walker) table(set int, f ruleset.Family, t ruleset.Table) {
	chains := make(map[string]*ruleset.Chain, len(t.Chains))
	for i := range t.Chains {
		c := &t.Chains[i]
		chains[c.Name] = c
		hook, base := redirect.HookOf(f, t.Name, c.Name)
		if base && (len(c.Rules) > 0 || c.Policy == string(ruleset.Drop)) {
			w.stages[hook.Name] = append(w.stages[hook.Name], stage{set, t.Name, hook, c, chains})
		}
	}
}

// walk passes the hooks.
func (w *walker) walk(p Packet) outcome {
	all := []reading{{packet: p, because: -1, decided: -1}}
	if p.Outgoing {
		all = w.send(all)
	} else {
		all = w.receive(all)
	}
	for _, r := range all {
		w.end(r, max(r.verdict, Passed), r.decided)
	}
	return w.outcome()
}

// send passes the hooks of what the pod sends, and those of what it receives by lo.
func (w *walker) send(all []reading) []reading {
	before := all[0].packet.Mark
	all = w.hook("output", all)
	for i := range all {
		p := &all[i].packet
		if p.Mark != before && slices.Contains(w.delivered, p.Mark) {
			p.Out = "lo"
		}
		p.Out = cmp.Or(all[i].rerouted, p.Out)
	}
	all = w.hook("postrouting", all)
	looped, gone := split(all, func(r reading) bool { return r.packet.Out == "lo" })
	for i := range looped {
		looped[i].looped, looped[i].packet.In, looped[i].packet.Out = true, "lo", ""
	}
	return append(gone, w.receive(looped)...)
}

// split separates the packets for which is holds.
func split(all []reading, is func(reading) bool) (yes, no []reading) {
	for _, r := range all {
		if is(r) {
			yes = append(yes, r)
		} else {
			no = append(no, r)
		}
	}
	return yes, no
}

// receive passes the hooks of what arrives.
func (w *walker) receive(all []reading) []reading {
	in, through := split(w.hook("prerouting", all), func(r reading) bool {
		return r.packet.Type == local || slices.Contains(w.delivered, r.packet.Mark)
	})
	given, through := split(through, func(r reading) bool { return r.verdict == HandedOver })
	for _, r := range given { // a packet with a socket is not forwarded (net/ipv4/ip_forward.c, ip_forward)
		w.end(r, Dropped, r.decided)
	}
	for i := range through {
		through[i].packet.Out = unknown
	}
	return append(w.hook("input", in), w.hook("postrouting", w.hook("forward", through))...)
}

// hook passes the base chains of a hook.
func (w *walker) hook(name string, all []reading) []reading {
	for _, s := range w.stages[name] {
		pass, skip := split(all, func(r reading) bool { return s.hook.Type != "nat" || r.translatable(name) })
		if s.hook.Priority < tracking && destination(name) {
			pass = early(pass)
		}
		pass = w.base(s, pass)
		for i := range pass {
			if p := &pass[i].packet; p.State != Untracked {
				p.State = w.state
			}
		}
		all = w.merge(append(skip, pass...))
	}
	for i := range all {
		all[i].destination = all[i].destination || destination(name)
		all[i].source = all[i].source || name == "input" || name == "postrouting"
	}
	return all
}

// tracking is the priority at which a packet finds its connection (NF_IP_PRI_CONNTRACK, linux/netfilter_ipv4.h).
const tracking = -200

// early gives packets that have no connection yet the state of these. One that arrives by lo has that of the way out, and one with a
// zone a template, which is as a new one.
func early(all []reading) []reading {
	for i := range all {
		if p := &all[i].packet; !all[i].looped && all[i].zone == 0 && p.State != Untracked {
			p.State = ruleset.StateInvalid
		}
	}
	return all
}

// connected reports whether a packet has a connection.
func (p Packet) connected() bool { return p.State&(ruleset.StateInvalid|Untracked) == 0 }

// translatable reports whether a packet passes nat: the first one of a connection, once for its destination and once for its
// source. One that arrives by lo from the pod has passed both (net/netfilter/nf_nat_core.c, nf_nat_inet_fn).
func (r reading) translatable(hook string) bool {
	done := destination(hook) && r.destination || !destination(hook) && r.source
	return !done && r.packet.State&(ruleset.StateNew|ruleset.StateRelated) != 0
}

// destination reports whether nat translates destinations at a hook. These are the hooks where the mesh decides.
func destination(hook string) bool { return hook == "output" || hook == "prerouting" }

// base passes a base chain and its policy.
func (w *walker) base(s stage, all []reading) []reading {
	if len(all) == 0 {
		return nil
	}
	p := w.chain(&s, s.chain, all)
	if s.chain.Policy != string(ruleset.Drop) {
		return append(p[leave], p[back]...)
	}
	for _, r := range p[back] {
		hop := -1
		if r.because < 0 {
			hop = w.show(Hop{Hook: s.hook.Name, Table: s.table, Chain: s.chain.Name, Set: s.set, Rule: "policy DROP", Answer: Yes})
		}
		w.end(r, Dropped, hop)
	}
	return p[leave]
}

// merge drops equal readings.
func (w *walker) merge(all []reading) []reading {
	var distinct []reading
	for _, r := range all {
		i := slices.IndexFunc(distinct, func(d reading) bool {
			d.because, d.decided = r.because, r.decided
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

// end gives a packet its verdict.
func (w *walker) end(r reading, v Verdict, hop int) {
	if v != Redirected && v != HandedOver {
		r.to = netip.AddrPort{}
	}
	same := func(e reading) bool { return e.verdict == v && e.to == r.to }
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

// show adds a hop and returns its place, or -1 if it is left out.
func (w *walker) show(h Hop) int {
	if h.Answer == No && len(w.hops) >= maxShown {
		w.omitted++
		return -1
	}
	w.hops = append(w.hops, h)
	return len(w.hops) - 1
}
