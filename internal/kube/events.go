package kube

import (
	"cmp"
	"context"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// EventType is the severity of an event.
type EventType string

// The types that the API server accepts.
const (
	EventNormal  EventType = "Normal"
	EventWarning EventType = "Warning"
)

// EventReason is the reason of an event, one CamelCase word. The set is closed: docs/errors.md has the comment of each constant.
type EventReason string

// ObjectRef identifies the object of an event.
type ObjectRef struct {
	// Namespace is empty for an object without one.
	Kind, Namespace, Name, UID, APIVersion string
}

// NodeRef returns a reference to a node for an event. Its UID is the node's name, as in the kubelet's events: "kubectl describe
// node" selects by it.
func NodeRef(name string) ObjectRef {
	return ObjectRef{Kind: "Node", Name: name, UID: name, APIVersion: "v1"}
}

// Event is a Kubernetes Event, which users see in "kubectl describe" of the object and in "kubectl get events".
type Event struct {
	Object ObjectRef
	Reason EventReason
	// Message is a sentence of at most 1024 bytes.
	Message string
	Type    EventType
	// Component is the reporting program, Host the node that it runs on.
	Component, Host string
}

// EventSeries is an event with its count. It is one object of the API.
type EventSeries struct {
	Event

	// Name is the name of the Event object.
	Name        string
	Count       int
	First, Last time.Time
}

// namespace returns the object's namespace, or default, the only one that the API server allows for a cluster-scoped object.
func (s EventSeries) namespace() string { return cmp.Or(s.Object.Namespace, metav1.NamespaceDefault) }

// CreateEvent creates a v1 Event. A 409 is a success: an earlier attempt created the Event but lost the response.
func (c *Client) CreateEvent(ctx context.Context, s EventSeries) error {
	err := c.act(ctx, &call{verb: "create", resource: events(), namespace: s.namespace(), body: &corev1.Event{
		TypeMeta:   metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: s.namespace()},
		InvolvedObject: corev1.ObjectReference{
			Kind: s.Object.Kind, Namespace: s.Object.Namespace, Name: s.Object.Name, UID: types.UID(s.Object.UID),
			APIVersion: s.Object.APIVersion,
		},
		Reason: string(s.Reason), Message: s.Message, Type: string(s.Type), Count: int32(s.Count), //nolint:gosec // never so many
		Source:         corev1.EventSource{Component: s.Component, Host: s.Host},
		FirstTimestamp: metav1.NewTime(s.First), LastTimestamp: metav1.NewTime(s.Last),
		ReportingController: s.Component, ReportingInstance: s.Host,
	}})
	if errorOf(err).Status == http.StatusConflict {
		return nil
	}
	return err
}

// CountEvent patches the count and the last timestamp of an existing event.
func (c *Client) CountEvent(ctx context.Context, s EventSeries) error {
	return c.act(ctx, &call{
		verb: "patch", resource: events(), namespace: s.namespace(), name: s.Name, patch: types.MergePatchType,
		body: map[string]any{"count": s.Count, "lastTimestamp": metav1.NewTime(s.Last)},
	})
}
