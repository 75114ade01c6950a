// Package eventrecorder sends the agent's Events from a goroutine of its own.
//
// It promises the behaviour of client-go's recorder (tools/record), with its bounds:
//
//   - Record never waits. A bounded queue feeds one sending goroutine; if the queue is full the event is dropped and counted, and
//     the first drop is logged.
//   - Equal events within ten minutes are one Event in the API, whose count is patched.
//   - Different events about one object consume tokens of that object's bucket. Warning and Normal events have one bucket each, so
//     that a repeating failure does not suppress the event of its end.
//   - If the API server refuses events of a namespace twice, ten seconds apart, none is sent for ten minutes. The first refusal
//     is logged. The second request is for an API server that has just started: it refuses all requests until it has read the roles.
//   - All events also consume tokens of a common bucket, and wait for a token.
//
// Its memory is bounded, whatever the events are about. It replaces client-go's recorder, which would link 75 more packages
// (strategic merge patch with its OpenAPI schemas, protobuf reflection) and whose sink for these events is the typed clientset.
// It is separate from package kube because the plugin, which starts for each pod, never records an event.
//
// It never blocks its caller, and never changes an object.
//
// Start reading at Record.
package eventrecorder

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Result is the outcome of a recorded event.
type Result string

// A suppressed event is not sent on its own: an equal event was sent, or the rate limit was exceeded.
const (
	Sent       Result = "sent"
	Suppressed Result = "suppressed"
	Failed     Result = "failed"
)

// Bounds of the cache, the queue and the rate of events. The bounds per object and of the queue are client-go's.
const (
	// eventWindow is the time in which an equal event raises the count of the first instead of creating another one,
	// eventUpdate the interval between two patches of the count.
	eventWindow = 10 * time.Minute
	eventUpdate = 5 * time.Minute
	// objectBurst different events about one object are sent at once, then one per objectInterval.
	objectBurst    = 25
	objectInterval = 5 * time.Minute
	// eventBurst bounds all events together: this many at once, then one per eventInterval. Further events wait.
	eventBurst    = 60
	eventInterval = 2 * time.Second
	// maxQueued events wait in the queue; further events are dropped.
	maxQueued = 1000
	// maxRemembered bounds the LRU caches of events and of objects.
	maxRemembered   = 1024
	maxEventMessage = 1024
	// maxObjectName bounds the object's name in an event's name: 253 bytes less a dot and 16 hexadecimal digits.
	maxObjectName = 253 - 17
	// refusedFor is how long no event of a namespace is sent after a refusal: a chart may not grant the right to create events.
	refusedFor = 10 * time.Minute
	// refusedAgain is the pause before the first refused event is sent again.
	refusedAgain = 10 * time.Second
	// eventFlush bounds the time in which Shutdown sends queued events.
	eventFlush = 3 * time.Second
)

// Options are the dependencies of a recorder. Log and Count are required.
type Options struct {
	Log *slog.Logger
	// Count receives the result of each event.
	Count func(Result)
	// Clock defaults to the system's clock.
	Clock clock.WithTicker
}

// Recorder sends events. A nil Recorder drops them.
type Recorder struct {
	options Options
	api     *kube.Client
	limiter *rate.Limiter
	queue   chan *seenEvent
	// stopping is closed by Shutdown, done after the last event is sent.
	stopping, done chan struct{}
	abort          context.CancelFunc

	mu      sync.Mutex
	seen    *lru.Cache // of *seenEvent by Event
	objects *lru.Cache // of *rate.Limiter by bucketKey
	named   int64      // the UnixNano in the name of the last event: no two names are equal
	closed  bool
	full    bool // the queue has overflowed since it was empty

	// Only the sending goroutine uses these: failing is set if the last event was not sent, refused has the time.Time of the last refusal
	// by the object's namespace, lastRefusal is the time of the last refusal at all, and logged is set once a refusal was logged.
	failing, logged bool
	refused         *lru.Cache
	lastRefusal     time.Time
}

// seenEvent is the state of equal events.
type seenEvent struct {
	kube.EventSeries

	// sent is the time of the last enqueue; stored reports whether the API server has the event.
	sent           time.Time
	stored, queued bool
}

// bucketKey is the key of a token bucket: events with the same key share the bucket.
type bucketKey struct {
	object kube.ObjectRef
	kind   kube.EventType
}

// New starts a recorder, which works until Shutdown.
func New(api *kube.Client, o Options) *Recorder {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	ctx, abort := context.WithCancel(context.Background())
	r := &Recorder{
		options: o, api: api, limiter: rate.NewLimiter(rate.Every(eventInterval), eventBurst),
		queue: make(chan *seenEvent, maxQueued), stopping: make(chan struct{}), done: make(chan struct{}), abort: abort,
		seen: lru.New(maxRemembered), objects: lru.New(maxRemembered), refused: lru.New(maxRemembered),
	}
	go r.send(ctx)
	return r
}

// Record enqueues an event and never waits. A nil recorder drops all events.
func (r *Recorder) Record(event kube.Event) {
	if r == nil {
		return
	}
	event.Message = printable.Text(event.Message, maxEventMessage)
	sending, overflow := r.enqueue(event)
	if !sending {
		r.options.Count(Suppressed)
	}
	if overflow {
		r.options.Log.Warn("events are dropped: too many wait for the API server", slog.String("reason", string(event.Reason)),
			slog.String("object", event.Object.Namespace+"/"+event.Object.Name), slog.String("message", event.Message))
	}
}

