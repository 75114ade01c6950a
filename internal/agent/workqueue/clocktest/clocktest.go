// Package clocktest is a clock that a test turns by hand, and the wait for what
// happens by itself.
package clocktest

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/workqueue"
)

// Start is the time that a new hand shows.
func Start() time.Time { return time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC) }

// Until waits for a condition, and fails the test with what otherwise says
// when it does not come true within 30 seconds.
func Until(t *testing.T, otherwise func() string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("gave up waiting: %s", otherwise())
		}
	}
}

// Hand is a clock that moves only when the test turns it.
type Hand struct {
	mu      sync.Mutex
	now     time.Time
	waiting []*alarm
}

type alarm struct {
	due  time.Time
	ring chan time.Time
}

// New is a hand that shows Start.
func New() *Hand { return &Hand{now: Start()} }

// Clock is what the code under test is given.
func (h *Hand) Clock() workqueue.Clock {
	return workqueue.Clock{Now: h.Now, After: func(d time.Duration) (<-chan time.Time, func()) {
		h.mu.Lock()
		defer h.mu.Unlock()
		a := &alarm{h.now.Add(d), make(chan time.Time, 1)}
		h.waiting = append(h.waiting, a)
		return a.ring, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.waiting = slices.DeleteFunc(h.waiting, func(b *alarm) bool { return a == b })
		}
	}}
}

// Now is the time the hand shows.
func (h *Hand) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

// Turn moves the hand on, and rings every alarm that is due.
func (h *Hand) Turn(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = h.now.Add(d)
	for _, a := range h.waiting {
		if !a.due.After(h.now) {
			select {
			case a.ring <- h.now:
			default:
			}
		}
	}
}

// Sleepers counts those who wait for the clock.
func (h *Hand) Sleepers() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.waiting)
}

// Ticking turns the hand until the test is over, 50 times as fast as the time
// of day.
func (h *Hand) Ticking(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	over := make(chan struct{})
	var turning sync.WaitGroup
	turning.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				h.Turn(100 * time.Millisecond)
			}
		}
	})
	t.Cleanup(func() {
		tick.Stop()
		close(over)
		turning.Wait()
	})
}
