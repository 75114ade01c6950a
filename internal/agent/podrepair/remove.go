package podrepair

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
)

// maxRetryAfter is for how long a server can make a pod wait.
const maxRetryAfter = 5 * time.Minute

// Bounds of deletions, removalBurst at once and one in each removalInterval after that: where every new pod is broken as well, because somebody keeps the plugin out of the chain, to delete at full
// speed would only make more of them.
const (
	removalBurst    = 30
	removalInterval = 2 * time.Second
)

// remove has the pod deleted as it was judged, by eviction if so configured. One that changed meanwhile is judged again.
func (j *job) remove(ctx context.Context) (time.Duration, error) {
	now := j.Clock.Now()
	if j.memory.deleteAfter.IsZero() {
		j.memory.deleteAfter = now.Add(j.removals.ReserveN(now, 1).DelayFrom(now))
	}
	if j.memory.deleteAfter.After(now) {
		j.queue.AddAfter(j.pod.Key(), j.memory.deleteAfter.Sub(now))
		return 0, nil
	}
	take := j.API.DeletePod
	if j.Settings.Evict {
		take = j.API.EvictPod
	}
	err := take(ctx, j.pod.Ref())
	switch {
	case err == nil:
		j.memory.removed = true
		j.Metrics.Repaired(metrics.RepairDelete, metrics.RepairSuccess)
		j.log.InfoContext(ctx, "deleted the pod", slog.String("reason", string(j.found.Reason)), slog.Bool("eviction", j.Settings.Evict))
		j.event(kube.EventWarning, ReasonDeleted, j.why()+": it is deleted, so that another one starts")
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
	j.event(kube.EventWarning, ReasonDeleted, j.why()+", and cannot be deleted: "+cause(ctx, err)+remedy(err))
	var wait time.Duration
	if failed, ok := errors.AsType[*kube.Error](err); ok {
		wait = min(failed.RetryAfter, maxRetryAfter)
	}
	return wait, err
}
