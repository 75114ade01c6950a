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
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// setStatus makes the status of the problems.
func (w *work) setStatus(problems []audit.Problem) {
	m, now, state := w.memory, w.Clock.Now(), audit.StateOf(problems)
	since := m.status.Since
	if m.status.State != state {
		since = now
	}
	if state == audit.Captured && now.After(m.repairAfter.Add(calm)) {
		m.repairs = 0
	}
	m.status = audit.Status{
		State: state, Sentence: state.Sentence(), Remedy: w.Remedy(state), Since: since, Checked: now, Problems: problems,
		Backend: m.rules.tools, Exceptions: audit.Exceptions(w.Decision.Spec, sidecar.KeysOf(w.Decision.Spec)),
	}
}

// Remedy returns what to do about a state.
func (a *Auditor) Remedy(s audit.State) string {
	if a.Settings.Observe {
		return s.RemedyBeside()
	}
	return s.Remedy(a.Settings.Repair)
}

// summary is the sentence of the most serious state and its first problem.
func summary(problems []audit.Problem) string {
	state := audit.StateOf(problems)
	for _, p := range problems {
		if p.State == state {
			return state.Sentence() + ": " + p.Detail
		}
	}
	return state.Sentence()
}

// stateReasons are the reasons of the events about a change of a state.
var stateReasons = map[audit.State]kube.EventReason{ //nolint:gochecknoglobals // a constant table
	audit.Bypassed: podwork.ReasonBroken, audit.ForeignRule: podwork.ReasonForeignRule, audit.Drifted: podwork.ReasonDrifted,
	audit.ForeignListener: podwork.ReasonForeignListener, audit.NoListener: podwork.ReasonNoListener,
	audit.UIDCollision: podwork.ReasonUIDCollision, audit.IPv6Open: podwork.ReasonIPv6Open, audit.NotInspected: podwork.ReasonUnverified,
	audit.Captured: podwork.ReasonVerified,
}

// aboutRules are the states that race repair reports as well, for the pods that it works on.
var aboutRules = []audit.State{audit.Bypassed, audit.Drifted, audit.ForeignRule} //nolint:gochecknoglobals // a constant

// reportChange records an event when the state is another one than that of the last event.
func (w *work) reportChange(ctx context.Context) {
	m := w.memory
	now, before := m.status, m.reported
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
	if !w.repair.Broken || !slices.Contains(aboutRules, now.State) { // else race repair records it
		w.Event(kube.EventWarning, stateReasons[now.State], text)
	}
}

// podStates are the states of the gauge of pods that the audit has inspected.
var podStates = map[audit.State]metrics.PodState{ //nolint:gochecknoglobals // a constant table
	audit.Bypassed: metrics.PodBroken, audit.Drifted: metrics.PodDrifted, audit.ForeignRule: metrics.PodDrifted,
	audit.NotInspected: metrics.PodUnknown, audit.ForeignListener: metrics.PodRedirected, audit.NoListener: metrics.PodRedirected, audit.UIDCollision: metrics.PodRedirected,
	audit.IPv6Open: metrics.PodRedirected, audit.Captured: metrics.PodRedirected,
}

// backoffText says when the next repair is, "" if none was tried.
func (w *work) backoffText() string {
	m := w.memory
	if wait := m.repairAfter.Sub(w.Clock.Now()); w.Settings.Repair && m.repairs > 0 && wait > 0 {
		return fmt.Sprintf(". Repair %d did not last: the next one is in %s at the earliest", m.repairs, wait.Round(time.Second))
	}
	return ""
}
