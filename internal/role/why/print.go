package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// maxLine bounds a text of the pod in the page.
const maxLine = 1 << 10

// paper is a page in progress. Lines are wrapped at width columns, 0 for no limit.
type paper struct {
	text  strings.Builder
	width int
}

func (p *paper) print(text string) { p.text.WriteString(text) }

// head begins a section.
func (p *paper) head(title string) { p.print("\n" + title + "\n") }

// labels is the width of the column of labels.
const labels = 12

// line prints a label with a text.
func (p *paper) line(label, format string, args ...any) {
	p.wrap(fmt.Sprintf("  %-*s", labels, label), labels+2, printable.Text(fmt.Sprintf(format, args...), maxLine))
}

// wrap prints a text after a beginning. Further lines are indented.
func (p *paper) wrap(begin string, indent int, text string) {
	p.print(strings.Join(output.Wrap(begin, indent, text, p.width), "\n") + "\n")
}

// rule prints a rule followed by its reason or, if that does not fit, with the reason on the next line.
func (p *paper) rule(begin, text, why string) {
	const between = "    # "
	indent := output.Width(begin)
	text = printable.Text(text, maxLine)
	if why == "" || p.width == 0 || indent+output.Width(text+between+why) <= p.width {
		if why != "" {
			text += between + why
		}
		p.wrap(begin, indent+4, text)
		return
	}
	p.wrap(begin, indent+4, text)
	p.wrap(strings.Repeat(" ", indent+4)+"# ", indent+6, why)
}

// whole is the explanation as text, with all rules: the verdict, the details, the answer and the remedy.
func (c *config) whole(e document.Explanation, width int) string {
	p := &paper{width: width}
	p.wrap("", 0, c.subject(e)+": "+verdict(e))
	var answer string
	if e.Answer != nil {
		c.packet(p, e.Answer)
		answer = packetAnswer(e.Answer)
	} else {
		if e.Pod != "" {
			injection(p, e)
			decision(p, e)
			modes(e.Modes, func(label, text string) { p.line(label, "%s", text) })
		}
		state(p, e)
		exceptions(p, e.Exceptions)
		listeners(p, e)
		rules(p, e)
		answer = closing(e)
	}
	p.print("\n")
	p.wrap("", 0, answer)
	if text := remedy(e); text != "" {
		p.wrap("remedy: ", 0, printable.Text(text, maxLine))
	}
	return p.text.String()
}

// subject names the pod or the namespace.
func (c *config) subject(e document.Explanation) string {
	if e.Pod != "" {
		return "POD " + printable.Text(e.Namespace+"/"+e.Pod, maxLine)
	}
	return "NAMESPACE " + printable.Text(c.Path(), maxLine)
}

// verdict is the state in one line.
func verdict(e document.Explanation) string {
	text := strings.ToUpper(string(e.State))
	if e.Pod == "" {
		return text + ", by its live rules alone"
	}
	return text + ", the pod " + printable.Text(e.Sentence, maxLine)
}

// injected says by what the proxy is there.
func injected(e document.Explanation) string {
	text := "no: it has no annotation " + sidecar.StatusKey
	if e.Injected {
		text = "yes"
		if e.Injection.Revision != "" {
			text += fmt.Sprintf(", by revision %q of istiod", e.Injection.Revision)
		}
	}
	text += "; proxy: " + proxy(e)
	if e.Injection.Setup != "" && e.Injection.Setup != sidecar.ValidationContainer {
		text += "; redirected by the init container " + e.Injection.Setup
	}
	return text
}

func proxy(e document.Explanation) string {
	switch {
	case e.Injection.Proxy == "container":
		return "the container istio-proxy"
	case e.Injection.Proxy != "":
		return "the init container istio-proxy (a native sidecar)"
	case e.Decision.Reason == string(sidecar.Ambient):
		return "none in the pod: the node's ztunnel"
	}
	return "none"
}

