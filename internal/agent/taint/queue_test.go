package taint

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func testQueue() *queue {
	return newQueue(SystemClock(time.Now), 100*time.Millisecond, time.Second, func(int) {})
}

// take gives what is due now.
func take(t *testing.T, q *queue) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if name, found, _, _ := q.take(); found {
		return name
	}
	if name, ok := q.next(ctx); ok {
		return name
	}
	return ""
}

func TestQueueHoldsEachNameOnceAndInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		for _, name := range []string{"b", "a", "b", "c", "a"} {
			q.add(name)
		}
		var got []string
		for name := take(t, q); name != ""; name = take(t, q) {
			got = append(got, name)
			q.done(name, false, 0)
		}
		if !slices.Equal(got, []string{"b", "a", "c"}) || !q.idle() || len(q.items) != 0 {
			t.Errorf("got %q, %d items left", got, len(q.items))
		}
	})
}

func TestQueueNeverGivesANameThatIsWorkedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.add("a")
		if take(t, q) != "a" {
			t.Fatal("not due")
		}
		q.add("a")
		if got := take(t, q); got != "" || q.idle() {
			t.Fatalf("%q was given twice", got)
		}
		q.done("a", false, 0)
		if take(t, q) != "a" {
			t.Error("what came in meanwhile was forgotten")
		}
	})
}

func TestQueueTriesAgainMoreAndMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.add("a")
		most := []time.Duration{100, 200, 400, 800, 1000, 1000}
		for i, limit := range most {
			limit *= time.Millisecond
			name, ok := q.next(t.Context())
			if !ok || name != "a" {
				t.Fatal("it was dropped")
			}
			q.done("a", true, 0)
			begin := time.Now()
			if name, _ = q.next(t.Context()); name != "a" {
				t.Fatal(name)
			}
			if took := time.Since(begin); took < limit/2 || took > limit {
				t.Errorf("pause %d was %s, want from %s to %s", i, took, limit/2, limit)
			}
			// Back to where it was, without counting as another failure.
			q.mu.Lock()
			q.items["a"].working, q.inFlight = false, q.inFlight-1
			q.put("a")
			q.mu.Unlock()
		}
		if name, _ := q.next(t.Context()); name != "a" {
			t.Fatal(name)
		}
		q.done("a", false, 0)
		q.add("a")
		if take(t, q) != "a" {
			t.Fatal("not due")
		}
		q.done("a", true, 0)
		begin := time.Now()
		if _, ok := q.next(t.Context()); !ok || time.Since(begin) > 100*time.Millisecond {
			t.Error("a success does not make the pause short again")
		}
	})
}

func TestQueueHeedsTheWaitAndNewsComeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.add("a")
		_ = take(t, q)
		q.done("a", true, 30*time.Second)
		q.at("b", time.Now().Add(10*time.Second))
		q.at("b", time.Now().Add(40*time.Second))
		begin := time.Now()
		if name, _ := q.next(t.Context()); name != "b" || time.Since(begin) != 10*time.Second {
			t.Errorf("%q after %s", name, time.Since(begin))
		}
		q.done("b", false, 0)
		if name, _ := q.next(t.Context()); name != "a" || time.Since(begin) != 30*time.Second {
			t.Errorf("%q after %s", name, time.Since(begin))
		}
		q.done("a", true, 30*time.Second)
		q.add("a")
		if take(t, q) != "a" {
			t.Error("an event has to wait for the pause")
		}
		q.done("a", false, 0)
		q.at("c", time.Now().Add(time.Second))
		q.forget("c")
		time.Sleep(time.Hour)
		if got := take(t, q); got == "c" {
			t.Errorf("%q was forgotten", got)
		}
	})
}

func TestQueueWithManyWorkers(t *testing.T) {
	q := testQueue()
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	busy, count := map[string]bool{}, map[string]int{}
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for {
				name, ok := q.next(ctx)
				if !ok {
					return
				}
				mu.Lock()
				if busy[name] {
					t.Errorf("%s is worked on twice", name)
				}
				busy[name] = true
				mu.Unlock()
				mu.Lock()
				busy[name] = false
				count[name]++
				mu.Unlock()
				q.done(name, false, 0)
			}
		})
	}
	names := []string{"a", "b", "c", "d"}
	for range 500 {
		for _, name := range names {
			q.add(name)
		}
	}
	until(t, "the queue is not done", q.idle)
	cancel()
	work.Wait()
	for _, name := range names {
		if count[name] == 0 {
			t.Errorf("%s was never worked on", name)
		}
	}
}
