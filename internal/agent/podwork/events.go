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

// The reasons of events on a pod. docs/errors.md has the comments. The first two are the reference's, which has none for the
// others.
const (
	// Race repair deleted or evicted the pod, which bypassed the mesh; or the API server refused that.
	ReasonDeleted kube.EventReason = "DeleteBrokenPod"
	// Race repair labelled the pod, which bypasses the mesh; or the API server refused that.
	ReasonLabelled kube.EventReason = "LabelBrokenPod"
	// Normal: the rules were written into the running pod. Warning: they could not be written, or did not help; delete the pod if the
	// event is repeated.
	ReasonRepaired kube.EventReason = "RepairBrokenPod"
	// The pod bypasses the mesh: `istio-validation` failed, or the network namespace has no rules (`bypassed`). The message says why
	// nothing was done.
	ReasonBroken kube.EventReason = "BrokenPod"
	// The pod has other rules than the wanted ones (`drifted`): restart it.
	ReasonDrifted kube.EventReason = "DriftedPod"
	// The network namespace could not be found or read (`not-inspected`).
	ReasonUnverified kube.EventReason = "UnverifiedPod"

	// Another program's rule takes traffic of the pod (`foreign-rule`).
	ReasonForeignRule kube.EventReason = "ForeignRule"
	// Another process listens on a port of the proxy (`foreign-listener`).
	ReasonForeignListener kube.EventReason = "ForeignListener"
	// Traffic is redirected to a port on which nothing listens (`no-listener`).
	ReasonNoListener kube.EventReason = "ProxyNotListening"
	// A process of another container runs with the user or group of the proxy (`uid-collision`).
	ReasonUIDCollision kube.EventReason = "ProxyUIDCollision"
	// The pod runs in a sandbox that the node does not see into (`sandboxed`).
	ReasonSandboxed kube.EventReason = "SandboxedPod"
	// IPv6 traffic of the pod bypasses the proxy (`ipv6-open`).
	ReasonIPv6Open kube.EventReason = "IPv6Open"
	// Normal: the pod is captured again.
	ReasonVerified kube.EventReason = "VerifiedPod"
)

// Event records an event on the pod.
func (t *Turn) Event(severity kube.EventType, reason kube.EventReason, message string) {
	facts := t.Pod.Facts
	t.Events.Record(kube.Event{
		Object: kube.ObjectRef{Kind: "Pod", APIVersion: "v1", Namespace: facts.Namespace, Name: facts.Name, UID: facts.UID},
		Reason: reason, Message: message, Type: severity, Component: component, Host: t.Host,
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
