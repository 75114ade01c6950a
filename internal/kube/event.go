package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
	"unicode/utf8"
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
	// Reason is one CamelCase word, Message a sentence of up to 1024 bytes; what is more is cut off.
	Reason, Message string
	Type            EventType
	// Component is who says it, Host the node where that runs.
	Component, Host string
}

// Bounds of what is remembered and sent.
const (
	// eventMemoryTime is for how long an equal event raises the count of the first instead of being another one.
	eventMemoryTime = 10 * time.Minute
	// maxRemembered bounds the memory of events and that of budgets.
	maxRemembered = 256
	// eventBurst events about one object for one reason are sent at once, one more in each eventInterval after that.
	eventBurst    = 5
	eventInterval = time.Minute
	// eventsTogether bounds all events in an eventInterval, whatever they are about.
	eventsTogether  = 60
	maxEventMessage = 1024
)

// eventMemory knows what was said lately.
type eventMemory struct {
	mu      sync.Mutex
	said    map[Event]*saidEvent
	budgets map[eventTopic]*eventBudget
	all     eventBudget
}

type saidEvent struct {
	name        string
	count       int
	first, last time.Time
	// stored says that the API server has it.
	stored bool
}

// eventTopic shares one budget.
type eventTopic struct {
	object ObjectRef
	reason string
}

// eventBudget is a bucket of tokens, full at first.
type eventBudget struct {
	spent  int
	filled time.Time // when it was filled last
}

// take tells whether one more may be sent, of a bucket that holds most and gains by most or one in each interval.
func (b *eventBudget) take(now time.Time, most, gain int) bool {
	if intervals := int(now.Sub(b.filled) / eventInterval); intervals > 0 {
		b.spent = max(0, b.spent-min(intervals, most)*gain)
		b.filled = now
	}
	if b.spent >= most {
		return false
	}
	b.spent++
	return true
}

// RecordEvent writes an event (core/v1). The first of its kind is created; an equal one within ten minutes raises the
// count of that. Of one object and reason five are sent at once and then one a minute, of all together sixty a
// minute: what is beyond is not sent, which is no error, and is in the count of the next equal one. Events about an
// object without namespace go into the namespace default, which is the only one that the API server allows.
func (a *API) RecordEvent(ctx context.Context, event Event) (sent bool, err error) {
	event.Message = bounded(event.Message, maxEventMessage)
	now := a.access.Now()
	said, send := a.events.note(event, now)
	if !send {
		return false, nil
	}
	if said.stored {
		err = a.patchEvent(ctx, event, said)
		if ClassOf(err) != NotFound {
			return err == nil, err
		}
		// The API server forgets events, after an hour by default: it begins anew.
	}
	if err = a.createEvent(ctx, event, said); err != nil {
		return false, err
	}
	a.events.stored(event)
	return true, nil
}

// note counts an event and decides whether to send it now.
func (m *eventMemory) note(event Event, now time.Time) (saidEvent, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forget(now)
	said := m.said[event]
	if said == nil {
		said = &saidEvent{name: fmt.Sprintf("%s.%x", event.Object.Name, now.UnixNano()), first: now}
		m.said[event] = said
	}
	said.count++
	said.last = now
	topic := eventTopic{event.Object, event.Reason}
	budget := m.budgets[topic]
	if budget == nil {
		budget = &eventBudget{filled: now}
		m.budgets[topic] = budget
	}
	send := budget.take(now, eventBurst, 1) && m.all.take(now, eventsTogether, eventsTogether)
	return *said, send
}

// forget drops what is old, and everything when there is too much of it: counts begin anew then, and the budget of all
// together holds.
func (m *eventMemory) forget(now time.Time) {
	if m.said == nil || len(m.said) >= maxRemembered {
		m.said = map[Event]*saidEvent{}
	}
	if m.budgets == nil || len(m.budgets) >= maxRemembered {
		m.budgets = map[eventTopic]*eventBudget{}
	}
	for event, said := range m.said {
		if now.Sub(said.last) > eventMemoryTime {
			delete(m.said, event)
		}
	}
	for topic, budget := range m.budgets {
		if now.Sub(budget.filled) > eventBurst*eventInterval {
			delete(m.budgets, topic)
		}
	}
}

func (m *eventMemory) stored(event Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if said := m.said[event]; said != nil {
		said.stored = true
	}
}

// eventNamespace is where the event lies.
func (o ObjectRef) eventNamespace() string {
	if o.Namespace == "" {
		return "default"
	}
	return o.Namespace
}

// wireEvent is k8s.io/api/core/v1.Event.
type wireEvent struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Metadata   struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Object struct {
		Kind       string `json:"kind"`
		Namespace  string `json:"namespace,omitempty"`
		Name       string `json:"name"`
		UID        string `json:"uid,omitempty"`
		APIVersion string `json:"apiVersion,omitempty"`
	} `json:"involvedObject"`
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Type    EventType `json:"type"`
	Source  struct {
		Component string `json:"component"`
		Host      string `json:"host,omitempty"`
	} `json:"source"`
	First     string `json:"firstTimestamp"`
	Last      string `json:"lastTimestamp"`
	Count     int    `json:"count"`
	Component string `json:"reportingComponent"`
	Instance  string `json:"reportingInstance"`
}

func (a *API) createEvent(ctx context.Context, event Event, said saidEvent) error {
	body := wireEvent{
		Kind: "Event", APIVersion: "v1", Reason: event.Reason, Message: event.Message, Type: event.Type,
		First: timestamp(said.first), Last: timestamp(said.last), Count: said.count,
		Component: event.Component, Instance: event.Host,
	}
	body.Metadata.Name, body.Metadata.Namespace = said.name, event.Object.eventNamespace()
	body.Object.Kind, body.Object.Namespace, body.Object.Name = event.Object.Kind, event.Object.Namespace, event.Object.Name
	body.Object.UID, body.Object.APIVersion = event.Object.UID, event.Object.APIVersion
	body.Source.Component, body.Source.Host = event.Component, event.Host
	_, err := a.send(ctx, &call{verb: "create", resource: events(), namespace: body.Metadata.Namespace, body: body})
	// It is there already: the answer to an earlier try was lost.
	if failed, ok := errors.AsType[*CallError](err); ok && failed.Status == http.StatusConflict {
		return nil
	}
	return err
}

func (a *API) patchEvent(ctx context.Context, event Event, said saidEvent) error {
	_, err := a.send(ctx, &call{
		verb: "patch", resource: events(), namespace: event.Object.eventNamespace(), name: said.name,
		body: map[string]any{"count": said.count, "lastTimestamp": timestamp(said.last)},
	})
	return err
}

func timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// bounded cuts text to a number of bytes, between characters.
func bounded(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most]
}
