package podrepair

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// component is the source of the events, as the reference calls it.
const component = "cni-repair"

// EventReason is the reason of an event on a pod.
type EventReason string

// The reasons. Deleted and labelled are the reference's, which has none for the others.
const (
	ReasonDeleted    EventReason = "DeleteBrokenPod"
	ReasonLabelled   EventReason = "LabelBrokenPod"
	ReasonRepaired   EventReason = "RepairBrokenPod"
	ReasonBroken     EventReason = "BrokenPod"
	ReasonDrifted    EventReason = "DriftedPod"
	ReasonUnverified EventReason = "UnverifiedPod"
)

// say makes an event on the pod.
func (j *job) say(ctx context.Context, severity kube.EventType, reason EventReason, message string) {
	facts := j.pod.Facts
	sent, err := j.API.RecordEvent(ctx, kube.Event{
		Object: kube.ObjectRef{Kind: "Pod", APIVersion: "v1", Namespace: facts.Namespace, Name: facts.Name, UID: facts.UID},
		Reason: string(reason), Message: message, Type: severity, Component: component, Host: j.Host,
	})
	switch {
	case err != nil:
		j.Metrics.EventReported(metrics.EventFailed)
		j.log.WarnContext(ctx, "an event was not recorded", slog.String("reason", string(reason)), slog.String("message", message),
			slog.String("error", err.Error()))
	case sent:
		j.Metrics.EventReported(metrics.EventSent)
	default:
		j.Metrics.EventReported(metrics.EventSuppressed)
	}
}

// once makes a warning of which one is enough in the pod's life.
func (j *job) once(ctx context.Context, reason EventReason, message string) {
	topic := string(reason) + " " + string(j.found.Reason)
	if j.memory.told[topic] {
		return
	}
	j.memory.told[topic] = true
	j.log.WarnContext(ctx, "a pod is not as it should be", slog.String("reason", string(j.found.Reason)), slog.String("message", message))
	j.say(ctx, kube.EventWarning, reason, message)
}

// why is the beginning of what is said of a broken pod.
func (j *job) why() string {
	text := "the pod " + j.found.Reason.Sentence()
	if s := j.found.Failed; s != (repair.State{}) {
		text += fmt.Sprintf(" (exit code %d)", s.ExitCode)
	}
	return text + ": it started when the CNI plugin did not take part"
}

// advice is what to do about a broken pod that is not helped.
func (j *job) advice() string {
	_, captured := j.spec()
	switch {
	case j.found.Decision.Outcome == sidecar.Refuse:
		return "Its settings are invalid: mend them and make the pod anew: " + j.found.Decision.Err.Error()
	case j.found.Reason == repair.FailedForGood && j.Settings.Switches.InPlace:
		return "It cannot be redirected in place any more: delete it, so that its owner makes another one"
	case !captured:
		return "The plugin would not redirect it, as " + j.found.Decision.Reason.Sentence()
	case j.Settings.Switches.InPlace && !j.here(j.pod):
		return "It can be redirected in place on its own node alone: delete it, or let the node agent repair pods"
	}
	return "Delete it, so that it starts anew, or switch on the node agent's race repair"
}
