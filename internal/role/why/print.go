package why

import (
	"fmt"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/inspect"
)

// maxLine bounds a text of the pod in the page.
const maxLine = 1 << 10

// page is the explanation as text.
func page(e inspect.Explanation) string {
	var b strings.Builder
	line := func(title, format string, args ...any) {
		fmt.Fprintf(&b, "%-11s %s\n", title, printable.Text(fmt.Sprintf(format, args...), maxLine))
	}
	if e.Status.Pod != "" {
		pod(e, line)
	}
	if e.InspectionError != "" {
		line("rules", "not inspected: %s", e.InspectionError)
	}
	for _, l := range e.Listeners {
		line("listener", "%s, user %d", l.Address, l.UID)
	}
	for _, name := range e.Unread {
		line("not read", "%s", name)
	}
	if e.Answer != nil {
		b.WriteString("\n" + answer(e.Answer))
		return b.String()
	}
	for _, c := range e.Chains {
		b.WriteString("\n" + inspect.Text(c))
	}
	return b.String()
}

// pod prints the part that the agent knows.
func pod(e inspect.Explanation, line func(title, format string, args ...any)) {
	line("pod", "%s/%s (UID %s)", e.Namespace, e.Pod, e.UID)
	injected := "the injector has not marked it (annotation sidecar.istio.io/status)"
	if e.Injected {
		injected = "marked by the injector"
	}
	line("injection", "%s", injected)
	outcome := "left alone"
	if e.Decision.Captured {
		outcome = "to be redirected"
	}
	line("decision", "%s: %s (%s) %s", outcome, e.Decision.Sentence, e.Decision.Reason, e.Decision.Detail)
	if !e.Decision.Captured && e.Decision.Remedy != "" {
		line("", "to have it redirected: %s", e.Decision.Remedy)
	}
	if !e.Decision.Captured {
		return
	}
	line("state", "%s: the pod %s", e.State, e.Sentence)
	if !e.Since.IsZero() {
		line("", "since %s, checked %s, rules by %s", e.Since.Format(time.RFC3339), e.Checked.Format(time.RFC3339), e.Backend)
	}
	for _, p := range e.Problems {
		line("problem", "%s: %s", p.State, p.Detail)
	}
	if e.Remedy != "" {
		line("remedy", "%s", e.Remedy)
	}
	for _, x := range e.Exceptions {
		line("exception", "%s=%s: %s", x.Setting, x.Value, x.Traffic)
	}
}

// answer prints the way of a packet: the rules that match or may match, and the sentence.
func answer(a *inspect.Answer) string {
	var b strings.Builder
	for _, h := range a.Hops {
		sign := map[string]string{"matched": "→", "unknown": "?"}[h.Answer]
		if sign == "" {
			continue
		}
		fmt.Fprintf(&b, "%s %s %s/%s: %s", sign, h.Hook, h.Table, printable.Text(h.Chain, maxLine), printable.Text(h.Rule, maxLine))
		if h.Why != "" {
			fmt.Fprintf(&b, "    # %s", h.Why)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nthe packet %s\n", a.Sentence)
	return b.String()
}
