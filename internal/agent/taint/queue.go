package taint

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// queue holds names of nodes that a decision is due for: each one once, and none that is being worked on. Names come out
// in the order in which they came in.
type queue struct {
	clock      Clock
	first, max time.Duration
	depth      func(int)

	mu       sync.Mutex
	waiting  []string
	items    map[string]*item
	later    map[string]time.Time
	news     chan struct{} // closed and made anew when something is to be looked at
	inFlight int
}

type item struct {
	waiting, working bool
	// again says that it came in while it was worked on.
	again    bool
	failures int
}

func newQueue(clock Clock, first, most time.Duration, depth func(int)) *queue {
	return &queue{
		clock: clock, first: first, max: most, depth: depth,
		items: map[string]*item{}, later: map[string]time.Time{}, news: make(chan struct{}),
	}
}

// add makes a name due now.
func (q *queue) add(name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.put(name)
	q.tell()
}

func (q *queue) put(name string) {
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

func (q *queue) tell() {
	close(q.news)
	q.news = make(chan struct{})
}

// at makes a name due at a time, unless it is due before.
func (q *queue) at(name string, due time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if before, found := q.later[name]; found && !due.Before(before) {
		return
	}
	q.later[name] = due
	q.tell()
}

// forget drops what is known of a name, which does not end the work on it.
func (q *queue) forget(name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.later, name)
	if it := q.items[name]; it != nil {
		it.again, it.failures = false, 0
	}
}

// next waits for a name that is due, until ctx ends. What it gives must be given to done.
func (q *queue) next(ctx context.Context) (string, bool) {
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
			return "", false
		case <-news:
		case <-over:
		}
		stop()
	}
}

// take gives a name that is due, or what to wait for: news, or the end of a pause if there is one.
func (q *queue) take() (name string, found bool, news <-chan struct{}, pause time.Duration) {
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
	return "", false, q.news, pause
}

// done says how the work on a name ended. After a failure it is due again after a pause that doubles from time to time,
// and not before wait is over.
func (q *queue) done(name string, failed bool, wait time.Duration) {
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

// idle tells whether nothing is due or worked on just now.
func (q *queue) idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.inFlight == 0 && len(q.waiting) == 0
}
