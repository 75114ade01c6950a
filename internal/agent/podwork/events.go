package podwork

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// component is the source component of the events, as in the reference.
const component = "cni-repair"

// EventReason is the reason of an event on a pod.
type EventReason string

// The reasons. The first two are the reference's, which has none for the others.
const (
	ReasonDeleted    EventReason = "DeleteBrokenPod"
	ReasonLabelled   EventReason = "LabelBrokenPod"
	ReasonRepaired   EventReason = "RepairBrokenPod"
	ReasonBroken     EventReason = "BrokenPod"
	ReasonDrifted    EventReason = "DriftedPod"
	ReasonUnverified EventReason = "UnverifiedPod"

	ReasonForeignRule     EventReason = "ForeignRule"
	ReasonForeignListener EventReason = "ForeignListener"
	ReasonNoListener      EventReason = "ProxyNotListening"
	ReasonUIDCollision    EventReason = "ProxyUIDCollision"
	ReasonIPv6Open        EventReason = "IPv6Open"
	ReasonVerified        EventReason = "VerifiedPod"
)

// Event records an event on the pod.
func (t *Turn) Event(severity kube.EventType, reason EventReason, message string) {
	facts := t.Pod.Facts
	t.Events.Record(kube.Event{
		Object: kube.ObjectRef{Kind: "Pod", APIVersion: "v1", Namespace: facts.Namespace, Name: facts.Name, UID: facts.UID},
		Reason: string(reason), Message: message, Type: severity, Component: component, Host: t.Host,
	})
}

// Cause returns the text of an error for an event, with its remedy. Parts that change between two attempts, such as the number of
// connections and searched places, are in the log alone, so that equal failures are one event.
func Cause(ctx context.Context, err error) string { return cause(ctx, err) + remedy(err) }

func cause(ctx context.Context, err error) string {
	if over := context.Cause(ctx); over != nil { // the PodTimeout
		return over.Error()
	}
	if search, ok := errors.AsType[*sandbox.Error](err); ok {
		return "finding the pod's network namespace: " + search.Err.Error()
	}
	if call, ok := errors.AsType[*kube.Error](err); ok {
		text := fmt.Sprintf("the API server was asked to %s %s: %s", call.Verb, call.Object, call.Class)
		if call.Status != 0 {
			text += fmt.Sprintf(" (%d)", call.Status)
		}
		return strings.TrimRight(text+": "+call.Message, ". :")
	}
	return err.Error()
}

// remedy returns an instruction that ends a failure, "" for a transient failure.
func remedy(err error) string {
	switch {
	case errors.Is(err, kube.ErrDisruptionBudget):
		return ". A PodDisruptionBudget does not allow it yet: it is retried; raise the budget or delete the pod by hand to have it sooner"
	case kube.ClassOf(err) == kube.Forbidden:
		return ". The account of the node agent lacks the permission that its mode of repair needs"
	case errors.Is(err, sandbox.ErrClaimed):
		return ". The address is one that its sandbox had before the node was started again, or an error of the primary CNI plugin, or the other pod has added it"
	case errors.Is(err, sandbox.ErrAmbiguous), errors.Is(err, sandbox.ErrLoopback):
		return ". A pod that may change its own network can add an address: see which pod is in the namespace that is not this one's"
	case errors.Is(err, redirection.ErrUninspectable):
		return ". A container of the pod with the capability NET_ADMIN may have filled it: see what wrote them, and delete the pod"
	case errors.Is(err, sandbox.ErrNoHost):
		return ". Let the node agent see the processes of the node: its procfs is expected at /host/proc"
	}
	return ""
}
