package podrepair

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
)

// label marks the pod, unless it has the label with whatever value.
func (j *job) label(ctx context.Context) error {
	name := j.Settings.LabelKey
	if _, marked := j.pod.Facts.Labels[name]; marked {
		if !j.memory.told[string(ReasonLabelled)] {
			j.memory.told[string(ReasonLabelled)] = true
			j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSkip)
		}
		return nil
	}
	err := j.API.LabelPod(ctx, j.pod.Ref(), name, j.Settings.LabelValue)
	switch {
	case err == nil:
		j.memory.told[string(ReasonLabelled)] = true
		j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "labelled the pod", slog.String("reason", string(j.found.Reason)), slog.String("label", name))
		j.event(kube.EventWarning, ReasonLabelled, fmt.Sprintf("%s: it is labelled %s=%s. %s", j.why(), name, j.Settings.LabelValue, j.advice()))
		return nil
	case kube.ClassOf(err) == kube.NotFound, kube.IsConflict(err):
		j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairSkip) // it is another pod, or none
		return nil
	}
	j.Metrics.Repaired(metrics.RepairLabel, metrics.RepairFail)
	j.event(kube.EventWarning, ReasonLabelled, j.why()+", and cannot be labelled: "+cause(ctx, err)+remedy(err))
	return err
}
