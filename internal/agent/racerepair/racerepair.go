// Package racerepair repairs pods that run without redirection: it redirects them in place, deletes them, labels them or, at
// the least, reports them.
//
// It promises that an action on a pod rests on the plugin's own decision about the pod and uses the plugin's own code to write
// rules; that no action reaches a pod of another UID than the classified one; that a finished action is not repeated, also by
// the next agent; that every action and every failure is an Event on the pod and a count; and that a pod whose namespace is not
// certain is not touched. While the plugin's configuration cannot be used no pod is changed: the decision about the pod is unknown then.
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

// confirmAfter is the time for which a pod must be without rules before it is deleted or labelled for that alone.
const confirmAfter = 3 * time.Second

// Options are the dependencies and settings. API and Metrics are required.
type Options struct {
	API      *kube.Client
	Metrics  *metrics.Repair
	Settings Settings
	// Audited reports whether an audit reports pods whose rules are wrong or unknown.
	Audited bool
	// Once is for a single turn of each pod: it confirms nothing later and does not delay deletions.
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
	// refused is set after the first refusal of a deletion or label beside repair in place, which alone is logged.
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

// Selects reports whether the settings select a pod of their node.
func (r *Reconciler) Selects(p kube.Pod) bool {
	return r.selected.Matches(p.Facts.Labels, p.Fields())
}

// Memory is what is known of a pod between two turns.
type Memory struct {
	// State is the pod's for the metric, "" if it is not counted.
	State metrics.PodState
	// deleted reports that the API server has accepted the deletion.
	deleted bool
	// deleteAfter is the time at which the rate limit allows the deletion, zero before the first reason to delete.
	deleteAfter time.Time
	// repairedAt is the time of the last inspection that found the rules in place, or of the last repair.
	repairedAt time.Time
	// missingSince is the time of the first inspection that found no rules.
	missingSince time.Time
	// refusedAt is the time of the last refusal of a deletion or label beside repair in place.
	refusedAt time.Time
	// reported has the topics of the events that are recorded once.
	reported map[string]bool
	// failures is the number of consecutive failed inspections of the namespace.
	failures int
}

// OtherSandbox resets what describes the pod's network namespace.
func (m *Memory) OtherSandbox() {
	m.repairedAt, m.missingSince, m.failures = time.Time{}, time.Time{}, 0
}

// Result is what others need to know of a turn.
type Result struct {
	// Broken reports whether the pod's rules are missing or wrong, which is reported; Acts whether something is done about it.
	Broken, Acts bool
	// Repaired reports whether the rules of the pod were written in this turn, or were found to be in place when they were to be.
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

// Reconcile classifies the pod of a turn and performs the due action.
func (r *Reconciler) Reconcile(ctx context.Context, t *podwork.Turn, m *Memory) (Result, error) {
	if m.reported == nil {
		m.reported = map[string]bool{}
	}
	w := &work{Reconciler: r, Turn: t, memory: m}
	err := w.repair(ctx)
	return Result{Broken: w.finding.Broken, Acts: w.finding.Broken && w.mode() != repair.Report, Repaired: w.repaired}, err
}

// repair classifies the pod and performs the due action.
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

// alreadyRepaired reports whether the failure is older than the rules, so that the next run of the validation decides. The
// kubelet's times have whole seconds.
func (w *work) alreadyRepaired() bool {
	return !w.memory.repairedAt.IsZero() && !w.finding.Failed.Finished.After(w.memory.repairedAt)
}

// reportAfter is the number of consecutive failed inspections after which a pod is reported.
const reportAfter = 4

// inspect completes the finding by the rules in the namespace of an unproven pod.
func (w *work) inspect(ctx context.Context) error {
	if !w.Reachable() {
		w.finding.NeedsInspection, w.finding.Reason = false, repair.NotLookedAt
		return nil
	}
	rules := repair.InPlaceRules
	if w.memory.repairedAt.IsZero() {
		var err error
		if rules, err = w.compare(ctx); err != nil {
			const unknown = "it is unknown whether the traffic is redirected: "
			switch w.memory.failures++; {
			case w.Audited: // which reports it
			case errors.Is(err, redirection.ErrUninspectable): // which is permanent
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
		w.once(ctx, podwork.ReasonDrifted, "the pod runs with other rules than the current ones, which apply from its next start on")
	}
	return nil
}

// compare reads the rules in the namespace. If the plugin would refuse the pod, any rules of the mesh are other rules.
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
