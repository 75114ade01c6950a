package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"

	"github.com/meshcni/istio-cni/internal/core/printable"
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

// eventNamespace is where an event about the object lies: the namespace default, the only one that the API server allows, for an
// object without namespace.
func (o ObjectRef) eventNamespace() string {
	if o.Namespace == "" {
		return "default"
	}
	return o.Namespace
}

// Event is something that people should find where they look: in "kubectl describe" of the object and in "kubectl get
// events".
type Event struct {
	Object ObjectRef
	// Reason is one CamelCase word, Message a sentence. Of more than 1024 bytes the rest is cut off, and what is not
	// printable is escaped.
	Reason, Message string
	Type            EventType
	// Component is the program that reports it, Host the node where that runs.
	Component, Host string
}

// EventResult is what became of an event that was recorded.
type EventResult string

// A suppressed event is not sent of its own: an equal one was, or there are too many.
const (
	EventSent       EventResult = "sent"
	EventSuppressed EventResult = "suppressed"
	EventFailed     EventResult = "failed"
)

// Bounds of what is remembered, queued and sent. Those of one object and of the queue are client-go's.
const (
	// eventWindow is for how long an equal event raises the count of the first instead of being another one, eventUpdate how often
	// that is sent.
	eventWindow = 10 * time.Minute
	eventUpdate = 5 * time.Minute
	// objectBurst different events about one object are sent at once, one more in each objectInterval after that.
	objectBurst    = 25
	objectInterval = 5 * time.Minute
	// eventBurst bounds all events together: so many at once, one more in each eventInterval after that. Events beyond it wait.
	eventBurst    = 60
	eventInterval = 2 * time.Second
	// maxQueued events wait; those beyond are dropped.
	maxQueued = 1000
	// maxRemembered events, and as many objects, are remembered.
	maxRemembered   = 1024
	maxEventMessage = 1024
	// maxObjectName is what an event's name has of its object's: 253 bytes less a dot and 16 hexadecimal digits.
	maxObjectName = 253 - 17
	// eventFlush bounds what is sent after the end.
	eventFlush = 3 * time.Second
)

// EventWriter is what a recorder needs of the API. Errors are classed by [ClassOf].
type EventWriter interface {
	// CreateEvent creates a v1 Event, which is encoded as JSON. One of the name that is there already is no error.
	CreateEvent(ctx context.Context, namespace string, event any) error
	// PatchEvent merges a patch, which is encoded as JSON, into an event.
	PatchEvent(ctx context.Context, namespace, name string, patch any) error
}

// EventOptions are what a recorder works with. Log is required.
type EventOptions struct {
	Log *slog.Logger
	// Count is told what became of each event, unless nil.
	Count func(EventResult)
	// Clock is the system's by default.
	Clock clock.WithTicker
}

// EventRecorder sends events beside the work. It is our own because client-go's (tools/record) would link 75 packages more, the
// strategic merge patch with its OpenAPI schemas and protobuf's reflection among them, and its sink for these events is the typed
// clientset. What it does is what client-go's does:
//
//   - Record never waits. A bounded queue holds what one goroutine sends; what finds no room is dropped, counted, and logged once.
//   - Events that are equal within ten minutes are one event in the API, whose count is patched.
//   - Different events about one object take from a token bucket of that object. Warnings and other events have one each, so that
//     a failure which repeats does not keep the news of its end from being sent.
//   - All events take from a token bucket, too, and wait for it.
//
// Its memory is bounded, whatever the events are about.
type EventRecorder struct {
	options EventOptions
	writer  EventWriter
	limiter *rate.Limiter
	queue   chan *seenEvent
	// stopping is closed by Shutdown, done when the last event is sent.
	stopping, done chan struct{}
	abort          context.CancelFunc

	mu      sync.Mutex
	seen    *lru.Cache // of *seenEvent by Event
	objects *lru.Cache // of *rate.Limiter by eventBucket
	named   int64      // the time in the name of the last event: no two have the same
	closed  bool
	full    bool // the queue has dropped since it was empty
	failing bool // the last event was not sent; the sender's alone
}

