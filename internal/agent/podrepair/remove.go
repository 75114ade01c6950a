package podrepair

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
)

// remove has the pod deleted as it was judged, by eviction if so configured. One that changed meanwhile is judged again.
func (j *job) remove(ctx context.Context) (time.Duration, error) {
	take := j.API.DeletePod
	if j.Settings.Evict {
		take = j.API.EvictPod
	}
	err := take(ctx, j.pod.Ref())
	switch {
	case err == nil:
		j.Metrics.Repaired(metrics.RepairDelete, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "deleted the pod", slog.String("reason", string(j.found.Reason)), slog.Bool("eviction", j.Settings.Evict))
		j.say(ctx, kube.EventWarning, ReasonDeleted, j.why()+": it is deleted, so that another one starts")
		return 0, nil
	case kube.ClassOf(err) == kube.NotFound:
		j.Metrics.Repaired(metrics.RepairDelete, metrics.RepairSkip)
		return 0, nil
	case kube.IsConflict(err):
		// Its news are on the way here.
		j.log.DebugContext(ctx, "the pod changed before it was deleted", slog.String("error", err.Error()))
		return 0, err
	}
	j.Metrics.Repaired(metrics.RepairDelete, metrics.RepairFail)
	j.say(ctx, kube.EventWarning, ReasonDeleted, j.why()+", and cannot be deleted: "+err.Error()+remedy(err))
	var wait time.Duration
	if failed, ok := errors.AsType[*kube.CallError](err); ok {
		wait = failed.RetryAfter
	}
	return wait, err
}

// remedy is what to do about a call that failed, "" for what ends by itself.
func remedy(err error) string {
	switch {
	case errors.Is(err, kube.ErrDisruptionBudget):
		return ". It is tried again; raise the budget or delete the pod by hand to have it sooner"
	case kube.ClassOf(err) == kube.Forbidden:
		return ". The account of the node agent lacks the permission that its mode of repair needs"
	}
	return ""
}
