// Package racerepair repairs pods that run without redirection: it redirects them in place, deletes them, labels them or, at
// the least, reports them.
//
// It promises that an action on a pod follows the plugin's own decision about the pod and uses the plugin's own code to write rules;
// that no action reaches a pod with another UID than the classified one; that no agent repeats a finished action; that every action and
// every failure is an Event on the pod and is counted; and that a pod whose namespace is uncertain is left alone. No pod is changed
// while the plugin's configuration cannot be used, because the decision about the pod is unknown.
//
// Start reading at Reconcile. actions.go has the actions, report.go the texts of the events, settings.go the settings.
package racerepair

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// confirmAfter is how long rules must be missing before a pod is deleted or labelled for that alone.
const confirmAfter = 3 * time.Second

// Options are the dependencies and settings. API and Metrics are required.
type Options struct {
	API      *kube.Client
	Metrics  *metrics.Repair
	Settings Settings
	// Audited reports whether an audit reports pods whose rules are wrong or unknown.
	Audited bool
	// Once gives each pod a single turn: nothing is confirmed later, and deletions are not delayed.
	Once bool
}

// Reconciler repairs pods.
type Reconciler struct {
	Options

	selected selector.Pods
	// confirmAfter is 0 for a single turn.
	confirmAfter time.Duration
	// deletions is the token bucket of deletions.
	deletions *rate.Limiter
	// refused is set after the first refusal of a deletion or label beside repair in place. Only the first is logged.
	refused atomic.Bool
}

// New returns a Reconciler. The selectors of the settings must be valid.
func New(o Options) (*Reconciler, error) {
	r := &Reconciler{Options: o, confirmAfter: confirmAfter, deletions: rate.NewLimiter(rate.Every(deletionInterval), deletionBurst)}
	if o.Once {
		r.confirmAfter = 0
		r.deletions.SetLimit(rate.Inf)
	}
	var err error
	r.selected, err = o.Settings.pods()
	return r, err
}

// Selects reports whether the settings select a pod. It does not compare the node.
func (r *Reconciler) Selects(p kube.Pod) bool {
	return r.selected.Matches(p.Facts.Labels, p.Fields())
}

// Memory is race repair's state of a pod between two turns.
type Memory struct {
	// State is the pod's state in the metric, "" if the pod is not counted.
	State metrics.PodState
	// deleted reports that the API server has accepted the deletion.
	deleted bool
	// deleteAfter is the time at which the rate limit allows the deletion, zero before the first reason to delete.
	deleteAfter time.Time
	// repairedAt is the time of the last inspection that found the rules in place, of the last repair, or of the plugin's report.
	repairedAt time.Time
	// byReport is set while repairedAt is the report's time and no inspection has confirmed it; doubted makes reports be ignored.
	byReport, doubted bool
	// missingSince is the time of the first inspection that found no rules.
	missingSince time.Time
	// refusedAt is the time of the last refusal of a deletion or label beside repair in place.
	refusedAt time.Time
	// reported has the topics of the events that once has recorded.
	reported map[string]bool
	// failures is the number of consecutive failed inspections of the namespace.
	failures int
}

// Audit receives the audit's state of the pod. If it contradicts the plugin's report, Audit returns true: the pod needs another turn.
func (m *Memory) Audit(state metrics.PodState) (contradicts bool) {
	if !m.byReport || state == metrics.PodUnknown {
		return false
	}
	m.byReport = false
	if contradicts = state != metrics.PodRedirected; contradicts {
		m.repairedAt, m.doubted = time.Time{}, true
	}
	return contradicts
}

// OtherSandbox resets the fields that describe the pod's network namespace.
func (m *Memory) OtherSandbox() {
	m.doubted, m.byReport = m.doubted || !m.repairedAt.IsZero(), false // a report may be about the previous sandbox
	m.repairedAt, m.missingSince, m.failures = time.Time{}, time.Time{}, 0
}

// Result is the outcome of a turn.
type Result struct {
	// Broken is set if the pod's rules are missing or wrong, which is reported; Acts if race repair also acts on the pod.
	Broken, Acts bool
	// Repaired is set if this turn wrote the rules, or was about to write them and found them in place.
	Repaired bool
}

// work is a turn of a pod.
type work struct {
	*Reconciler
	*podwork.Turn

	memory   *Memory
	finding  repair.Finding
	repaired bool
}

// Reconcile classifies the pod of a turn and takes the due action.
func (r *Reconciler) Reconcile(ctx context.Context, t *podwork.Turn, m *Memory) (Result, error) {
	if m.reported == nil {
		m.reported = map[string]bool{}
	}
	w := &work{Reconciler: r, Turn: t, memory: m}
	err := w.repair(ctx)
	return Result{Broken: w.finding.Broken, Acts: w.finding.Broken && w.mode() != repair.Report, Repaired: w.repaired}, err
}

