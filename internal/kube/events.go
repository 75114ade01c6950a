package kube

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// EventType is how bad an event is.
type EventType string

// The types that the API server accepts.
const (
	EventNormal  EventType = "Normal"
	EventWarning EventType = "Warning"
)

// ObjectRef names what an event is about.
type ObjectRef struct {
	// Namespace is empty for an object without one.
	Kind, Namespace, Name, UID, APIVersion string
}

// NodeRef names a node for an event, with its name as the UID: that is how the kubelet does it, and where "kubectl
// describe node" looks.
func NodeRef(name string) ObjectRef {
	return ObjectRef{Kind: "Node", Name: name, UID: name, APIVersion: "v1"}
}

// Event is something that people should find where they look: in "kubectl describe" of the object and in "kubectl get
// events".
type Event struct {
	Object ObjectRef
	// Reason is one CamelCase word, Message a sentence of at most 1024 bytes.
	Reason, Message string
	Type            EventType
	// Component is the program that reports it, Host the node where that runs.
	Component, Host string
}

// EventSeries is an event that happened Count times, as one object of the API.
type EventSeries struct {
	Event

	// Name is the object's.
	Name        string
	Count       int
	First, Last time.Time
}

// namespace is that of the object, or default, the only one that the API server allows for an object without namespace.
func (s EventSeries) namespace() string { return cmp.Or(s.Object.Namespace, metav1.NamespaceDefault) }

// CreateEvent creates a v1 Event. One of the name that is there already is no error: the answer to an earlier try was lost.
func (c *Client) CreateEvent(ctx context.Context, s EventSeries) error {
	err := c.act(ctx, &call{verb: "create", resource: events(), namespace: s.namespace(), body: &corev1.Event{
		TypeMeta:   metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: s.namespace()},
		InvolvedObject: corev1.ObjectReference{
			Kind: s.Object.Kind, Namespace: s.Object.Namespace, Name: s.Object.Name, UID: types.UID(s.Object.UID),
			APIVersion: s.Object.APIVersion,
		},
		Reason: s.Reason, Message: s.Message, Type: string(s.Type), Count: int32(s.Count), //nolint:gosec // never so many
		Source:         corev1.EventSource{Component: s.Component, Host: s.Host},
		FirstTimestamp: metav1.NewTime(s.First), LastTimestamp: metav1.NewTime(s.Last),
		ReportingController: s.Component, ReportingInstance: s.Host,
	}})
	if failed, ok := errors.AsType[*Error](err); ok && failed.Status == http.StatusConflict {
		return nil
	}
	return err
}

// CountEvent writes the count of an event that was created, and when it happened last.
func (c *Client) CountEvent(ctx context.Context, s EventSeries) error {
	return c.act(ctx, &call{
		verb: "patch", resource: events(), namespace: s.namespace(), name: s.Name, patch: types.MergePatchType,
		body: map[string]any{"count": s.Count, "lastTimestamp": metav1.NewTime(s.Last)},
	})
}
