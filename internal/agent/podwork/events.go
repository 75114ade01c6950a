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

// component is the source component of the events, the same as in the reference.
const component = "cni-repair"

// The reasons of events on a pod. docs/errors.md has the comments. The reference has only the first two.
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
	// The pod waits to be enrolled in ambient mode (`pending`): the message names the missing step.
	ReasonPending kube.EventReason = "PendingPod"
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
// connections and searched places, are only logged, so that equal failures are one event.
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

// remedy returns the remedy for a failure, "" for a transient failure.
func remedy(err error) string {
	switch {
	case errors.Is(err, kube.ErrDisruptionBudget):
		return ". A PodDisruptionBudget does not allow it yet, so it is retried. Raise the budget or delete the pod by hand to speed it up"
	case kube.ClassOf(err) == kube.Forbidden:
		return ". The account of the node agent lacks a permission that its repair mode needs"
	case errors.Is(err, sandbox.ErrClaimed):
		return ". A node restart took the address from this pod, the primary CNI plugin assigned it twice, or the other pod added it"
	case errors.Is(err, sandbox.ErrAmbiguous), errors.Is(err, sandbox.ErrLoopback):
		return ". A pod that may change its own network can add another pod's address: find out which pod owns the other namespace"
	case errors.Is(err, redirection.ErrUninspectable):
		return ". A container of the pod with the capability NET_ADMIN may be the cause: find out which one, and delete the pod"
	case errors.Is(err, sandbox.ErrNoHost):
		return ". The node agent must see the node's processes: mount the node's /proc at /host/proc"
	}
	return ""
}
