package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
)

// The size of the page without --rules. A wider or narrower terminal gets lines of its width.
const (
	pageLines   = 24
	pageColumns = 80
)

// maxAnswer bounds the answer before its middle is cut.
const maxAnswer = 16 << 10

// part is a part of the page.
type part struct {
	lines []string
	// most is how many lines the page shows if it has room for all parts. If it lacks room, the longest part loses a line at a time;
	// keep lines are not counted in this comparison. A part with keep = pageLines loses no line.
	most, keep int
	// of is the number of items of a list, 0 for a text.
	of int
	// brief are the items of a list of steps without their reasons. If they are too many, the first and the last ones are shown.
	brief []string
}

// shorten leaves n lines.
func (p part) shorten(n, columns int) []string {
	steps := p.brief != nil
	if steps && n < len(p.lines) {
		p.lines = p.brief
	}
	switch {
	case n <= 0:
		return nil
	case n >= len(p.lines) && p.of <= len(p.lines):
		return p.lines
	case p.of == 0:
		last := strings.TrimRight(p.lines[n-1], " ")
		return append(slices.Clone(p.lines[:n-1]), printable.Cut(last, columns-1)+"…")
	}
	n = min(n, len(p.lines)+1) - 1
	tail := 0
	if steps {
		tail = (n + 1) / 2
	}
	more := fmt.Sprintf("  … and %d more: --rules", p.of-n)
	return slices.Concat(p.lines[:n-tail], []string{more}, p.lines[len(p.lines)-tail:])
}

// sheet is the page in progress.
type sheet struct {
	// columns is the width, 0 for no limit.
	columns int
	// whole is set with --rules: everything is shown, and nothing is cut.
	whole bool
	parts []part
}

// wrap returns a text as lines. It cuts long words.
func (s *sheet) wrap(begin string, indent int, text string) []string {
	if text = printable.Text(text, maxLine); !s.whole {
		text = printable.CutWords(text, s.columns-indent)
	}
	return printable.Wrap(begin, indent, text, s.columns)
}

// text adds a text with a label.
func (s *sheet) text(most int, label, format string, args ...any) {
	begin := fmt.Sprintf("  %-*s", labels, label)
	s.parts = append(s.parts, part{lines: s.wrap(begin, labels+2, fmt.Sprintf(format, args...)), most: most})
}

// items adds short items with a label: between commas or, on the whole page, each in lines of its own.
func (s *sheet) items(label string, items []string) {
	const most = 3
	if !s.whole && len(items) > 0 {
		items = []string{strings.Join(items, ", ")}
	}
	for _, item := range items {
		s.text(most, label, "%s", item)
		label = ""
	}
}

// list adds a list of items, each a line.
func (s *sheet) list(most, of int, items []string) {
	for i := range items {
		if !s.whole {
			items[i] = printable.Cut(items[i], s.columns)
		}
	}
	s.parts = append(s.parts, part{lines: items, most: most, of: of})
}

// fit returns the lines of the parts, at most room. A part that is too long loses lines first.
func (s *sheet) fit(room int) (lines []string) {
	sizes := make([]int, len(s.parts))
	for i, p := range s.parts {
		if sizes[i] = len(p.lines); p.of > sizes[i] {
			sizes[i]++
		}
		if !s.whole {
			sizes[i] = min(sizes[i], p.most)
		}
		room -= sizes[i]
	}
	for at := 0; room < 0 && at >= 0 && !s.whole; room++ {
		if at = s.longest(sizes); at >= 0 {
			sizes[at]--
		}
	}
	for i, p := range s.parts {
		lines = append(lines, p.shorten(sizes[i], s.columns)...)
	}
	return lines
}

// longest returns the part that loses the next line, -1 if none has any to lose.
func (s *sheet) longest(sizes []int) int {
	at := -1
	for i, n := range sizes {
		if n > 0 && s.parts[i].keep < pageLines && (at < 0 || n-s.parts[i].keep > sizes[at]-s.parts[at].keep) {
			at = i
		}
	}
	return at
}

