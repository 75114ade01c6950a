// Package eventrecorder sends the agent's events beside its work.
//
// It promises what client-go's recorder (tools/record) promises, with its bounds:
//
//   - Record never waits. A bounded queue holds what one goroutine sends; an event that finds no room is dropped, counted, and
//     logged once.
//   - Events that are equal within ten minutes are one event in the API, whose count is patched.
//   - Different events about one object take from a token bucket of that object. Warnings and other events have one each, so that
//     a failure which repeats does not keep the news of its end from being sent.
//   - All events take from a token bucket, too, and wait for it.
//
// Its memory is bounded, whatever the events are about. It is our own because client-go's would link 75 packages more, the strategic
// merge patch with its OpenAPI schemas and protobuf's reflection among them, and its sink for these events is the typed clientset.
// It is apart from package kube because the plugin, which starts for each pod, never records an event.
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

// Result is what became of an event that was recorded.
type Result string

// A suppressed event is not sent of its own: an equal one was, or there are too many.
const (
	Sent       Result = "sent"
	Suppressed Result = "suppressed"
	Failed     Result = "failed"
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

// Writer is what a recorder needs of [kube.Client].
type Writer interface {
	CreateEvent(ctx context.Context, s kube.EventSeries) error
	CountEvent(ctx context.Context, s kube.EventSeries) error
}

// Options are what a recorder works with. Log is required.
type Options struct {
	Log *slog.Logger
	// Count gets the result of each event, unless nil.
	Count func(Result)
	// Clock is the system's by default.
	Clock clock.WithTicker
}

// Recorder sends events. One that is nil drops them.
type Recorder struct {
	options Options
	writer  Writer
	limiter *rate.Limiter
	queue   chan *seenEvent
	// stopping is closed by Shutdown, done when the last event is sent.
	stopping, done chan struct{}
	abort          context.CancelFunc

	mu      sync.Mutex
	seen    *lru.Cache // of *seenEvent by Event
	objects *lru.Cache // of *rate.Limiter by bucketKey
	named   int64      // the time in the name of the last event: no two have the same
	closed  bool
	full    bool // the queue has dropped since it was empty
	failing bool // the last event was not sent; the sender's alone
}

// seenEvent is the state of equal events.
type seenEvent struct {
	kube.EventSeries

	// sent is when it was last given to the sender, stored whether the API server has it.
	sent           time.Time
	stored, queued bool
}

// bucketKey is what shares one token bucket.
type bucketKey struct {
	object kube.ObjectRef
	kind   kube.EventType
}

// New starts a recorder, which works until Shutdown.
func New(writer Writer, o Options) *Recorder {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Count == nil {
		o.Count = func(Result) {}
	}
	ctx, abort := context.WithCancel(context.Background())
	r := &Recorder{
		options: o, writer: writer, limiter: rate.NewLimiter(rate.Every(eventInterval), eventBurst),
		queue: make(chan *seenEvent, maxQueued), stopping: make(chan struct{}), done: make(chan struct{}), abort: abort,
		seen: lru.New(maxRemembered), objects: lru.New(maxRemembered),
	}
	go r.send(ctx)
	return r
}

// Record has an event sent, and never waits for that. A recorder that is nil drops all events.
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
		r.options.Log.Warn("events are dropped: too many wait for the API server", slog.String("reason", event.Reason),
			slog.String("object", event.Object.Namespace+"/"+event.Object.Name), slog.String("message", event.Message))
	}
}

// enqueue counts an event and gives it to the sender if it is due. It reports an overflow of the queue once, until that is empty.
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

// remember gives the state of equal events. It needs the lock.
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

// due reports whether an event may be sent now: one that was sent already when its count was not for some time, another one if its
// object has a token left. It needs the lock.
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

// Shutdown sends what waits as far as the token bucket allows, for three seconds at most, and ends the recorder. Events that are
// recorded afterwards are dropped.
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
		err := r.write(ctx, now)
		r.mu.Lock()
		s.stored = s.stored || err == nil
		r.mu.Unlock()
		r.report(ctx, now.Event, err)
	}
}

// wait takes a token, and reports whether there was one. It ends at once when the recorder does.
func (r *Recorder) wait() bool {
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
func (r *Recorder) report(ctx context.Context, event kube.Event, err error) {
	if err == nil {
		r.options.Count(Sent)
		r.failing = false
		return
	}
	r.options.Count(Failed)
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
func (r *Recorder) write(ctx context.Context, s seenEvent) error {
	if s.stored {
		if err := r.writer.CountEvent(ctx, s.EventSeries); kube.ClassOf(err) != kube.NotFound {
			return err
		}
	}
	return r.writer.CreateEvent(ctx, s.EventSeries)
}

// eventName is the name of an event about an object, as client-go makes it.
func eventName(object string, nanoseconds int64) string {
	object = strings.TrimRight(object[:min(len(object), maxObjectName)], ".-")
	return fmt.Sprintf("%s.%x", object, nanoseconds)
}
