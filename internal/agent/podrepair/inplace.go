package podrepair

import (
	"context"
	"log/slog"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/podnet"
)

// redirect writes the rules into the pod's namespace, as the plugin would have at its start.
func (j *job) redirect(ctx context.Context) error {
	if j.memory.alreadyRepaired(j.found) {
		return nil
	}
	before := j.memory.repairedAt
	var report podnet.Report
	err := j.inside(ctx, func(space podnet.Namespace) (err error) {
		report, err = space.Apply(ctx, j.found.Decision.Spec, podnet.Reconcile)
		return err
	})
	if err != nil {
		j.Metrics.Repaired(metrics.RepairPod, metrics.RepairFail)
		j.event(kube.EventWarning, ReasonRepaired, j.why()+", and cannot be redirected in place: "+cause(ctx, err)+remedy(err)+
			". It is tried again; delete the pod, so that it starts anew, if that goes on")
		return err
	}
	j.memory.repairedAt, j.memory.state = j.Clock.Now(), metrics.PodRedirected
	if len(report.Programs) > 0 {
		j.Metrics.Repaired(metrics.RepairPod, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "redirected the pod in place", slog.String("reason", string(j.found.Reason)),
			slog.String("tools", strings.Join(report.Tools, ",")))
		j.event(kube.EventNormal, ReasonRepaired, j.why()+"; it is redirected now"+j.consequence())
		return nil
	}
	j.Metrics.Repaired(metrics.RepairPod, metrics.RepairSkip)
	j.log.DebugContext(ctx, "the pod's rules were in place already")
	if !before.IsZero() && j.found.SawRules(before) {
		j.event(kube.EventWarning, ReasonRepaired, "the validation fails although the rules are in place: see the log of its "+
			"container, and delete the pod if it goes on")
	}
	return nil
}

// consequence is what the owner of a redirected pod should know.
func (j *job) consequence() string {
	if j.found.Started {
		return ". Connections that it opened before stay outside of the mesh until they are closed: restart the pod to be sure"
	}
	if j.found.FailedAt().IsZero() {
		return ""
	}
	return ". The kubelet starts its validation again within its back-off, 5 minutes at most: delete the pod to have it at once"
}
