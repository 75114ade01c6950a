package auditor

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/kube"
)

// setStatus sets the status from the problems. A pending pod is inspected again soon.
func (w *work) setStatus(problems []audit.Problem) {
	m, now, state := w.memory, w.Clock.Now(), audit.StateOf(problems)
	since := m.status.Since
	if m.status.State != state {
		since = now
	}
	switch {
	case state == audit.Captured && now.After(m.repairAfter.Add(calm)):
		m.repairs = 0
	case state == audit.Pending:
		m.due = now.Add(confirmation)
	}
	remedy := w.Remedy(state)
	if state == audit.Sandboxed {
		remedy = w.Decision.Sandbox.Remedy()
	}
	m.status = audit.Status{
		State: state, Sentence: state.Sentence(), Remedy: remedy, Since: since, Checked: now, Problems: problems,
		Backend: m.rules.tools, Exceptions: audit.Exceptions(w.Decision.Wanted()),
	}
}

// Remedy returns the remedy for a state.
func (a *Auditor) Remedy(s audit.State) string {
	if a.Settings.Observe {
		return s.RemedyBeside()
	}
	return s.Remedy(a.Settings.Repair)
}

// summary returns the sentence of the most serious state with the detail of its first problem.
func summary(problems []audit.Problem) string {
	state := audit.StateOf(problems)
	for _, p := range problems {
		if p.State == state {
			return state.Sentence() + ": " + p.Detail
		}
	}
	return state.Sentence()
}

// states has what users see of each state: its event, its state in the gauge, and the status and reason of the pod condition.
var states = map[audit.State]struct { //nolint:gochecknoglobals // a constant table
	event          kube.EventReason
	gauge          metrics.PodState
	status, reason string
}{
	audit.Bypassed:        {podwork.ReasonBroken, metrics.PodBroken, "False", "Bypassed"},
	audit.ForeignRule:     {podwork.ReasonForeignRule, metrics.PodDrifted, "False", "ForeignRule"},
	audit.Drifted:         {podwork.ReasonDrifted, metrics.PodDrifted, "False", "Drifted"},
	audit.ForeignListener: {podwork.ReasonForeignListener, metrics.PodRedirected, "False", "ForeignListener"},
	audit.NoListener:      {podwork.ReasonNoListener, metrics.PodRedirected, "False", "NoListener"},
	audit.Pending:         {podwork.ReasonPending, metrics.PodBroken, "False", "Pending"},
	audit.UIDCollision:    {podwork.ReasonUIDCollision, metrics.PodRedirected, "False", "UIDCollision"},
	audit.IPv6Open:        {podwork.ReasonIPv6Open, metrics.PodRedirected, "False", "IPv6Open"},
	audit.Sandboxed:       {podwork.ReasonSandboxed, metrics.PodUnknown, "Unknown", "Sandboxed"},
	audit.NotInspected:    {podwork.ReasonUnverified, metrics.PodUnknown, "Unknown", "NotInspected"},
	audit.Captured:        {podwork.ReasonVerified, metrics.PodRedirected, "True", "Captured"},
	audit.Outside:         {"", "", "Unknown", "Outside"},
}

// aboutRules are the states that race repair also reports for the pods it repairs.
var aboutRules = []audit.State{audit.Bypassed, audit.Drifted, audit.ForeignRule} //nolint:gochecknoglobals // a constant

// reportChange records an event when the state differs from the last event's. It waits for the usual end of an enrolment.
func (w *work) reportChange(ctx context.Context) {
	m := w.memory
	now, before := m.status, m.reported
	if now.State == audit.Pending && w.Clock.Since(now.Since) < confirmation {
		return
	}
	m.reported = now.State
	if now.State == before || now.State == audit.Captured && before == "" {
		return
	}
	if now.State == audit.Captured {
		w.Event(kube.EventNormal, podwork.ReasonVerified, "the pod "+now.Sentence+" again")
		return
	}
	text := "the pod " + summary(now.Problems) + ". Remedy: " + now.Remedy + w.backoffText()
	w.Log.WarnContext(ctx, "the audit found a problem", slog.String("state", string(now.State)), slog.String("message", text))
	if !w.repair.Broken || !slices.Contains(aboutRules, now.State) { // otherwise race repair records it
		w.Event(kube.EventWarning, states[now.State].event, text)
	}
}

// backoffText returns a sentence about the next repair, "" if no repair was tried.
func (w *work) backoffText() string {
	m := w.memory
	if wait := m.repairAfter.Sub(w.Clock.Now()); w.Settings.Repair && m.repairs > 0 && wait > 0 {
		return fmt.Sprintf(". Repair %d did not last: the next one is in %s at the earliest", m.repairs, wait.Round(time.Second))
	}
	return ""
}