// page is the explanation: the verdict, the packet or the pod, what differs, and the answer with the remedy.
func (c *config) page(e document.Explanation, columns int) string {
	s := &sheet{columns: columns, whole: c.Rules}
	name, end := c.subject(e), closing(e)
	if !s.whole {
		const states = 20 // columns for the longest state
		s.columns = cmp.Or(columns, pageColumns)
		name = printable.Cut(name, s.columns-states)
	}
	if e.Answer != nil {
		end = packetAnswer(e.Answer)
		s.packet(c, e.Answer)
	} else {
		s.pod(e)
	}
	if !s.whole {
		s.differences(e)
	} else if e.Answer == nil {
		s.rules(e)
	}
	s.unread(e)
	const headlines, answers = 2, 5
	if end = printable.Text(end, maxAnswer); !s.whole {
		end = printable.Cut(printable.CutWords(end, s.columns), (answers-1)*s.columns)
	}
	bottom := printable.Wrap("", 0, end, s.columns)
	if text := remedy(e); text != "" { // its words are never cut: it may have commands
		bottom = append(bottom, printable.Wrap("remedy: ", labels-4, printable.Text(text, maxLine), s.columns)...)
	}
	fixed := func(most int, lines []string) part { return part{lines: lines, most: most, keep: pageLines} }
	top, blank := fixed(headlines, s.wrap("", 0, name+": "+verdict(e))), fixed(1, []string{""})
	s.parts = slices.Concat([]part{top, blank}, s.parts, []part{blank, fixed(len(bottom), bottom)})
	return strings.Join(s.fit(pageLines), "\n") + "\n"
}

// remedy is the instruction that ends a fault of the packet or, if the packet has none of its own, of the pod. It is "" without one,
// and if settings of the pod let the packet pass, or no route leads to its destination: the answer names the cause.
func remedy(e document.Explanation) string {
	fault := e.State
	switch a := e.Answer; {
	case e.State == audit.Outside && !byInit(e):
		return cmp.Or(e.Remedy, e.Decision.Remedy)
	case a == nil:
	case a.NoListener && slices.ContainsFunc(ports(e), func(p uint16) bool { return strings.HasSuffix(a.To, fmt.Sprintf(":%d", p)) }):
		fault = audit.NoListener
	case slices.ContainsFunc(a.Hops, func(h document.Hop) bool { return stranger(h) != "" }):
	case slices.ContainsFunc(a.Settings, func(s string) bool { return strings.HasPrefix(s, "second_ip_family=") }):
		fault = audit.IPv6Open
	case len(a.Settings) > 0, a.Verdict == "not-sent":
		return ""
	}
	if fault == e.State { // the agent's words
		return e.Remedy
	}
	return fault.Remedy(false)
}

// pod adds what is known about the pod beside its rules.
func (s *sheet) pod(e document.Explanation) {
	const long, short = 3, 2
	if e.Pod != "" {
		s.text(short, "injected", "%s", injected(e))
		now, added := decided(e)
		if s.whole {
			added = atADD(e.Added)
		}
		if added != "" {
			s.text(short, "at ADD", "%s", added)
		}
		s.text(long, "decision", "%s", now)
	}
	if e.Modes != nil && (s.whole || e.State == audit.Outside) {
		for _, to := range [][2]string{{"to ambient", e.Modes.Ambient}, {"to sidecar", e.Modes.Sidecar}} {
			if to[1] != "" {
				s.text(short, to[0], "%s", to[1])
			}
		}
	}
	if e.InspectionError != "" {
		s.text(short, "not read", "%s", e.InspectionError)
	}
	if !e.Since.IsZero() {
		s.text(short, "since", "%s, checked %s", moment(e.Since), moment(e.Checked))
	}
	s.inspected(e)
}

// inspected adds what the last inspection found beside the rules.
func (s *sheet) inspected(e document.Explanation) {
	const long, short = 3, 2
	var items []string
	for _, one := range e.Problems {
		items = append(items, fmt.Sprintf("%s: %s", one.State, printable.Text(one.Detail, maxLine)))
	}
	if s.whole {
		s.items("problems", items)
		s.items("backend", slices.Compact(strings.FieldsFunc(e.Backend, func(r rune) bool { return r == ',' })))
	} else if len(items) > 1 { // the answer has the first one
		s.text(long, "also", "%s", printable.Some(items[1:], short))
	}
	items = nil
	for _, x := range e.Exceptions {
		items = append(items, fmt.Sprintf("%s=%s (%s)", x.Setting, x.Value, x.Traffic))
	}
	s.items("exceptions", items)
	if e.InspectionError == "" {
		s.items("listeners", heard(e, s.whole))
	}
}