// seenEvent is what is known of equal events.
type seenEvent struct {
	Event

	name        string
	count       int
	first, last time.Time
	// sent is when it was last given to the sender, stored whether the API server has it.
	sent           time.Time
	stored, queued bool
}

// eventBucket is what shares one token bucket.
type eventBucket struct {
	object ObjectRef
	kind   EventType
}

// NewEventRecorder starts a recorder, which works until Shutdown.
func NewEventRecorder(writer EventWriter, o EventOptions) *EventRecorder {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Count == nil {
		o.Count = func(EventResult) {}
	}
	ctx, abort := context.WithCancel(context.Background())
	r := &EventRecorder{
		options: o, writer: writer, limiter: rate.NewLimiter(rate.Every(eventInterval), eventBurst),
		queue: make(chan *seenEvent, maxQueued), stopping: make(chan struct{}), done: make(chan struct{}), abort: abort,
		seen: lru.New(maxRemembered), objects: lru.New(maxRemembered),
	}
	go r.send(ctx)
	return r
}

// Record has an event sent, and never waits for that. A recorder that is nil drops all events.
func (r *EventRecorder) Record(event Event) {
	if r == nil {
		return
	}
	event.Message = printable.Text(event.Message, maxEventMessage)
	sending, overflow := r.enqueue(event)
	if !sending {
		r.options.Count(EventSuppressed)
	}
	if overflow {
		r.options.Log.Warn("events are dropped: too many wait for the API server", slog.String("reason", event.Reason),
			slog.String("object", event.Object.Namespace+"/"+event.Object.Name), slog.String("message", event.Message))
	}
}

// enqueue counts an event and gives it to the sender if it is due. It reports an overflow of the queue once, until that is empty.
func (r *EventRecorder) enqueue(event Event) (sending, overflow bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.options.Clock.Now()
	s := r.remember(event, now)
	s.count++
	s.last = now
	if r.closed || s.queued || !r.due(s, now) {
		return false, false
	}
	select {
	case r.queue <- s:
		s.queued, s.sent = true, now
		return true, false
	default:
		overflow, r.full = !r.full, true
		return false, overflow
	}
}

// remember gives what is known of equal events. It needs the lock.
func (r *EventRecorder) remember(event Event, now time.Time) *seenEvent {
	if known, found := r.seen.Get(event); found {
		if s, _ := known.(*seenEvent); now.Sub(s.last) <= eventWindow {
			return s
		}
	}
	r.named = max(now.UnixNano(), r.named+1)
	s := &seenEvent{Event: event, name: eventName(event.Object.Name, r.named), first: now}
	r.seen.Add(event, s)
	return s
}

// due reports whether an event may be sent now: one that was sent already when its count was not for some time, another one if its
// object has a token left. It needs the lock.
func (r *EventRecorder) due(s *seenEvent, now time.Time) bool {
	if !s.sent.IsZero() {
		return now.Sub(s.sent) >= eventUpdate
	}
	bucket := eventBucket{s.Object, s.Type}
	known, found := r.objects.Get(bucket)
	if !found {
		known = rate.NewLimiter(rate.Every(objectInterval), objectBurst)
		r.objects.Add(bucket, known)
	}
	limiter, _ := known.(*rate.Limiter)
	return limiter.AllowN(now, 1)
}

// Shutdown sends what waits as far as the token bucket allows, for three seconds at most, and ends the recorder. Events that are
// recorded afterwards are dropped.
func (r *EventRecorder) Shutdown() {
	if r == nil {
		return
	}
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.queue)
		close(r.stopping)
	}
	r.mu.Unlock()
	timer := time.AfterFunc(eventFlush, r.abort)
	defer timer.Stop()
	<-r.done
}

