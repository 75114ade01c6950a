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
	// most is how many lines the page shows if it has room for all parts. Of these, keep lines count as none against other parts.
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
		return append(slices.Clone(p.lines[:n-1]), output.Cut(last, columns-1)+"…")
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
	columns int
	parts   []part
}

// wrap returns a text as lines. It cuts long words.
func (s *sheet) wrap(begin string, indent int, text string) []string {
	return output.Wrap(begin, indent, output.CutWords(printable.Text(text, maxLine), s.columns-indent), s.columns)
}

// text adds a text with a label.
func (s *sheet) text(most int, label, format string, args ...any) {
	begin := fmt.Sprintf("  %-*s", labels, label)
	s.parts = append(s.parts, part{lines: s.wrap(begin, labels+2, fmt.Sprintf(format, args...)), most: most})
}

// list adds a list of items, each a line.
func (s *sheet) list(most, of int, items []string) {
	for i := range items {
		items[i] = output.Cut(items[i], s.columns)
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
		sizes[i] = min(sizes[i], p.most)
		room -= sizes[i]
	}
	for ; room < 0; room++ {
		longest := -1
		for i, n := range sizes {
			if n > 0 && (longest < 0 || n-s.parts[i].keep > sizes[longest]-s.parts[longest].keep) {
				longest = i
			}
		}
		if longest < 0 {
			break
		}
		sizes[longest]--
	}
	for i, p := range s.parts {
		lines = append(lines, p.shorten(sizes[i], s.columns)...)
	}
	return lines
}

// onePage is the explanation on one page: the verdict, the packet, what differs, and the answer with the remedy.
func (c *config) onePage(e document.Explanation, columns int) string {
	s := &sheet{columns: cmp.Or(columns, pageColumns)}
	const headlines, answers = 2, 5
	const states = 20 // columns for the longest state
	top := part{lines: s.wrap("", 0, output.Cut(c.subject(e), s.columns-states)+": "+verdict(e))}
	end := closing(e)
	if e.Answer != nil {
		end = packetAnswer(e.Answer)
		s.packet(c, e.Answer)
	} else {
		s.pod(e)
	}
	s.differences(e)
	bottom := s.wrap("", 0, output.Cut(output.CutWords(printable.Text(end, maxAnswer), s.columns), (answers-1)*s.columns))
	if text := remedy(e); text != "" { // its words are never cut: it may have commands
		bottom = append(bottom, output.Wrap("remedy: ", labels-4, printable.Text(text, maxLine), s.columns)...)
	}
	lines := append(top.shorten(min(headlines, len(top.lines)), s.columns), "")
	lines = append(lines, s.fit(pageLines-len(lines)-1-len(bottom))...)
	return strings.Join(append(append(lines, ""), bottom...), "\n") + "\n"
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
		if added != "" {
			s.text(short, "at ADD", "%s", added)
		}
		s.text(long, "decision", "%s", now)
	}
	if e.Modes != nil && e.State == audit.Outside {
		modes(e.Modes, func(label, text string) { s.text(short, label, "%s", text) })
	}
	if e.InspectionError != "" {
		s.text(short, "not read", "%s", e.InspectionError)
	}
	if !e.Since.IsZero() {
		s.text(short, "since", "%s, checked %s", moment(e.Since), moment(e.Checked))
	}
	var also []string
	for _, one := range e.Problems[min(1, len(e.Problems)):] { // the answer has the first one
		also = append(also, fmt.Sprintf("%s: %s", one.State, printable.Text(one.Detail, maxLine)))
	}
	if len(also) > 0 {
		s.text(long, "also", "%s", printable.Some(also, short))
	}
	var items []string
	for _, x := range e.Exceptions {
		items = append(items, fmt.Sprintf("%s=%s (%s)", x.Setting, x.Value, x.Traffic))
	}
	if len(items) > 0 {
		s.text(long, "exceptions", "%s", strings.Join(items, ", "))
	}
	if e.InspectionError == "" {
		s.text(long, "listeners", "%s", heard(e))
	}
}

// ports are the ports to which the rules of the mesh redirect.
func ports(e document.Explanation) []uint16 {
	return []uint16{e.Ports.Outbound, e.Ports.Inbound, redirect.DNSPort, redirect.TunnelPort}
}

// heard lists the listeners of the proxy.
func heard(e document.Explanation) string {
	var texts []string
	others := 0
	for _, l := range e.Listeners {
		text := fmt.Sprintf("%d uid %d", l.Address.Port(), l.UID)
		switch {
		case !slices.Contains(ports(e), l.Address.Port()):
			others++
		case !slices.Contains(texts, text):
			texts = append(texts, text)
		}
	}
	for _, port := range deaf(e) {
		texts = append(texts, fmt.Sprintf("%d NOTHING LISTENS", port))
	}
	slices.Sort(texts)
	if others > 0 {
		texts = append(texts, output.Plural(others, "other"))
	}
	return cmp.Or(strings.Join(texts, ", "), "none")
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
	items = nil
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

// packet adds the packet with the rules that decide about it.
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
		text += fmt.Sprintf("; %s not: --rules", output.Plural(others, "other")+map[bool]string{true: " does", false: " do"}[others == 1])
	}
	s.parts = append(s.parts, part{lines: s.wrap("", 2, text), most: 1})
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
		begin := "  " + sign(h) + " "
		if !reasons {
			lines = append(lines, output.Cut(begin+rule, s.columns))
			continue
		}
		lines = append(lines, s.wrap(begin, indent, rule)...)
		why := cmp.Or(h.Why, stranger(h))
		switch last := len(lines) - 1; {
		case why == "":
		case output.Width(lines[last]+" # "+why) <= s.columns:
			lines[last] += " # " + why
		default:
			lines = append(lines, s.wrap(strings.Repeat(" ", indent)+"# ", indent+2, why)...)
		}
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