// ports are the ports to which the rules of the mesh redirect.
func ports(e document.Explanation) []uint16 {
	return []uint16{e.Ports.Outbound, e.Ports.Inbound, redirect.DNSPort, redirect.TunnelPort}
}

// heard lists the listeners of the proxy and, for the whole page, all others.
func heard(e document.Explanation, whole bool) (texts []string) {
	of := map[uint16]string{
		e.Ports.Outbound: ", outbound traffic", e.Ports.Inbound: ", inbound traffic", redirect.DNSPort: ", DNS queries where DNS is captured",
		redirect.TunnelPort: ", tunnels (HBONE)", 15020: ", status", 15021: ", health", 15090: ", metrics",
	}
	others := 0
	for _, l := range e.Listeners {
		switch {
		case whole:
			texts = append(texts, fmt.Sprintf("%s uid %d%s", l.Address, l.UID, of[l.Address.Port()]))
		case slices.Contains(ports(e), l.Address.Port()):
			texts = append(texts, fmt.Sprintf("%d uid %d", l.Address.Port(), l.UID))
		default:
			others++
		}
	}
	for _, port := range deaf(e) {
		texts = append(texts, fmt.Sprintf("%d NOTHING LISTENS", port))
	}
	slices.Sort(texts)
	if texts = slices.Compact(texts); others > 0 {
		texts = append(texts, output.Plural(others, "other"))
	}
	if texts == nil {
		texts = []string{"none"}
	}
	return texts
}

// rules adds all rules.
func (s *sheet) rules(e document.Explanation) {
	const indent = 16
	if len(e.Chains) > 0 {
		s.text(1, "rules", "%s", count(e.Chains))
	}
	for _, c := range e.Chains {
		lines := s.wrap("  ", indent, c.Family+" table "+c.Table+" chain "+c.Chain)
		for _, r := range c.Rules {
			lines = append(lines, s.reasoned(fmt.Sprintf("    %-8s", strings.ToUpper(r.Op)), indent, r.Text, r.Why)...)
		}
		if c.Omitted > 0 {
			lines = append(lines, fmt.Sprintf("            and %d more rules", c.Omitted))
		}
		s.parts = append(s.parts, part{lines: lines})
	}
}

// differences adds the number of rules, and those that differ from the wanted ones.
func (s *sheet) differences(e document.Explanation) {
	const most = 6
	met := map[string]bool{} // the way of the packet shows these
	if e.Answer != nil {
		for _, h := range e.Answer.Hops {
			met[h.Table+h.Chain+h.Rule] = stranger(h) != ""
		}
	}
	items, of := differing(e.Chains, most, met)
	there := func(r walk.Rule) bool { return r.Op != "missing" }
	switch some := slices.ContainsFunc(e.Chains, func(c walk.Chain) bool { return slices.ContainsFunc(c.Rules, there) }); {
	case of > 0 && !some:
		s.text(1, "rules", "all %d are missing: --rules", of)
		items, of = nil, 0
	case of > 0 || e.Answer == nil && len(e.Chains) > 0:
		s.text(2, "rules", "%s", count(e.Chains))
	}
	s.list(most, of, items)
	s.parts[len(s.parts)-1].keep = 3 // what a tenant writes elsewhere does not hide them
}

// unread adds the tables that were not read.
func (s *sheet) unread(e document.Explanation) {
	var items []string
	for _, name := range e.Unread {
		items = append(items, printable.Text(fmt.Sprintf("  %-*s%s", labels, "not read", name), maxLine))
	}
	s.list(2, len(items), items)
}

// differing returns the first rules of each kind that differ from the wanted ones, the kinds in turn, and the number of all, without
// the rules that the packet has met.
func differing(chains []walk.Chain, most int, met map[string]bool) (items []string, of int) {
	kinds := []string{"missing", "foreign", "extra"}
	rules := map[string][]string{}
	for _, c := range chains {
		of += c.Omitted
		for _, r := range c.Rules {
			if r.Op == "" || met[c.Table+c.Chain+r.Text] {
				continue
			}
			if of++; len(rules[r.Op]) < most {
				rules[r.Op] = append(rules[r.Op], printable.Text(fmt.Sprintf("  %-8s%s %s %s: %s", strings.ToUpper(r.Op), c.Family, c.Table, c.Chain, r.Text), maxLine))
			}
		}
	}
	for i := range most {
		for _, kind := range kinds {
			items = append(items, rules[kind][min(i, len(rules[kind])):min(i+1, len(rules[kind]))]...)
		}
	}
	return items, of
}

