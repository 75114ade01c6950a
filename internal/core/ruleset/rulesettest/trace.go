package rulesettest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// route is the chain of each table that a hook's packets pass, in order.
var route = map[Hook][]place{ //nolint:gochecknoglobals // a constant table
	Outgoing: {{"raw", "OUTPUT"}, {"mangle", "OUTPUT"}, {"nat", "OUTPUT"}, {"filter", "OUTPUT"}},
	Incoming: {{"raw", "PREROUTING"}, {"mangle", "PREROUTING"}, {"nat", "PREROUTING"}, {"filter", "INPUT"}},
}

type place struct{ table, chain string }

// deepest is more than any chain of ours is deep; what is deeper runs in circles.
const deepest = 16

// Rules is a Set that was understood as a whole. Compile makes one.
type Rules struct {
	family ruleset.Family
	chains map[place]ruleset.Chain
}

// nativePrefix is that of the native tables, whose base chains have the names of iptables' in small letters.
const nativePrefix = "istio-proxy-"

// at gives the place of a chain, in iptables' words for a base chain of a native table.
func at(t ruleset.Table, chain string) place {
	table, native := strings.CutPrefix(t.Name, nativePrefix)
	if upper := strings.ToUpper(chain); native && ruleset.Builtin(table, upper) {
		chain = upper
	}
	return place{table, chain}
}

// Compile reads all rules of a Set, of iptables or of native tables. The error names every rule that it does not
// understand, and those that the kernel would refuse where they stand.
func Compile(set ruleset.Set) (Rules, error) {
	out := Rules{family: set.Family, chains: map[place]ruleset.Chain{}}
	var errs []error
	for _, t := range set.Tables {
		for _, c := range t.Chains {
			out.chains[at(t, c.Name)] = c
			errs = append(errs, checkChain(set.Family, t, c)...)
		}
	}
	return out, errors.Join(errs...)
}

func checkChain(f ruleset.Family, t ruleset.Table, c ruleset.Chain) (errs []error) {
	here := at(t, c.Name)
	if len(c.Rules) == 0 && f == ruleset.Inet {
		errs = append(errs, fmt.Errorf("chain %s/%s is empty", t.Name, c.Name))
	}
	if ruleset.Builtin(here.table, here.chain) && !passed(here) && (len(c.Rules) > 0 || c.Policy == "DROP") {
		errs = append(errs, fmt.Errorf("reading chain %s/%s: rules here are not known to Trace", t.Name, c.Name))
	}
	for _, r := range c.Rules {
		if err := check(t, here, r); err != nil {
			errs = append(errs, fmt.Errorf("reading rule %q of %s/%s: %w", r, t.Name, c.Name, err))
		}
	}
	return errs
}

func passed(p place) bool {
	return slices.Contains(route[Outgoing], p) || slices.Contains(route[Incoming], p)
}

// Trace follows a packet through the rules of a Set.
func Trace(set ruleset.Set, p Packet) (Verdict, error) {
	rules, err := Compile(set)
	if err != nil {
		return Verdict{}, err
	}
	return rules.Trace(p)
}

// Trace follows a packet.
func (rs Rules) Trace(p Packet) (Verdict, error) {
	if err := p.check(rs.family); err != nil {
		return Verdict{}, fmt.Errorf("tracing a packet: %w", err)
	}
	w := &walk{rules: rs, packet: p}
	for _, here := range route[p.Hook] {
		if here.table == "nat" && !natted(p) {
			continue
		}
		w.table(here)
		if w.err != nil {
			return w.verdict, fmt.Errorf("tracing a packet through %s/%s: %w", here.table, here.chain, w.err)
		}
		if w.verdict.Action == Drop || w.verdict.Action == Reject {
			break
		}
	}
	w.verdict.Packet = w.packet
	return w.verdict, nil
}

// natted reports whether the nat table is asked: only for the first packet of a connection, and only once. What comes
// in by lo was asked about on its way out (net/netfilter/nf_nat_core.c, nf_nat_inet_fn).
func natted(p Packet) bool {
	return (p.state() == New || p.state() == Related) && p.In != "lo"
}

// walk is a packet on its way.
type walk struct {
	rules   Rules
	packet  Packet
	verdict Verdict
	// act is the verdict of the table that is being passed.
	act Action
	err error
}

func (w *walk) fail(format string, args ...any) {
	w.err = errors.Join(w.err, fmt.Errorf(format, args...))
}

// table passes one table and joins its verdict to that of those before.
func (w *walk) table(at place) {
	w.act = Accept
	c, there := w.rules.chains[at]
	if !there {
		return
	}
	if w.chain(at, 0) != leaveTable && c.Policy == "DROP" {
		w.act = Drop
	}
	switch {
	case w.act == Accept:
		return
	case w.act == Redirect && w.verdict.Action == TPROXY:
		w.fail("the packet was handed over by TPROXY and is redirected as well; what becomes of it is not known here")
	case w.act == Redirect:
		w.redirect()
	}
	w.verdict.Action = w.act
}

// redirect changes the destination: to loopback for what the pod sends (net/netfilter/nf_nat_redirect.c). What comes in
// goes to the interface's first address, which is not known here and stays as it is.
func (w *walk) redirect() {
	w.packet.Dport = w.verdict.Port
	if w.packet.Hook != Outgoing {
		return
	}
	w.packet.Out = "lo"
	if w.packet.Dst.Is6() {
		w.packet.Dst = netip.IPv6Loopback()
	} else {
		w.packet.Dst = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
}

// chain passes one chain. It gives leaveTable if a rule ended the table.
func (w *walk) chain(at place, depth int) onward {
	if depth > deepest {
		w.fail("chains lead in a circle through %s", at.chain)
		return leaveTable
	}
	for _, r := range w.rules.chains[at].Rules {
		if slices.ContainsFunc(r.Matches, func(m ruleset.Match) bool { return !w.holds(m) }) {
			continue
		}
		w.verdict.Path = append(w.verdict.Path, Step{at.table, at.chain, r})
		on := nextRule
		if jump, ok := r.Target.(ruleset.Jump); ok {
			if w.chain(place{at.table, jump.Chain}, depth+1) == leaveTable {
				return leaveTable
			}
		} else {
			on = w.target(r.Target)
		}
		if on != nextRule {
			return on
		}
	}
	return goBack
}
