package taint

import "github.com/meshcni/istio-cni/internal/kube"

// Reasons of events.
const (
	eventTainted      = "MeshCNINotReady"
	eventUntainted    = "MeshCNIReady"
	eventRequirements = "InvalidTaintRequirements"
)

// event records an event of the controller.
func (o Options) event(object kube.ObjectRef, kind kube.EventType, reason, message string) {
	o.Events.Record(kube.Event{Object: object, Reason: reason, Message: message, Type: kind, Component: Component, Host: o.Host})
}
