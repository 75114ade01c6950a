package racerepair

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// act performs the first enabled action that can help.
func (j *job) act(ctx context.Context) error {
	mode := j.mode()
	if mode != repair.InPlace && j.finding.Failed == (repair.State{}) && !j.confirmed() {
		return nil
	}
	switch mode {
	case repair.InPlace:
		return j.redirect(ctx)
	case repair.Delete:
		return j.deletePod(ctx)
	case repair.Label:
		return j.label(ctx)
	case repair.Report:
	}
	j.once(ctx, ReasonBroken, j.why()+". "+j.advice())
	return nil
}

// mode returns the first mode that is switched on, can help and is allowed.
func (j *job) mode() repair.Mode {
	mode := j.Settings.Switches.Mode(j.finding)
	if mode != repair.InPlace && j.Clock.Since(j.memory.refusedAt) < refusedFor {
		return repair.Report
	}
	return mode
}

// confirmed reports whether the rules have been missing for confirmAfter. A pod with no other sign of failure is inspected
// twice before it is deleted or labelled.
func (j *job) confirmed() bool {
	now := j.Clock.Now()
	if j.memory.missingSince.IsZero() {
		j.memory.missingSince = now
	}
	due := j.memory.missingSince.Add(j.confirmAfter)
	if due.After(now) {
		j.queue.AddAfter(j.pod.Key(), due.Sub(now))
		return false
	}
	return true
}

// redirect writes the rules into the pod's namespace, as the plugin would have written them at the pod's start.
func (j *job) redirect(ctx context.Context) error {
	if j.alreadyRepaired() {
		return nil
	}
	before := j.memory.repairedAt
	var report redirection.Report
	err := j.inNamespace(ctx, func(space redirection.Namespace) (err error) {
		report, err = space.Apply(ctx, j.finding.Decision.Spec, redirection.Reconcile)
		return err
	})
	if err != nil {
		j.Metrics.Repaired(metrics.RepairPod, metrics.RepairFail)
		j.event(kube.EventWarning, ReasonRepaired, j.why()+", and cannot be redirected in place: "+cause(ctx, err)+remedy(err)+
			". It is tried again; delete the pod, so that it starts anew, if that goes on")
		return err
	}
	j.memory.repairedAt, j.memory.state = j.Clock.Now(), metrics.PodRedirected
	j.memory.audited.due, j.memory.audited.reported = j.Clock.Now(), audit.Captured
	if len(report.Programs) > 0 {
		j.Metrics.Repaired(metrics.RepairPod, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "redirected the pod in place", slog.String("reason", string(j.finding.Reason)),
			slog.String("tools", strings.Join(report.Tools, ",")))
		j.event(kube.EventNormal, ReasonRepaired, j.why()+"; it is redirected now"+j.consequence())
		return nil
	}
	j.Metrics.Repaired(metrics.RepairPod, metrics.RepairSkip)
	j.log.DebugContext(ctx, "the pod's rules were in place already")
	if !before.IsZero() && j.finding.SawRules(before) {
		j.event(kube.EventWarning, ReasonRepaired, "the validation fails although the rules are in place: see the log of its "+
			"container, and delete the pod if it goes on")
	}
	return nil
}

// consequence returns a sentence for the owner of a redirected pod, "" for a pod without consequences.
func (j *job) consequence() string {
	if j.finding.Started {
		return ". Connections that it opened before stay outside of the mesh until they are closed: restart the pod to be sure"
	}
	if j.finding.Failed.Finished.IsZero() {
		return ""
	}
	return ". The kubelet starts its validation again within its back-off, 5 minutes at most: delete the pod to have it at once"
}

// The token bucket of deletions: deletionBurst at once and one in each deletionInterval after that. If every new pod is broken
// as well, because the plugin is not in the chain, deletions at full speed would only create more broken pods.
const (
	deletionBurst    = 30
	deletionInterval = 2 * time.Second
)