func injection(p *paper, e document.Explanation) {
	p.head("INJECTION")
	by := ""
	if e.Injection.Revision != "" {
		by = fmt.Sprintf(" by revision %q of istiod", e.Injection.Revision)
	}
	if e.Injected {
		p.line("injected", "yes,%s as the annotation %s says", by, sidecar.StatusKey)
	} else {
		p.line("injected", "no: it has no annotation %s", sidecar.StatusKey)
	}
	p.line("proxy", "%s", proxy(e))
	switch e.Injection.Setup {
	case "":
	case sidecar.ValidationContainer:
		p.line("redirection", "by the CNI plugin: the init container %s only checks it", e.Injection.Setup)
	default:
		p.line("redirection", "by the init container %s itself", e.Injection.Setup)
	}
}

// sources are the sources of a decision, in words.
var sources = map[agentapi.Source]string{ //nolint:gochecknoglobals // a constant table
	agentapi.SourceName: "by the pod's name", agentapi.SourceAnnotations: "by the annotations that the runtime passed",
	agentapi.SourceAgent: "by the node agent's view of the pod", agentapi.SourceAPI: "by the API server's answer",
	agentapi.SourceNone: "with no answer about the pod", agentapi.SourceWatch: "by the annotations that the runtime passed, without a report",
}

func outcome(captured bool, reason string) string {
	switch {
	case reason == string(sidecar.Ambient):
		return "enrol it in the ambient mesh"
	case captured:
		return "redirect it"
	default:
		return "leave it alone"
	}
}

// decided is the decision that counts now, and what the plugin decided at ADD if that differs.
func decided(e document.Explanation) (now, added string) {
	r, d := e.Added, e.Decision
	now = fmt.Sprintf("%s, because %s (%s)", outcome(d.Captured, d.Reason), d.Sentence, d.Reason)
	switch {
	case r == nil:
	case r.Reason == d.Reason:
		now += ", as at ADD " + moment(r.Time)
	default:
		added = fmt.Sprintf("%s (%s) %s", outcome(r.Captured, r.Reason), r.Reason, moment(r.Time))
		now += "; changed since ADD, and counts " + from(r.Reason, d.Reason)
	}
	if r != nil && r.Error != "" {
		added = "failed: " + r.Error
	}
	if d.Detail != "" {
		now += "; " + d.Detail
	}
	return now, added
}

// from says when a decision counts that differs from the one at ADD.
func from(at, now string) string {
	if ambient := string(sidecar.Ambient); at == ambient || now == ambient {
		return "at once: the agent enrols and releases running pods"
	}
	return "at the pod's next start"
}

func decision(p *paper, e document.Explanation) {
	p.head("DECISION")
	r := e.Added
	if r == nil {
		p.line("at ADD", "not known: the agent has the last calls of the plugin only (istio-cni decisions)")
	} else {
		p.line("at ADD", "%s, because %s (%s), %s, %s", outcome(r.Captured, r.Reason), sidecar.Reason(r.Reason).Sentence(), r.Reason, sources[agentapi.Source(r.Source)], moment(r.Time))
		if r.Backend != "" {
			p.line("", "rules by backend %s", backends(r.Backend))
		}
		if r.Detail != "" {
			p.line("", "%s", r.Detail)
		}
		if r.Error != "" {
			p.line("failed", "%s", r.Error)
		}
	}
	d := e.Decision
	if r != nil && r.Reason == d.Reason {
		p.line("now", "the same")
	} else {
		p.line("now", "%s, because %s (%s)", outcome(d.Captured, d.Reason), d.Sentence, d.Reason)
		if r != nil {
			p.line("", "the pod or the plugin's configuration has changed since; the decision of now counts %s", from(r.Reason, d.Reason))
		}
	}
	if d.Detail != "" {
		p.line("", "%s", d.Detail)
	}
}

