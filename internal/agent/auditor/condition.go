package auditor

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/kube"
)

// maxConditionMessage bounds the message of the condition in bytes.
const maxConditionMessage = 1 << 10

// published is a condition and the version of the pod it was written to.
type published struct {
	kube.Condition

	version string
}

// condition returns the condition for a status: True for a captured pod; Unknown for a pod that is outside, sandboxed or not
// inspected; otherwise False. The reason is the state in CamelCase.
func condition(s audit.Status) kube.Condition {
	of := states[s.State]
	c := kube.Condition{Type: kube.RedirectionVerified, Status: of.status, Reason: of.reason, Message: "the pod " + s.Sentence}
	if len(s.Problems) > 0 {
		c.Message = "the pod " + summary(s.Problems)
	}
	c.Message = printable.Text(c.Message, maxConditionMessage)
	return c
}

// publish writes the condition of a mesh pod if it has changed. A pod outside the mesh gets a condition only to replace an earlier
// one.
func (w *work) publish(ctx context.Context) error {
	status, last := w.memory.status, w.memory.published
	if !w.Settings.PodCondition || status.State == "" || status.State == audit.Outside && w.Pod.Verified.Type == "" {
		return nil
	}
	want := condition(status)
	if w.Pod.Verified.Says(want) || last.version == w.Pod.Version && last.Says(want) { // not yet in the watch
		return nil
	}
	err := w.API.SetPodCondition(ctx, w.Pod.Ref(), w.Pod.Verified, want, w.Clock.Now())
	switch class := kube.ClassOf(err); {
	case err == nil:
		w.memory.published = published{want, w.Pod.Version}
		w.unpublished.Store(false)
	case class == kube.NotFound || kube.IsConflict(err): // a new pod with the same name
	case class == kube.Forbidden:
		if !w.unpublished.Swap(true) {
			w.Log.WarnContext(ctx, "the pod condition cannot be published: the account of the node agent lacks the right to patch pods/status",
				slog.String("error", err.Error()))
		}
	default:
		return fmt.Errorf("publishing the pod condition: %w", err)
	}
	return nil
}
