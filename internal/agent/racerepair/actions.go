package racerepair

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// act takes the first enabled action that can help.
func (w *work) act(ctx context.Context) error {
	mode := w.mode()
	if mode != repair.InPlace && w.finding.Failed == (repair.State{}) && !w.confirmed() {
		return nil
	}
	switch mode {
	case repair.InPlace:
		return w.redirect(ctx)
	case repair.Delete:
		return w.deletePod(ctx)
	case repair.Label:
		return w.label(ctx)
	case repair.Report:
	}
	w.once(ctx, podwork.ReasonBroken, w.why()+". "+w.advice())
	return nil
}

// mode returns the first mode that is enabled, allowed and can help.
func (w *work) mode() repair.Mode {
	mode := w.Settings.Switches.Mode(w.finding)
	if mode != repair.InPlace && w.Clock.Since(w.memory.refusedAt) < refusedFor {
		return repair.Report
	}
	return mode
}

// confirmed reports whether the rules have been missing for confirmAfter. A pod without another sign of failure is
// inspected twice before it is deleted or labelled.
func (w *work) confirmed() bool {
	now := w.Clock.Now()
	if w.memory.missingSince.IsZero() {
		w.memory.missingSince = now
	}
	due := w.memory.missingSince.Add(w.confirmAfter)
	if due.After(now) {
		w.Again(due.Sub(now))
		return false
	}
	return true
}

// redirect writes the rules into the pod's namespace, as the plugin would have written them at the pod's start.
func (w *work) redirect(ctx context.Context) error {
	if w.alreadyRepaired() {
		return nil
	}
	before := w.memory.repairedAt
	var report redirection.Report
	err := w.InNamespace(ctx, func(space redirection.Namespace) (err error) {
		report, err = space.Apply(ctx, w.finding.Decision.Spec, redirection.Reconcile)
		return err
	})
	if err != nil {
		w.Metrics.Repaired(metrics.RepairPod, metrics.RepairFail)
		w.Event(kube.EventWarning, podwork.ReasonRepaired, w.why()+", and cannot be redirected in place: "+podwork.Cause(ctx, err)+
			". The repair is retried; if it keeps failing, delete the pod, so that it starts anew")
		return err
	}
	w.memory.repairedAt, w.memory.State = w.Clock.Now(), metrics.PodRedirected
	w.repaired = true
	if len(report.Programs) > 0 {
		w.Metrics.Repaired(metrics.RepairPod, metrics.RepairSuccess)
		w.Log.InfoContext(ctx, "redirected the pod in place", slog.String("reason", string(w.finding.Reason)),
			slog.String("tools", strings.Join(report.Tools, ",")))
		w.Event(kube.EventNormal, podwork.ReasonRepaired, w.why()+"; it is redirected now"+w.consequence())
		return nil
	}
	w.Metrics.Repaired(metrics.RepairPod, metrics.RepairSkip)
	w.Log.DebugContext(ctx, "the pod's rules were in place already")
	if !before.IsZero() && w.finding.SawRules(before) {
		w.Event(kube.EventWarning, podwork.ReasonRepaired, "the validation fails although the rules are in place: see the log of its "+
			"container, and delete the pod if it keeps failing")
	}
	return nil
}

// consequence returns a sentence for the owner of a redirected pod, "" for a pod without consequences.
func (w *work) consequence() string {
	if w.finding.Started {
		return ". Connections that it opened before stay outside of the mesh until they are closed: restart the pod to be sure"
	}
	if w.finding.Failed.Finished.IsZero() {
		return ""
	}
	return ". The kubelet starts its validation again within its back-off, 5 minutes at most: delete the pod to speed this up"
}

// The token bucket of deletions: deletionBurst at once, then one per deletionInterval. While the plugin is missing from the
// chain every new pod is broken too, and faster deletions would only create more broken pods.
const (
	deletionBurst    = 30
	deletionInterval = 2 * time.Second
)