// modes says what would put the pod into the other modes.
func modes(m *document.Modes, line func(label, text string)) {
	if m != nil && m.Ambient != "" {
		line("to ambient", m.Ambient)
	}
	if m != nil && m.Sidecar != "" {
		line("to sidecar", m.Sidecar)
	}
}

func state(p *paper, e document.Explanation) {
	p.head("STATE")
	p.line("state", "%s: it %s", e.State, e.Sentence)
	if !e.Since.IsZero() {
		p.line("since", "%s, checked %s", moment(e.Since), moment(e.Checked))
	}
	if e.Backend != "" {
		p.line("backend", "%s", backends(e.Backend))
	}
	for _, one := range e.Problems {
		p.line("problem", "%s: %s", one.State, one.Detail)
	}
	if e.InspectionError != "" {
		p.line("not read", "%s", e.InspectionError)
	}
}

// backends returns the backends of the families, each once.
func backends(list string) string {
	return strings.Join(slices.Compact(strings.Split(list, ",")), ", ")
}

func moment(t time.Time) string { return t.Format(time.RFC3339) }

func exceptions(p *paper, all []audit.Exception) {
	if len(all) == 0 {
		return
	}
	p.head("EXCEPTIONS: settings of the pod by which traffic passes the proxy")
	for _, x := range all {
		p.wrap("  ", 4, printable.Text(x.Setting+"="+x.Value, maxLine))
		p.wrap("    ", 6, x.Traffic)
	}
}

// maxListeners bounds the number of other listeners.
const maxListeners = 20

func listeners(p *paper, e document.Explanation) {
	if e.InspectionError != "" {
		return
	}
	p.head("LISTENERS (TCP)")
	traffic := map[uint16]string{e.Ports.Outbound: "outbound traffic ends here", e.Ports.Inbound: "inbound traffic ends here", 15053: "DNS queries end here where DNS is captured", 15008: "tunnels (HBONE)", 15020: "status", 15021: "health", 15090: "metrics"}
	others := 0
	for _, l := range e.Listeners {
		if traffic[l.Address.Port()] == "" {
			if others++; others > maxListeners {
				continue
			}
		}
		text := fmt.Sprintf("uid %d", l.UID)
		if what := traffic[l.Address.Port()]; what != "" {
			text += ", " + what
		}
		p.wrap(fmt.Sprintf("  %-22s ", l.Address), 25, text)
	}
	if len(e.Listeners) == 0 {
		p.wrap("  ", 2, "none")
	}
	if others > maxListeners {
		p.wrap("  ", 2, fmt.Sprintf("and %d more", others-maxListeners))
	}
	for _, port := range deaf(e) {
		p.wrap(fmt.Sprintf("  %-22d ", port), 25, "NOTHING LISTENS: what the rules redirect there is refused")
	}
}

func rules(p *paper, e document.Explanation) {
	if len(e.Chains) > 0 {
		p.head("RULES, live: " + count(e.Chains))
	}
	for _, c := range e.Chains {
		p.print("  " + c.Family + " table " + printable.Text(c.Table, maxLine) + " chain " + c.Chain + "\n")
		for _, r := range c.Rules {
			p.rule(fmt.Sprintf("    %-8s", strings.ToUpper(r.Op)), r.Text, r.Why)
		}
		if c.Omitted > 0 {
			p.wrap("            ", 12, fmt.Sprintf("and %d more rules", c.Omitted))
		}
	}
	for _, name := range e.Unread {
		p.wrap("  not read: ", 4, printable.Text(name, maxLine))
	}
}

// count sums up the rules.
func count(all []walk.Chain) string {
	n := map[string]int{}
	for _, c := range all {
		for _, r := range c.Rules {
			n[r.Op]++
		}
		n["more"] += c.Omitted
	}
	parts := []string{fmt.Sprintf("%d as wanted", n[""])}
	for _, o := range [][2]string{
		{"missing", "%d missing"}, {"foreign", "%d foreign"}, {"extra", "%d not wanted in chains of the mesh"}, {"more", "%d more"},
	} {
		if n[o[0]] > 0 {
			parts = append(parts, fmt.Sprintf(o[1], n[o[0]]))
		}
	}
	return strings.Join(parts, ", ")
}

