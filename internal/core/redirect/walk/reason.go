package walk

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// place identifies a rule by its chain and text.
type place struct{ table, chain, text string }

// rules returns the wanted rules by their places.
func (w *Wanted) rules() map[place]ruleset.Rule {
	if w == nil {
		return nil
	}
	return rulesOf(w.Sets())
}

// rulesOf returns the rules of sets by their places.
func rulesOf(sets []ruleset.Set) map[place]ruleset.Rule {
	all := map[place]ruleset.Rule{}
	eachChain(sets, func(_ ruleset.Family, table string, c ruleset.Chain) {
		for _, r := range c.Rules {
			at := place{table, c.Name, r.String()}
			if _, twice := all[at]; !twice {
				all[at] = r
			}
		}
	})
	return all
}

// Setting is a setting of the pod or of the plugin that lets a packet pass.
type Setting struct {
	// Name is the short name, Key the annotation, "" for a setting of the plugin.
	Name, Key string
	// Value has the items that apply to the packet, or some of them.
	Value string
}

// String returns NAME=VALUE.
func (s Setting) String() string { return s.Name + "=" + s.Value }

// setting describes a setting that can let packets pass: its items as texts, and how to copy its value from another configuration.
type setting struct {
	field redirect.Field
	name  string
	// key is the annotation, "" for that of the field.
	key   string
	items func(w *Wanted) []string
	take  func(w, from *Wanted)
}

// kinds returns all of them. The proxy's identity is not among them: its packets pass in every pod.
func (w *Wanted) kinds() []setting {
	if w.Ambient != nil {
		return ambientSettings()
	}
	type spec = redirect.Spec
	return []setting{
		row(redirect.FieldOutbound, "includeOutboundIPRanges", func(s *spec) *redirect.Networks { return &s.Outbound }, listed),
		row(redirect.FieldOutboundExclude, "excludeOutboundIPRanges", func(s *spec) *[]netip.Prefix { return &s.OutboundExclude }, Texts),
		row(redirect.FieldInbound, "includeInboundPorts", func(s *spec) *redirect.Ports { return &s.Inbound }, listed),
		row(redirect.FieldInboundExclude, "excludeInboundPorts", func(s *spec) *[]ruleset.PortRange { return &s.InboundExclude }, Texts),
		row(redirect.FieldOutboundPortsExclude, "excludeOutboundPorts", func(s *spec) *[]ruleset.PortRange { return &s.OutboundPortsExclude }, Texts),
		row(redirect.FieldExcludeInterfaces, "excludeInterfaces", func(s *spec) *[]string { return &s.ExcludeInterfaces }, Texts),
		row(redirect.FieldRerouteInterfaces, "reroute-virtual-interfaces", func(s *spec) *[]string { return &s.RerouteInterfaces }, Texts),
		row(redirect.FieldOwnerGroups, "the captured groups", func(s *spec) *redirect.Groups { return &s.OwnerGroups }, listed),
		row(redirect.FieldOwnerGroupsExclude, "the excluded groups", func(s *spec) *[]uint32 { return &s.OwnerGroupsExclude }, Texts),
		{
			field: redirect.FieldSecondFamily, name: "second_ip_family",
			items: func(w *Wanted) []string { return []string{w.Spec.SecondFamily.String()} },
			take:  func(w, from *Wanted) { w.Families = from.Families },
		},
	}
}

// row returns a setting that is a part of the Spec.
func row[T any](field redirect.Field, name string, part func(*redirect.Spec) *T, items func(T) []string) setting {
	return setting{
		field: field, name: name, items: func(w *Wanted) []string { return items(*part(&w.Spec)) },
		take: func(w, from *Wanted) { *part(&w.Spec) = *part(&from.Spec) },
	}
}

func listed[T any](s redirect.Selection[T]) []string { return Texts(s.List) }

// Texts returns the items as texts.
func Texts[T any](list []T) []string {
	all := make([]string, len(list))
	for i, one := range list {
		all[i] = fmt.Sprint(one)
	}
	return all
}

// maxItems bounds the items of a setting in a sentence.
const maxItems = 3

// of returns the setting as it lets a packet pass at a rule.
func (s setting) of(w *Wanted, rule string) Setting {
	key := s.key
	if w.Ambient == nil {
		key = sidecar.KeysOf(w.Spec)(s.field)
	}
	return Setting{s.name, key, s.value(w, rule)}
}