// deletePod deletes the classified version of the pod (resourceVersion precondition), by eviction if configured. A pod that
// changed meanwhile is classified again.
func (w *work) deletePod(ctx context.Context) error {
	if w.memory.deleted { // an eviction updates the pod before its deletion
		return nil
	}
	now := w.Clock.Now()
	if w.memory.deleteAfter.IsZero() {
		w.memory.deleteAfter = now.Add(w.deletions.ReserveN(now, 1).DelayFrom(now))
	}
	if w.memory.deleteAfter.After(now) {
		w.Again(w.memory.deleteAfter.Sub(now))
		return nil
	}
	send := w.API.DeletePod
	if w.Settings.Evict {
		send = w.API.EvictPod
	}
	err := send(ctx, w.Pod.Ref())
	if kube.IsConflict(err) { // the watch delivers the change
		w.Log.DebugContext(ctx, "the pod changed before it was deleted", slog.String("error", err.Error()))
		return err
	}
	if err == nil {
		w.memory.deleted = true
		w.Metrics.Repaired(metrics.RepairDelete, metrics.RepairSuccess)
		w.Log.InfoContext(ctx, "deleted the pod", slog.String("reason", string(w.finding.Reason)), slog.Bool("eviction", w.Settings.Evict))
		w.Event(kube.EventWarning, podwork.ReasonDeleted, w.why()+": it is deleted, so that a new one starts")
	}
	return w.fail(ctx, metrics.RepairDelete, podwork.ReasonDeleted, ", and cannot be deleted: ", err)
}

// label labels the pod, unless the pod has the label with any value.
func (w *work) label(ctx context.Context) error {
	name := w.Settings.LabelKey
	if _, labelled := w.Pod.Facts.Labels[name]; labelled {
		if !w.memory.reported[string(podwork.ReasonLabelled)] {
			w.memory.reported[string(podwork.ReasonLabelled)] = true
			w.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSkip)
		}
		return nil
	}
	err := w.API.LabelPod(ctx, w.Pod.Ref(), name, w.Settings.LabelValue)
	if err == nil {
		w.memory.reported[string(podwork.ReasonLabelled)] = true
		w.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSuccess)
		w.Log.InfoContext(ctx, "labelled the pod", slog.String("reason", string(w.finding.Reason)), slog.String("label", name))
		w.Event(kube.EventWarning, podwork.ReasonLabelled, fmt.Sprintf("%s: it is labelled %s=%s. %s", w.why(), name, w.Settings.LabelValue, w.advice()))
	}
	return w.fail(ctx, metrics.RepairLabel, podwork.ReasonLabelled, ", and cannot be labelled: ", err)
}

// refusedFor is the pause after a refused deletion or label beside repair in place: a chart may grant neither right there, because the
// reference has both only without repair in place.
const refusedFor = time.Hour

// fail counts and reports the error of an action, if any. A pod that is gone or replaced is not a failure.
func (w *work) fail(ctx context.Context, t metrics.RepairType, reason kube.EventReason, what string, err error) error {
	if err == nil {
		return nil
	}
	if kube.ClassOf(err) == kube.NotFound || kube.IsConflict(err) {
		w.Metrics.Repaired(t, metrics.RepairSkip)
		return nil
	}
	w.Metrics.Repaired(t, metrics.RepairFail)
	if kube.ClassOf(err) == kube.Forbidden && w.Settings.Switches.InPlace {
		w.memory.refusedAt = w.Clock.Now()
		if !w.refused.Swap(true) {
			w.Env.Log.InfoContext(ctx, "broken pods that cannot be redirected in place are only reported: the agent has no right to delete or label them",
				slog.String("error", err.Error()))
		}
		w.once(ctx, podwork.ReasonBroken, w.why()+". "+w.advice())
		return nil
	}
	w.Event(kube.EventWarning, reason, w.why()+what+podwork.Cause(ctx, err))
	return err
}

// reportProblems reports a pod without a repair because the plugin's configuration has problems: its excluded namespaces may be
// among the unreadable parts, and a recreated pod would not start.
func (w *work) reportProblems(ctx context.Context) error {
	text := w.Conf.Problems.Error() + ". Correct the configuration of the node agent"
	w.memory.State = w.state()
	if w.finding.Broken {
		w.Metrics.Repaired(metrics.RepairType(w.mode()), metrics.RepairFail) // Report is not counted
		w.once(ctx, podwork.ReasonBroken, w.why()+". It is left alone while the plugin's configuration cannot be used: "+text)
	} else {
		w.once(ctx, podwork.ReasonUnverified, "it is unknown whether the traffic is redirected while the plugin's configuration cannot be used: "+text)
	}
	return fmt.Errorf("%w: %w", podwork.ErrPolicy, w.Conf.Problems)
}