// packet adds the packet with the rules that decide about it or, on the whole page, with all rules that it meets.
func (s *sheet) packet(c *config, a *document.Answer) {
	const most, long = 14, 3
	s.parts = append(s.parts, part{lines: s.wrap("", 2, fmt.Sprintf("PACKET: %s, %s", strings.ToUpper(string(a.Wanted)), a.Packet)), most: long})
	if c.resolved != "" {
		s.parts = append(s.parts, part{lines: s.wrap("  ", 2, c.resolved), most: 2})
	}
	others, omitted := a.Omitted, a.OmittedHops
	var matches []document.Hop
	for _, h := range a.Hops {
		if h.Answer == "not-matched" {
			others++
		} else {
			matches = append(matches, h)
		}
	}
	text := "RULES that match (→)"
	switch {
	case len(matches) == 0:
		text = "RULES that match: none"
	case slices.ContainsFunc(matches, func(h document.Hop) bool { return h.Answer == "unknown" }):
		text += " or may match (?)"
	}
	if others > 0 {
		text += fmt.Sprintf("; %s not", output.Plural(others, "other")+map[bool]string{true: " does", false: " do"}[others == 1])
		if !s.whole {
			text += ": --rules"
		}
	}
	s.parts = append(s.parts, part{lines: s.wrap("", 2, text), most: 1})
	if s.whole {
		half := len(a.Hops) / 2
		lines := s.steps(a.Hops[:half], true)
		if omitted > 0 {
			lines = append(lines, fmt.Sprintf("  … and %d more", omitted))
		}
		s.parts = append(s.parts, part{lines: append(lines, s.steps(a.Hops[half:], true)...)})
		return
	}
	brief := s.steps(matches, false)
	steps := part{lines: s.steps(matches, true), most: most, of: len(brief) + omitted, brief: brief}
	if omitted > 0 {
		steps.lines = brief
	}
	s.parts = append(s.parts, steps)
}

// steps returns the rules with their reasons or, without reasons, a line for each.
func (s *sheet) steps(hops []document.Hop, reasons bool) (lines []string) {
	const indent = 6
	for _, h := range hops {
		rule := printable.Text(fmt.Sprintf("%s %s %d: %s", h.Table, h.Chain, h.Number, h.Rule), maxLine)
		if s.whole {
			rule = h.Hook + ": " + rule
		}
		if begin := "  " + sign(h) + " "; reasons {
			lines = append(lines, s.reasoned(begin, indent, rule, cmp.Or(h.Why, stranger(h)))...)
		} else {
			lines = append(lines, printable.Cut(begin+rule, s.columns))
		}
	}
	return lines
}

// reasoned returns a rule with its reason, behind it or, if that does not fit, below it.
func (s *sheet) reasoned(begin string, indent int, rule, why string) []string {
	lines := s.wrap(begin, indent, rule)
	switch last := len(lines) - 1; {
	case why == "":
	case s.columns == 0 || printable.Width(lines[last]+" # "+why) <= s.columns:
		lines[last] += " # " + why
	default:
		lines = append(lines, s.wrap(strings.Repeat(" ", indent)+"# ", indent+2, why)...)
	}
	return lines
}

// deaf returns the ports of the proxy on which nothing listens although the namespace has rules of the mesh.
func deaf(e document.Explanation) (ports []uint16) {
	if !slices.ContainsFunc(e.Chains, func(c walk.Chain) bool { return strings.HasPrefix(strings.ToUpper(c.Chain), "ISTIO") }) {
		return nil
	}
	for _, port := range []uint16{e.Ports.Outbound, e.Ports.Inbound} {
		if !slices.ContainsFunc(e.Listeners, func(l document.Listener) bool { return l.Address.Port() == port }) {
			ports = append(ports, port)
		}
	}
	return ports
}