// value returns the items that are words of the rule, otherwise the first items.
func (s setting) value(w *Wanted, rule string) string {
	words := strings.FieldsFunc(rule, func(r rune) bool { return r == ' ' || r == '"' })
	all := s.items(w)
	some := slices.DeleteFunc(slices.Clone(all), func(item string) bool {
		return !slices.Contains(words, item) && !slices.Contains(words, strings.Replace(item, "-", ":", 1)) // a range of ports in iptables
	})
	if len(some) > 0 {
		all = some
	}
	switch {
	case len(all) == 0:
		return `""`
	case len(all) > maxItems:
		return strings.Join(all[:maxItems], ",") + fmt.Sprintf(",… (%d more)", len(all)-maxItems)
	}
	return strings.Join(all, ",")
}

// walk follows a packet through the wanted rules.
func (w Wanted) walk(p Packet) outcome {
	sets := w.Sets()
	return w.course(ruleset.FamilyOf(p.Dst.Addr()), sets, rulesOf(sets)).walk(p)
}

// course returns the course of a family through the wanted rules.
func (w Wanted) course(f ruleset.Family, sets []ruleset.Set, rules map[place]ruleset.Rule) *course {
	n := Namespace{Live: sets, Delivered: map[ruleset.Family][]ruleset.Mark{}, Owner: w.Mode().Owner(), Wanted: &w}
	routing := w.Mode().Routing(w.Families)
	for _, f := range routing.MarkFamilies {
		n.Delivered[f] = []ruleset.Mark{{Value: routing.Mark, Mask: routing.Mask}}
	}
	return n.course(f, rules)
}

// settings returns a minimal set of settings without which the wanted rules would redirect the packet. decided is the wanted
// rule that lets it pass.
func (w Wanted) settings(p Packet, decided *Hop) (names []Setting) {
	without := w.plain()
	if !without.walk(p).Verdict.redirects() {
		return nil
	}
	rule := ""
	if decided != nil {
		rule = decided.Rule
	}
	for _, s := range w.kinds() {
		with := without
		s.take(&with, &w)
		if with.walk(p).Verdict.redirects() {
			without = with
		} else {
			names = append(names, s.of(&w, rule))
		}
	}
	return names
}

// plain returns the configuration without settings.
func (w Wanted) plain() Wanted {
	standard := Wanted{Spec: redirect.Default(), Ambient: &ambient.Spec{Config: ambient.Config{IPv6: true}}, Families: w.Families}
	if w.Families.IPv6 == redirect.Bypassed {
		standard.Families.IPv6 = redirect.Captured
	}
	for _, s := range w.kinds() {
		s.take(&w, &standard)
	}
	return w
}

// stranger returns the packet as sent by a process other than the proxy.
func (w Wanted) stranger(p Packet) Packet {
	if w.Ambient != nil {
		p.Mark = 0
	}
	for slices.Contains(w.Spec.UIDs, p.UID) {
		p.UID++
	}
	for slices.Contains(w.Spec.GIDs, p.GID) {
		p.GID++
	}
	return p.completed("")
}

// Takes reports whether the wanted rules redirect a packet of an unknown process, or would without settings.
func (w *Wanted) Takes(p Packet) bool {
	return w != nil && w.plain().walk(w.stranger(p)).Verdict != Passed
}

// always returns the wanted rule that lets a packet pass in every pod, where d does in this pod.
func (w Wanted) always(p Packet, d *Hop) *Hop {
	if without := w.plain(); d != nil {
		if _, still := without.rules()[place{d.Table, d.Chain, d.Rule}]; !still {
			return without.walk(p).Decided
		}
	}
	return d
}

// outcome is an unfinished Result, and the limit that stopped the walk.
type outcome struct {
	Result

	limit string
	ended []reading
	// passed is the hop of the last rule that let the packet pass where the mesh decides, -1 without one.
	passed int
}