// repair classifies the pod and takes the due action.
func (w *work) repair(ctx context.Context) (err error) {
	w.finding = repair.Classify(podwork.PodOf(w.Pod), w.Settings.Predicate, w.Conf.Policy())
	w.finding.Repairable = w.finding.Repairable && w.Reachable()
	if w.Conf.Problems != nil && (w.finding.NeedsInspection || w.finding.Broken) {
		return w.reportProblems(ctx)
	}
	if w.finding.NeedsInspection {
		err = w.inspect(ctx)
	}
	w.memory.State = w.state()
	if err == nil && w.finding.Broken {
		return w.act(ctx)
	}
	if err == nil {
		w.memory.missingSince = time.Time{}
	}
	return err
}

// state returns the metric's state of the pod, "" for a pod that is not counted.
func (w *work) state() metrics.PodState {
	if w.finding.Reason == repair.ValidationFailed && w.alreadyRepaired() {
		return metrics.PodRedirected
	}
	return map[repair.Reason]metrics.PodState{
		repair.Proven: metrics.PodRedirected, repair.Redirected: metrics.PodRedirected, repair.RulesDiffer: metrics.PodDrifted,
		repair.ValidationFailed: metrics.PodBroken, repair.FailedForGood: metrics.PodBroken, repair.RulesMissing: metrics.PodBroken,
		repair.Unproven: metrics.PodUnknown,
	}[w.finding.Reason]
}

// alreadyRepaired reports whether the failure is older than the rules; then the next run of the validation decides. The
// kubelet's times have whole seconds.
func (w *work) alreadyRepaired() bool {
	return !w.memory.repairedAt.IsZero() && !w.finding.Failed.Finished.After(w.memory.repairedAt)
}

// reportAfter is the number of consecutive failed inspections after which a pod is reported.
const reportAfter = 4

// inspect completes the finding of an unproven pod from the rules in its namespace.
func (w *work) inspect(ctx context.Context) error {
	if !w.Reachable() {
		w.finding.NeedsInspection, w.finding.Reason = false, repair.NotLookedAt
		return nil
	}
	rules := repair.InPlaceRules
	if w.memory.repairedAt.IsZero() && !w.reported() {
		var err error
		if rules, err = w.compare(ctx); err != nil {
			const unknown = "it is unknown whether the traffic is redirected: "
			switch w.memory.failures++; {
			case w.Audited: // the audit reports it
			case errors.Is(err, redirection.ErrUninspectable): // permanent
				w.once(ctx, podwork.ReasonUnverified, unknown+podwork.Cause(ctx, err))
			case w.memory.failures == reportAfter:
				w.Event(kube.EventWarning, podwork.ReasonUnverified, unknown+podwork.Cause(ctx, err))
			}
			return err
		}
		w.memory.failures = 0
		if rules == repair.InPlaceRules {
			w.memory.repairedAt = w.Clock.Now()
		}
	}
	w.finding = repair.ApplyObservation(w.finding, podwork.PodOf(w.Pod), rules)
	if rules == repair.OtherRules && !w.finding.Broken && !w.Audited {
		w.once(ctx, podwork.ReasonDrifted, "the pod's rules differ from the wanted ones, which apply from its next start")
	}
	return nil
}

// reported accepts the plugin's report that it has redirected the pod instead of a first inspection. This is safe for an audited pod:
// the audit inspects it soon, within its budget, and if it finds another state the pod is inspected here. A failed validation is acted
// on whatever was reported.
func (w *work) reported() bool {
	if !w.Audited || w.memory.doubted || !w.captured() {
		return false
	}
	report, known := w.Report()
	if known = known && report.Captured && report.Error == ""; known {
		w.memory.repairedAt, w.memory.byReport = report.Time, true
	}
	return known
}

// compare reads the rules in the namespace. For a pod that the plugin would refuse, any rules of the mesh are OtherRules.
func (w *work) compare(ctx context.Context) (rules repair.Rules, err error) {
	rules = repair.NoRules
	err = w.InNamespace(ctx, func(space redirection.Namespace) error {
		var mesh bool
		if !w.captured() {
			mesh, err = space.HasRules(ctx)
		} else {
			var report redirection.Report
			if report, err = space.VerifyAny(ctx, w.finding.Decision.Spec); err == nil && report.Clean() {
				rules = repair.InPlaceRules
				return nil
			}
			mesh = report.Mesh
		}
		if mesh {
			rules = repair.OtherRules
		}
		return err
	})
	return rules, err
}

// captured reports whether the plugin would redirect the pod.
func (w *work) captured() bool { return w.finding.Decision.Outcome == sidecar.Capture }