func (r *EventRecorder) send(ctx context.Context) {
	defer close(r.done)
	defer r.abort()
	for s := range r.queue {
		if !r.wait() {
			r.options.Count(EventSuppressed)
			continue
		}
		r.mu.Lock()
		s.queued = false
		r.full = r.full && len(r.queue) > 0
		now := *s
		r.mu.Unlock()
		err := r.write(ctx, now)
		r.mu.Lock()
		s.stored = s.stored || err == nil
		r.mu.Unlock()
		r.report(ctx, now.Event, err)
	}
}

// wait takes a token, and reports whether there was one. It ends at once when the recorder does.
func (r *EventRecorder) wait() bool {
	now := r.options.Clock.Now()
	token := r.limiter.ReserveN(now, 1)
	pause := token.DelayFrom(now)
	if pause == 0 {
		return true
	}
	timer := r.options.Clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-r.stopping:
		token.CancelAt(now)
		return false
	}
}

// report counts an event that was sent, and logs the first failure of several.
func (r *EventRecorder) report(ctx context.Context, event Event, err error) {
	if err == nil {
		r.options.Count(EventSent)
		r.failing = false
		return
	}
	r.options.Count(EventFailed)
	level := slog.LevelWarn
	if r.failing {
		level = slog.LevelDebug
	}
	r.failing = true
	r.options.Log.Log(ctx, level, "an event was not recorded", slog.String("reason", event.Reason),
		slog.String("object", event.Object.Namespace+"/"+event.Object.Name), slog.String("message", event.Message),
		slog.String("error", err.Error()))
}

// write creates an event, or patches the count of one that the API server has. It forgets events, after an hour by default: then
// another one is created.
func (r *EventRecorder) write(ctx context.Context, s seenEvent) error {
	namespace := s.Object.eventNamespace()
	if s.stored {
		err := r.writer.PatchEvent(ctx, namespace, s.name, map[string]any{"count": s.count, "lastTimestamp": timestamp(s.last)})
		if ClassOf(err) != NotFound {
			return err
		}
	}
	return r.writer.CreateEvent(ctx, namespace, s.wire())
}

func (s *seenEvent) wire() *corev1.Event {
	return &corev1.Event{
		TypeMeta:   metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Namespace: s.Object.eventNamespace()},
		InvolvedObject: corev1.ObjectReference{
			Kind: s.Object.Kind, Namespace: s.Object.Namespace, Name: s.Object.Name, UID: types.UID(s.Object.UID),
			APIVersion: s.Object.APIVersion,
		},
		Reason: s.Reason, Message: s.Message, Type: string(s.Type), Count: int32(s.count), //nolint:gosec // never so many
		Source:         corev1.EventSource{Component: s.Component, Host: s.Host},
		FirstTimestamp: metav1.NewTime(s.first), LastTimestamp: metav1.NewTime(s.last),
		ReportingController: s.Component, ReportingInstance: s.Host,
	}
}

// eventName is the name of an event about an object, as client-go makes it.
func eventName(object string, nanoseconds int64) string {
	object = strings.TrimRight(object[:min(len(object), maxObjectName)], ".-")
	return fmt.Sprintf("%s.%x", object, nanoseconds)
}

func timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// CreateEvent is [EventWriter]'s.
func (c *Client) CreateEvent(ctx context.Context, namespace string, event any) error {
	err := c.act(ctx, &call{verb: "create", resource: events(), namespace: namespace, body: event})
	// It is there already: the answer to an earlier try was lost.
	if failed, ok := errors.AsType[*Error](err); ok && failed.Status == http.StatusConflict {
		return nil
	}
	return err
}

// PatchEvent is [EventWriter]'s.
func (c *Client) PatchEvent(ctx context.Context, namespace, name string, patch any) error {
	return c.act(ctx, &call{
		verb: "patch", resource: events(), namespace: namespace, name: name, patch: types.MergePatchType, body: patch,
	})
}