// deletePod deletes the pod at its classified version (resourceVersion precondition), by eviction if so configured. A pod that
// changed meanwhile is classified again.
func (j *job) deletePod(ctx context.Context) error {
	if j.memory.deleted { // an eviction updates the pod before its deletion
		return nil
	}
	now := j.Clock.Now()
	if j.memory.deleteAfter.IsZero() {
		j.memory.deleteAfter = now.Add(j.deletions.ReserveN(now, 1).DelayFrom(now))
	}
	if j.memory.deleteAfter.After(now) {
		j.queue.AddAfter(j.pod.Key(), j.memory.deleteAfter.Sub(now))
		return nil
	}
	send := j.API.DeletePod
	if j.Settings.Evict {
		send = j.API.EvictPod
	}
	err := send(ctx, j.pod.Ref())
	if kube.IsConflict(err) { // the watch delivers the change
		j.log.DebugContext(ctx, "the pod changed before it was deleted", slog.String("error", err.Error()))
		return err
	}
	if err == nil {
		j.memory.deleted = true
		j.Metrics.Repaired(metrics.RepairDelete, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "deleted the pod", slog.String("reason", string(j.finding.Reason)), slog.Bool("eviction", j.Settings.Evict))
		j.event(kube.EventWarning, ReasonDeleted, j.why()+": it is deleted, so that another one starts")
	}
	return j.fail(ctx, metrics.RepairDelete, ReasonDeleted, ", and cannot be deleted: ", err)
}

// label labels the pod, unless the pod has the label with any value.
func (j *job) label(ctx context.Context) error {
	name := j.Settings.LabelKey
	if _, labelled := j.pod.Facts.Labels[name]; labelled {
		if !j.memory.reported[string(ReasonLabelled)] {
			j.memory.reported[string(ReasonLabelled)] = true
			j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSkip)
		}
		return nil
	}
	err := j.API.LabelPod(ctx, j.pod.Ref(), name, j.Settings.LabelValue)
	if err == nil {
		j.memory.reported[string(ReasonLabelled)] = true
		j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "labelled the pod", slog.String("reason", string(j.finding.Reason)), slog.String("label", name))
		j.event(kube.EventWarning, ReasonLabelled, fmt.Sprintf("%s: it is labelled %s=%s. %s", j.why(), name, j.Settings.LabelValue, j.advice()))
	}
	return j.fail(ctx, metrics.RepairLabel, ReasonLabelled, ", and cannot be labelled: ", err)
}

// refusedFor is the time for which the deletion or label of a pod is not requested after a refusal beside repair in place: a chart may
// give no right to them there, as the reference has them only without repair in place.
const refusedFor = time.Hour

// fail counts and reports the error of an action, if any. A pod that is gone, or replaced by another one, is no failure.
func (j *job) fail(ctx context.Context, t metrics.RepairType, reason kube.EventReason, what string, err error) error {
	if err == nil {
		return nil
	}
	if kube.ClassOf(err) == kube.NotFound || kube.IsConflict(err) {
		j.Metrics.Repaired(t, metrics.RepairSkip)
		return nil
	}
	j.Metrics.Repaired(t, metrics.RepairFail)
	if kube.ClassOf(err) == kube.Forbidden && j.Settings.Switches.InPlace {
		j.memory.refusedAt = j.Clock.Now()
		if !j.refused.Swap(true) {
			j.Log.InfoContext(ctx, "broken pods that cannot be redirected in place are only reported: the agent has no right to delete or label them",
				slog.String("error", err.Error()))
		}
		j.once(ctx, ReasonBroken, j.why()+". "+j.advice())
		return nil
	}
	j.event(kube.EventWarning, reason, j.why()+what+cause(ctx, err)+remedy(err))
	return err
}

// reportProblems reports a pod without a repair because the plugin's configuration has problems: its excluded namespaces may be
// among the unreadable parts, and a recreated pod would not start.
func (j *job) reportProblems(ctx context.Context) error {
	text := j.conf.Problems.Error() + ". Correct the configuration of the node agent"
	j.memory.state = j.state()
	if j.finding.Broken {
		j.Metrics.Repaired(metrics.RepairType(j.mode()), metrics.RepairFail) // Report is not counted
		j.once(ctx, ReasonBroken, j.why()+". Nothing is done about it while the plugin's configuration cannot be used: "+text)
	} else {
		j.once(ctx, ReasonUnverified, "it is unknown whether the traffic is redirected while the plugin's configuration cannot be used: "+text)
	}
	return fmt.Errorf("%w: %w", errPolicy, j.conf.Problems)
}
