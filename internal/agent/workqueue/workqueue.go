// Package workqueue holds the names of objects that a decision is due for, and is the clock that it waits by.
//
// It promises that a name is given to one worker at a time, that what changes while it is worked on is not forgotten,
// that what failed comes again after a pause that doubles up to a bound, and that names come out in the order in which
// they came in. It never starts a goroutine and knows nothing of what is worked on.
//
// Start reading at Queue.
package workqueue

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// Queue holds names that work is due for: each one once, and none that is being worked on. Names come out in the order in
// which they came in.
type Queue[K comparable] struct {
	clock      Clock
	first, max time.Duration
	depth      func(int)

	mu       sync.Mutex
	waiting  []K
	items    map[K]*item
	later    map[K]time.Time
	news     chan struct{} // closed and made anew when something is to be looked at
	inFlight int
}

type item struct {
	waiting, working bool
	// again says that it came in while it was worked on.
	again    bool
	failures int
}

// New returns an empty queue. What failed comes again after first, then after twice that, up to most. depth is told how
// many names are due.
func New[K comparable](clock Clock, first, most time.Duration, depth func(int)) *Queue[K] {
	return &Queue[K]{
		clock: clock, first: first, max: most, depth: depth,
		items: map[K]*item{}, later: map[K]time.Time{}, news: make(chan struct{}),
	}
}

// Add makes a name due now.
func (q *Queue[K]) Add(name K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.put(name)
	q.tell()
}

func (q *Queue[K]) put(name K) {
	it := q.items[name]
	if it == nil {
		it = &item{}
		q.items[name] = it
	}
	switch {
	case it.working:
		it.again = true
	case !it.waiting:
		it.waiting = true
		q.waiting = append(q.waiting, name)
		q.depth(len(q.waiting))
	}
}

func (q *Queue[K]) tell() {
	close(q.news)
	q.news = make(chan struct{})
}

// At makes a name due at a time, unless it is due before.
func (q *Queue[K]) At(name K, due time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if before, found := q.later[name]; found && !due.Before(before) {
		return
	}
	q.later[name] = due
	q.tell()
}

// Forget drops what is known of a name, which does not end the work on it.
func (q *Queue[K]) Forget(name K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.later, name)
	it := q.items[name]
	switch {
	case it == nil:
	case it.waiting || it.working:
		it.again, it.failures = false, 0
	default:
		delete(q.items, name)
	}
}

// Next waits for a name that is due, until ctx ends. What it gives must be given to Done.
func (q *Queue[K]) Next(ctx context.Context) (K, bool) {
	var none K
	for {
		name, found, news, pause := q.take()
		if found {
			return name, true
		}
		var over <-chan time.Time
		stop := func() {}
		if pause > 0 {
			over, stop = q.clock.After(pause)
		}
		select {
		case <-ctx.Done():
			stop()
			return none, false
		case <-news:
		case <-over:
		}
		stop()
	}
}

// take gives a name that is due, or what to wait for: news, or the end of a pause if there is one.
func (q *Queue[K]) take() (name K, found bool, news <-chan struct{}, pause time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.clock.Now()
	for name, due := range q.later {
		if wait := due.Sub(now); wait > 0 {
			if pause == 0 || wait < pause {
				pause = wait
			}
			continue
		}
		delete(q.later, name)
		q.put(name)
	}
	if len(q.waiting) > 0 {
		name, q.waiting = q.waiting[0], q.waiting[1:]
		it := q.items[name]
		it.waiting = false
		q.depth(len(q.waiting))
		it.working = true
		q.inFlight++
		return name, true, nil, 0
	}
	return name, false, q.news, pause
}

// Done says how the work on a name ended. After a failure it is due again after a pause that doubles from time to time,
// and not before wait is over.
func (q *Queue[K]) Done(name K, failed bool, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight--
	it := q.items[name]
	it.working = false
	if failed {
		pause := q.first << min(it.failures, 20)
		if pause <= 0 || pause > q.max {
			pause = q.max
		}
		it.failures++
		pause = max(wait, pause/2+rand.N(pause/2+1)) //nolint:gosec // spreading load needs no secrecy
		due := q.clock.Now().Add(pause)
		if before, found := q.later[name]; !found || due.Before(before) {
			q.later[name] = due
		}
	} else {
		it.failures = 0
	}
	switch {
	case it.again:
		it.again = false
		q.put(name)
	case !failed:
		delete(q.items, name)
	}
	q.tell()
}

// Idle tells whether nothing is due or worked on just now.
func (q *Queue[K]) Idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.inFlight == 0 && len(q.waiting) == 0
}