// outcome joins the readings.
func (w *walker) outcome() outcome {
	o := outcome{Result: Result{Hops: w.hops, Omitted: w.omitted}, limit: w.limit, ended: w.ended, passed: w.passed}
	i := slices.IndexFunc(w.ended, func(r reading) bool { return r.because < 0 })
	if w.limit != "" || i < 0 {
		return o
	}
	first := w.ended[i]
	o.Verdict, o.To, o.Zone, o.Packet = first.verdict, first.to, first.zone, first.packet
	if first.verdict == HandedOver {
		o.Packet.Dst = netip.AddrPortFrom(first.given, o.Packet.Dst.Port())
	}
	decided := first.decided
	if o.passed >= 0 && o.Verdict == Passed && decided < 0 {
		decided = o.passed
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

// Reasons returns a function that looks up the reason of a rule; it returns "" for an unwanted rule.
func (n Namespace) Reasons() func(table, chain, rule string) string {
	wanted := n.Wanted.rules()
	return func(table, chain, rule string) string { return wanted[place{table, chain, rule}].Why }
}

// Explained completes a result that does not come from Walk: it has the verdict with its address, the hops and the rule that
// decided. cause replaces an unknown rule; "" means that the mesh leaves such packets alone. If a wanted rule decided, the verdict is
// the expected one; for other packets the expected verdict is unknown because their process is.
func (n Namespace) Explained(r Result, p Packet, cause string) Result {
	var want outcome
	switch d := r.Decided; {
	case d != nil && d.Why != "":
		want.Verdict, want.To, want.Decided = r.Verdict, r.To, d
		if r.Verdict == Passed && n.Wanted != nil {
			r.Settings, want.Decided = n.Wanted.settingsOf(p, d)
		}
	case d == nil && r.Verdict == Passed && cause == "":
		want.Verdict = Passed
	}
	return r.completed(cause, want, p)
}

// settingsOf returns the settings that make a wanted rule let a packet pass. If the packet would pass without them, settingsOf returns
// no settings, and the rule that would let it pass. A packet without a destination is any packet that the rule matches.
func (w *Wanted) settingsOf(p Packet, h *Hop) (names []Setting, decided *Hop) {
	switch {
	case p.Dst.IsValid() && !w.Takes(p):
		return nil, w.always(w.stranger(p), h)
	case !p.Dst.IsValid() && w.neverTaken(ruleset.Read(h.Rule)):
		return nil, h
	}
	plain := w.plain()
	for _, s := range w.kinds() {
		without := *w
		s.take(&without, &plain)
		if _, still := without.rules()[place{h.Table, h.Chain, h.Rule}]; !still {
			names = append(names, s.of(w, h.Rule))
		}
	}
	return names, h
}

// neverTaken reports whether a rule matches only UDP that is not captured as DNS.
func (w *Wanted) neverTaken(r ruleset.Rule) bool {
	if !slices.Contains(r.Matches, ruleset.Match(ruleset.Protocol{Number: ruleset.UDP})) {
		return false
	}
	dns := question{Packet: Packet{Protocol: ruleset.UDP, Dst: netip.AddrPortFrom(netip.Addr{}, dnsPort)}}
	return w.Spec.DNS == redirect.DNSOff || slices.ContainsFunc(r.Matches, func(m ruleset.Match) bool {
		p, is := m.(ruleset.Port)
		return is && !p.Source && dns.match(p) == No
	})
}

// explained completes a Result.
func (n Namespace) explained(o outcome, p Packet) Result {
	r := o.Result
	var want outcome
	if n.Wanted != nil {
		p = p.asWanted(n.Loopback)
		want = n.Wanted.walk(p)
		if want.Verdict == Passed && r.Verdict == Passed {
			r.Settings = n.Wanted.settings(p, want.Decided)
			if len(r.Settings) == 0 {
				want.Decided = n.Wanted.always(p, want.Decided)
			}
		}
	}
	return r.completed(o.limit, want, p)
}

// completed adds the expected verdict and the summary.
func (r Result) completed(limit string, want outcome, p Packet) Result {
	r.Expected, r.ExpectedTo = want.Verdict, want.To
	r.Summary = r.what(p.Outgoing) + r.cause(limit, want, p)
	return r
}

// what says what happens to the packet.
func (r Result) what(outgoing bool) string {
	way := map[bool]string{true: "goes out unredirected", false: "comes in unredirected"}[outgoing]
	to := target(r.To)
	return [...]string{"cannot tell", way, "is redirected to " + to, "is handed over by TPROXY to " + to, "is dropped", "is rejected"}[r.Verdict]
}

func target(to netip.AddrPort) string {
	if to.Addr().IsValid() {
		return to.String()
	}
	return fmt.Sprint("port ", to.Port())
}

// cause gives the reason for the verdict.
func (r Result) cause(limit string, want outcome, p Packet) string {
	d := r.Decided
	switch {
	case r.Verdict == CannotTell && d == nil:
		return ": " + limit
	case r.Verdict == CannotTell && d.Answer == Unknown:
		return fmt.Sprintf(", because %s may match", d.named())
	case r.Verdict == CannotTell && marks(d.Target):
		return fmt.Sprintf(", because of %s: a policy rule selects the route by its mark", d.named())
	case r.Verdict == CannotTell:
		return fmt.Sprintf(", because of %s, whose target is not known here", d.named())
	case want.Verdict == CannotTell && d != nil: // the wanted rules are unknown
		return ", because of " + d.named()
	case want.Verdict == CannotTell && limit != "":
		return ": " + limit
	case want.Verdict == CannotTell:
		return ", because no rule of the mesh is there"
	case len(r.Settings) > 0:
		return ", because " + because(r.Settings)
	case r.Verdict != want.Verdict || r.To != want.To:
		return r.deviation(want)
	case r.Verdict != Passed && d != nil:
		return ": " + d.Why
	case want.Decided != nil:
		return ", as in every pod: " + want.Decided.Why
	case p.Protocol != ruleset.TCP:
		return ", as in every pod: the mesh captures TCP, and of UDP only DNS where DNS capture is on"
	}
	return ", as in every pod: no rule takes it"
}

func marks(t ruleset.Target) bool {
	switch t.(type) {
	case ruleset.SetMark, ruleset.CopyMark:
		return true
	}
	return false
}

func because(all []Setting) string {
	var b strings.Builder
	for i, s := range all {
		if i > 0 {
			b.WriteString(" and ")
		}
		b.WriteString(s.String())
		if s.Key != "" {
			b.WriteString(" (annotation " + s.Key + ")")
		}
	}
	return printable.Text(b.String(), 2*maxText)
}

// deviation says why the packet's path differs from the wanted path.
func (r Result) deviation(want outcome) string {
	wanted := map[Verdict]string{Passed: "let it pass", Dropped: "drop it", Rejected: "reject it"}[want.Verdict]
	if wanted == "" {
		wanted = "redirect it to " + target(want.To)
	}
	text := ", though the wanted rules " + wanted + ": "
	if d := r.Decided; d != nil && d.Why == "" {
		return text + d.named() + " is not the mesh's"
	}
	for _, h := range want.Hops {
		if h.Answer == Yes && !slices.ContainsFunc(r.Hops, func(o Hop) bool { return o.Table == h.Table && o.Chain == h.Chain && o.Rule == h.Rule }) {
			return text + h.named() + " is missing or out of order"
		}
	}
	if d := r.Decided; d != nil {
		return text + d.named() + " takes it first"
	}
	return text + "rules differ"
}

// named describes the rule of a hop, or the policy of a chain.
func (h Hop) named() string {
	rule := printable.Quote(h.Rule, maxText)
	if h.Number == 0 {
		return fmt.Sprintf("%s of chain %s of table %s", printable.Text(h.Rule, maxText), printable.Text(h.Chain, maxText), strings.TrimPrefix(h.table(), "table "))
	}
	return fmt.Sprintf("rule %d of %s %s (%s)", h.Number, h.table(), printable.Text(h.Chain, maxText), rule)
}

// table names the table, with its family for tables of other programs.
func (h Hop) table() string {
	if !h.other {
		return h.Table
	}
	return "table " + TableName(h.Family, h.Table)
}

// TableName returns the name of an nf_tables table as nft prints it, with its family.
func TableName(f ruleset.Family, name string) string {
	family := map[ruleset.Family]string{ruleset.IPv4: "ip", ruleset.IPv6: "ip6", ruleset.Inet: "inet", ruleset.Netdev: "netdev"}[f]
	return family + " " + printable.Text(name, maxText)
}

// maxText bounds a text from the pod in a summary.
const maxText = 200
