package walk

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// place is a rule in its chain or, without table and chain, anywhere.
type place struct{ table, chain, text string }

// rules are those that are wanted, by chain and anywhere.
func (w *Wanted) rules() map[place]ruleset.Rule {
	all := map[place]ruleset.Rule{}
	if w == nil {
		return all
	}
	each(w.Sets(), func(at place, r ruleset.Rule) {
		if _, twice := all[at]; !twice {
			all[at], all[place{text: at.text}] = r, r
		}
	})
	return all
}

// each calls do with all rules of some sets.
func each(sets []ruleset.Set, do func(place, ruleset.Rule)) {
	for _, s := range sets {
		for _, t := range s.Tables {
			for _, c := range t.Chains {
				for _, r := range c.Rules {
					do(place{t.Name, c.Name, r.String()}, r)
				}
			}
		}
	}
}

// read returns the meaning and the reason of a live rule. A rule of a native table has the meaning of the wanted rule with the
// same text, which is the one with the same expressions; its matches and target have a text of iptables as well.
func (w *walker) read(at place) (rule, string) {
	why := w.wanted[at].Why
	if ruleset.KnownTable(at.table) {
		return parse(at.text), why
	}
	known := w.wanted[place{text: at.text}]
	if known.Target == nil {
		return rule{opaque: true, conditions: []condition{{}}}, why
	}
	r := parse(ruleset.IPTables("", known.Target, known.Matches...).String())
	for _, m := range known.Matches {
		switch m := m.(type) {
		case ruleset.OfFamily:
			r.family = ruleset.Family(m)
		case ruleset.Network:
			r.family = familyOf(m.Prefix.Addr())
		}
	}
	return r, why
}

// settings are those of a Spec by their names for users, each with what gives it its default.
var settings = []struct { //nolint:gochecknoglobals // a constant table
	name  string
	reset func(s, to *redirect.Spec)
}{
	{"interceptionMode", func(s, to *redirect.Spec) { s.Mode = to.Mode }},
	{"includeOutboundIPRanges", func(s, to *redirect.Spec) { s.Outbound = to.Outbound }},
	{"excludeOutboundIPRanges", func(s, to *redirect.Spec) { s.OutboundExclude = to.OutboundExclude }},
	{"includeInboundPorts", func(s, to *redirect.Spec) { s.Inbound = to.Inbound }},
	{"excludeInboundPorts", func(s, to *redirect.Spec) { s.InboundExclude = to.InboundExclude }},
	{"includeOutboundPorts", func(s, to *redirect.Spec) { s.OutboundPorts = to.OutboundPorts }},
	{"excludeOutboundPorts", func(s, to *redirect.Spec) { s.OutboundPortsExclude = to.OutboundPortsExclude }},
	{"excludeInterfaces", func(s, to *redirect.Spec) { s.ExcludeInterfaces = to.ExcludeInterfaces }},
	{"reroute-virtual-interfaces", func(s, to *redirect.Spec) { s.RerouteInterfaces = to.RerouteInterfaces }},
	{"the proxy's user", func(s, to *redirect.Spec) { s.UIDs = to.UIDs }},
	{"the proxy's group", func(s, to *redirect.Spec) { s.GIDs = to.GIDs }},
	{"the owner groups", func(s, to *redirect.Spec) { s.OwnerGroups = to.OwnerGroups }},
	{"the excluded owner groups", func(s, to *redirect.Spec) { s.OwnerGroupsExclude = to.OwnerGroupsExclude }},
	{"the tunnel port", func(s, to *redirect.Spec) { s.TunnelPort = to.TunnelPort }},
	{"the loopback network", func(s, to *redirect.Spec) { s.Loopback = to.Loopback }},
	{"DNS capture", func(s, to *redirect.Spec) { s.DNS, s.DNSServers = to.DNS, to.DNSServers }},
	{"drop of invalid packets", func(s, to *redirect.Spec) { s.DropInvalid = to.DropInvalid }},
}

// settings returns those that make a rule: with the default of one the rule would not be wanted.
func (w *Wanted) settings(h Hop) (names []string) {
	at := place{h.Table, h.Chain, h.Rule}
	if _, wanted := w.rules()[at]; !wanted {
		return nil
	}
	standard := redirect.Default()
	for _, s := range settings {
		without := *w
		s.reset(&without.Spec, &standard)
		if _, still := without.rules()[at]; !still {
			names = append(names, s.name)
		}
	}
	return names
}

// outcome is a Result on its way, and why the walk was given up.
type outcome struct {
	Result

	limit string
}

// outcome joins the readings.
func (w *walker) outcome() outcome {
	o := outcome{Result: Result{Hops: w.hops, Omitted: w.omitted}, limit: w.limit}
	i := slices.IndexFunc(w.ended, func(r reading) bool { return r.because < 0 })
	if w.limit != "" || i < 0 {
		return o
	}
	first := w.ended[i]
	o.Verdict, o.To, o.Zone, o.Packet = first.verdict, first.to, first.zone, first.packet
	decided := first.decided
	for _, nat := range []bool{false, true} {
		if hop, some := w.passed[nat]; some && o.Verdict == Passed {
			decided = hop
		}
	}
	for _, r := range w.ended {
		if o.Verdict != CannotTell && (r.verdict != first.verdict || r.to != first.to) {
			o.Verdict, o.To, decided = CannotTell, netip.AddrPort{}, r.because
		}
	}
	if decided >= 0 {
		o.Decided = &o.Hops[decided]
	}
	return o
}

// Reasons returns the reason of a rule by its place, "" for a rule that is not wanted.
func (n Namespace) Reasons() func(table, chain, rule string) string {
	wanted := n.Wanted.rules()
	return func(table, chain, rule string) string { return wanted[place{table, chain, rule}].Why }
}

// Explained completes a result that another than Walk found: of the packet, the verdict with its address, the hops and the rule that
// decided. cause stands in for a rule where none is known.
func (n Namespace) Explained(r Result, p Packet, cause string) Result {
	return n.explained(outcome{r, cause}, p)
}

// explained completes a Result.
func (n Namespace) explained(o outcome, p Packet) Result {
	r, b := o.Result, strings.Builder{}
	to := r.To.String()
	if !r.To.Addr().IsValid() {
		to = fmt.Sprint("port ", r.To.Port())
	}
	way := map[bool]string{true: "goes out unredirected", false: "comes in unredirected"}[p.Outgoing]
	b.WriteString([...]string{"cannot tell", way, "is redirected to " + to, "is handed over by TPROXY to " + to, "is dropped", "is rejected"}[r.Verdict])
	switch d := r.Decided; {
	case d != nil:
		r.Settings = n.Wanted.settings(*d)
		fmt.Fprintf(&b, ", because of rule %d of %s/%s, %s", d.Number, d.Table, printable.Text(d.Chain, maxText), printable.Quote(d.Rule, maxText))
		if r.Verdict == CannotTell {
			b.WriteString(map[bool]string{true: ", which may match", false: ", whose target is not known here"}[d.Answer == Unknown])
		}
		if d.Why != "" {
			b.WriteString(": " + d.Why)
		}
		if len(r.Settings) > 0 {
			b.WriteString(" (" + strings.Join(r.Settings, ", ") + ")")
		}
	case r.Verdict == Passed:
		b.WriteString(": no rule takes it")
	default:
		b.WriteString(": " + o.limit)
	}
	if len(n.Unread) > 0 {
		b.WriteString("; not read: " + printable.Text(strings.Join(n.Unread, ", "), maxText))
	}
	r.Summary = b.String()
	return r
}

// maxText bounds a text of the pod in a summary.
const maxText = 200