// enqueue counts an event and sends it to the queue if due. It reports the first overflow since the queue was last empty.
func (r *Recorder) enqueue(event kube.Event) (sending, overflow bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.options.Clock.Now()
	s := r.remember(event, now)
	s.Count++
	s.Last = now
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

// remember returns the state of equal events. It needs the lock.
func (r *Recorder) remember(event kube.Event, now time.Time) *seenEvent {
	if known, found := r.seen.Get(event); found {
		if s, _ := known.(*seenEvent); now.Sub(s.Last) <= eventWindow {
			return s
		}
	}
	r.named = max(now.UnixNano(), r.named+1)
	s := &seenEvent{EventSeries: kube.EventSeries{Event: event, Name: eventName(event.Object.Name, r.named), First: now}}
	r.seen.Add(event, s)
	return s
}

// due reports whether an event may be sent now: a sent event if its count was not patched for eventUpdate, another event if its
// object's bucket has a token. It needs the lock.
func (r *Recorder) due(s *seenEvent, now time.Time) bool {
	if !s.sent.IsZero() {
		return now.Sub(s.sent) >= eventUpdate
	}
	bucket := bucketKey{s.Object, s.Type}
	known, found := r.objects.Get(bucket)
	if !found {
		known = rate.NewLimiter(rate.Every(objectInterval), objectBurst)
		r.objects.Add(bucket, known)
	}
	limiter, _ := known.(*rate.Limiter)
	return limiter.AllowN(now, 1)
}

// Shutdown sends queued events as far as the token bucket allows, for three seconds at most, and ends the recorder. Later
// events are dropped.
func (r *Recorder) Shutdown() {
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

func (r *Recorder) send(ctx context.Context) {
	defer close(r.done)
	defer r.abort()
	for s := range r.queue {
		if !r.wait() {
			r.options.Count(Suppressed)
			continue
		}
		r.mu.Lock()
		s.queued = false
		r.full = r.full && len(r.queue) > 0
		now := *s
		r.mu.Unlock()
		if r.isRefused(now.Object.Namespace) {
			r.options.Count(Failed)
			continue
		}
		err := r.write(ctx, now)
		if kube.ClassOf(err) == kube.Forbidden && r.options.Clock.Since(r.lastRefusal) >= refusedFor && r.pause(refusedAgain) {
			err = r.write(ctx, now)
		}
		r.mu.Lock()
		s.stored = s.stored || err == nil
		r.mu.Unlock()
		r.report(ctx, now.Event, err)
	}
}

// wait reserves a token and waits for it. It returns false when Shutdown comes before the token.
func (r *Recorder) wait() bool {
	now := r.options.Clock.Now()
	token := r.limiter.ReserveN(now, 1)
	if delay := token.DelayFrom(now); delay > 0 && !r.pause(delay) {
		token.CancelAt(now)
		return false
	}
	return true
}

// pause waits for d. It returns false if Shutdown ends the wait.
func (r *Recorder) pause(d time.Duration) bool {
	select {
	case <-r.options.Clock.After(d):
		return true
	case <-r.stopping:
		return false
	}
}

// isRefused reports whether events of a namespace were refused within refusedFor.
func (r *Recorder) isRefused(namespace string) bool {
	last, found := r.refused.Get(namespace)
	at, _ := last.(time.Time)
	return found && r.options.Clock.Since(at) < refusedFor
}

// report counts a sent event, and logs the first of several failures.
func (r *Recorder) report(ctx context.Context, event kube.Event, err error) {
	if err == nil {
		r.options.Count(Sent)
		r.failing = false
		return
	}
	defer r.options.Count(Failed)
	log := r.options.Log.With(slog.String("reason", string(event.Reason)), slog.String("object", event.Object.Namespace+"/"+event.Object.Name),
		slog.String("message", event.Message), slog.String("error", err.Error()))
	if kube.ClassOf(err) == kube.Forbidden {
		r.lastRefusal = r.options.Clock.Now()
		r.refused.Add(event.Object.Namespace, r.lastRefusal)
		log.Log(ctx, first(!r.logged, slog.LevelInfo), "events are not recorded where the agent has no right to create them")
		r.logged = true
		return
	}
	log.Log(ctx, first(!r.failing, slog.LevelWarn), "an event was not recorded")
	r.failing = true
}

// first returns a level for the first of several records, and Debug for the others.
func first(is bool, level slog.Level) slog.Level {
	if is {
		return level
	}
	return slog.LevelDebug
}

// write creates an event, or patches the count of a stored one. The API server deletes events, after an hour by default; then
// write creates a new one.
func (r *Recorder) write(ctx context.Context, s seenEvent) error {
	if s.stored {
		if err := r.api.CountEvent(ctx, s.EventSeries); kube.ClassOf(err) != kube.NotFound {
			return err
		}
	}
	return r.api.CreateEvent(ctx, s.EventSeries)
}

// eventName returns the name of an event about an object, in client-go's format.
func eventName(object string, nanoseconds int64) string {
	object = strings.TrimRight(object[:min(len(object), maxObjectName)], ".-")
	return fmt.Sprintf("%s.%x", object, nanoseconds)
}
