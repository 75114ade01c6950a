package racerepair

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/kube"
)

// maxConditionMessage bounds the message of the condition in bytes.
const maxConditionMessage = 1 << 10

// published is a condition that was written to a version of a pod.
type published struct {
	kube.Condition

	version string
}

// condition returns the condition of a pod with a status: True for a captured pod, Unknown for one that could not be inspected, and
// False for any other. The reason is the state in CamelCase.
func condition(s audit.Status) kube.Condition {
	status := map[audit.State]string{audit.Captured: "True", audit.NotInspected: "Unknown", audit.Outside: "Unknown"}[s.State]
	c := kube.Condition{
		Type: kube.RedirectionVerified, Status: cmp.Or(status, "False"), Reason: camelCase(string(s.State)), Message: "the pod " + s.Sentence,
	}
	if len(s.Problems) > 0 {
		c.Message = "the pod " + summary(s.Problems)
	}
	c.Message = printable.Text(c.Message, maxConditionMessage)
	return c
}

// camelCase converts a state such as "foreign-rule" to a reason of the API. "IPv6" and "UID" keep their letters.
func camelCase(state string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(state, "-") {
		switch word {
		case "ipv6":
			word = "IPv6"
		case "uid":
			word = "UID"
		default:
			word = strings.ToUpper(word[:1]) + word[1:]
		}
		b.WriteString(word)
	}
	return b.String()
}

// publish writes the condition of a pod of the mesh if the pod has another one. A pod outside of the mesh gets none; one that left
// the mesh does not keep its last one.
func (j *job) publish(ctx context.Context) error {
	status, last := j.memory.audited.status, j.memory.published
	if !j.Audit.PodCondition || status.State == "" || status.State == audit.Outside && j.pod.Verified.Type == "" {
		return nil
	}
	want := condition(status)
	if j.pod.Verified.Says(want) || last.version == j.pod.Version && last.Says(want) { // not yet in the watch
		return nil
	}
	err := j.API.SetPodCondition(ctx, j.pod.Ref(), j.pod.Verified, want, j.Clock.Now())
	switch class := kube.ClassOf(err); {
	case err == nil:
		j.memory.published = published{want, j.pod.Version}
		j.unpublished.Store(false)
	case class == kube.NotFound || kube.IsConflict(err): // another pod of the name
	case class == kube.Forbidden:
		if !j.unpublished.Swap(true) {
			j.log.WarnContext(ctx, "the pod condition cannot be published: the account of the node agent lacks the right to patch pods/status",
				slog.String("error", err.Error()))
		}
	default:
		return fmt.Errorf("publishing the pod condition: %w", err)
	}
	return nil
}
