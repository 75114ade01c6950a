package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// maxLine bounds a text of the pod in the page.
const maxLine = 1 << 10

// labels is the width of the column of labels.
const labels = 12

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

// atADD is the plugin's report in full.
func atADD(r *document.Decision) string {
	if r == nil {
		return "not known: the agent has the last calls of the plugin only (istio-cni decisions)"
	}
	text := fmt.Sprintf("%s, because %s (%s), %s, %s", outcome(r.Captured, r.Reason), sidecar.Reason(r.Reason).Sentence(), r.Reason,
		sources[agentapi.Source(r.Source)], moment(r.Time))
	if r.Backend != "" {
		text += "; rules by backend " + backends(r.Backend)
	}
	if r.Detail != "" {
		text += "; " + r.Detail
	}
	if r.Error != "" {
		text += "; failed: " + r.Error
	}
	return text
}

// backends returns the backends of the families, each once.
func backends(list string) string {
	return strings.Join(slices.Compact(strings.Split(list, ",")), ", ")
}

func moment(t time.Time) string { return t.Format(time.RFC3339) }

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