// closing is the answer in one sentence.
func closing(e document.Explanation) string {
	subject := "the pod"
	if e.Pod == "" {
		subject = "the namespace"
	}
	why := printable.Text(e.Why(), maxLine)
	switch {
	case byInit(e):
		return "the pod is in the mesh: its init container istio-init has set up the redirection"
	case e.State == audit.Outside:
		return subject + " is outside of the mesh, because " + printable.Text(e.Decision.Sentence, maxLine)
	case e.State == audit.NotInspected || e.State == audit.Sandboxed:
		return "cannot tell whether " + subject + " is in the mesh, because " + why
	case e.State == audit.Captured && e.Pod == "":
		return subject + " is redirected as some configuration of the mesh wants it" + except(e)
	case e.State == audit.Captured:
		return subject + " is in the mesh: it is redirected as wanted" + except(e)
	case e.State == audit.Pending:
		return subject + " is not in the mesh yet: " + why
	case e.State == audit.Bypassed:
		return subject + " is past the mesh, because it has no rules of the mesh"
	}
	return subject + " is not as the mesh wants it (" + string(e.State) + "): " + why
}

func except(e document.Explanation) string {
	if len(e.Exceptions) == 0 {
		return ""
	}
	var some []string
	for _, x := range e.Exceptions {
		some = append(some, x.Setting+"="+x.Value)
	}
	return ", except what passes by " + printable.Text(strings.Join(some, ", "), maxLine)
}

// shown is the number of rules up to which rules without a match are printed.
const shown = 24

// packet prints the way of a packet: the rules that it meets, and the answer.
func (c *config) packet(p *paper, a *document.Answer) {
	p.head("PACKET: " + strings.ToUpper(string(a.Wanted)))
	p.wrap("  ", 2, printable.Text(a.Packet, maxLine))
	if c.resolved != "" {
		p.wrap("  ", 2, printable.Text(c.resolved, maxLine))
	}
	p.head("RULES that it meets (→ matches, ? may match)")
	if len(a.Hops) == 0 {
		p.print("  none\n")
	}
	hops(p, a)
}

// packetAnswer is the answer about a packet in one sentence.
func packetAnswer(a *document.Answer) string {
	if a.Wanted == document.Unknown {
		return a.Sentence
	}
	return "the packet " + a.Sentence
}

// sign marks a rule that a packet meets.
func sign(h document.Hop) string {
	return map[string]string{"matched": "→", "unknown": "?", "not-matched": " "}[h.Answer]
}

// stranger marks a rule that takes the packet and is not the mesh's, "" for any other.
func stranger(h document.Hop) string {
	if h.Answer == "matched" && h.Why == "" {
		return "NOT A RULE OF THE MESH"
	}
	return ""
}

// hops prints the rules that a packet meets. If there are many, it only counts the rules that do not match.
func hops(p *paper, a *document.Answer) {
	at, skipped := "", a.Omitted
	skip := func() {
		if skipped > 0 {
			p.print(fmt.Sprintf("      … %d that do not match\n", skipped))
		}
		skipped = 0
	}
	for i, h := range a.Hops {
		if a.OmittedHops > 0 && i == len(a.Hops)/2 {
			skip()
			p.print(fmt.Sprintf("      … %d more\n", a.OmittedHops))
		}
		if h.Answer == "not-matched" && len(a.Hops) > shown {
			skipped++
			continue
		}
		skip()
		if place := fmt.Sprintf("%s: %s %s", h.Hook, h.Table, h.Chain); place != at {
			at = place
			p.print("  " + printable.Text(place, maxLine) + "\n")
		}
		p.rule(fmt.Sprintf("    %s %2d  ", sign(h), h.Number), h.Rule, cmp.Or(h.Why, stranger(h)))
	}
	skip()
}
