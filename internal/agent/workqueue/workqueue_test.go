package workqueue

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func testQueue() *Queue[string] {
	return New[string](SystemClock(time.Now), 100*time.Millisecond, time.Second, func(int) {})
}

// take gives what is due now.
func take(t *testing.T, q *Queue[string]) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if name, found, _, _ := q.take(); found {
		return name
	}
	if name, ok := q.Next(ctx); ok {
		return name
	}
	return ""
}

func TestQueueHoldsEachNameOnceAndInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		for _, name := range []string{"b", "a", "b", "c", "a"} {
			q.Add(name)
		}
		var got []string
		for name := take(t, q); name != ""; name = take(t, q) {
			got = append(got, name)
			q.Done(name, false, 0)
		}
		if !slices.Equal(got, []string{"b", "a", "c"}) || !q.Idle() || len(q.items) != 0 {
			t.Errorf("got %q, %d items left", got, len(q.items))
		}
	})
}

func TestQueueNeverGivesANameThatIsWorkedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.Add("a")
		if take(t, q) != "a" {
			t.Fatal("not due")
		}
		q.Add("a")
		if got := take(t, q); got != "" || q.Idle() {
			t.Fatalf("%q was given twice", got)
		}
		q.Done("a", false, 0)
		if take(t, q) != "a" {
			t.Error("what came in meanwhile was forgotten")
		}
	})
}

func TestQueueTriesAgainMoreAndMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.Add("a")
		most := []time.Duration{100, 200, 400, 800, 1000, 1000}
		for i, limit := range most {
			limit *= time.Millisecond
			name, ok := q.Next(t.Context())
			if !ok || name != "a" {
				t.Fatal("it was dropped")
			}
			q.Done("a", true, 0)
			begin := time.Now()
			if name, _ = q.Next(t.Context()); name != "a" {
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
		if name, _ := q.Next(t.Context()); name != "a" {
			t.Fatal(name)
		}
		q.Done("a", false, 0)
		q.Add("a")
		if take(t, q) != "a" {
			t.Fatal("not due")
		}
		q.Done("a", true, 0)
		begin := time.Now()
		if _, ok := q.Next(t.Context()); !ok || time.Since(begin) > 100*time.Millisecond {
			t.Error("a success does not make the pause short again")
		}
	})
}

func TestQueueHeedsTheWaitAndNewsComeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue()
		q.Add("a")
		_ = take(t, q)
		q.Done("a", true, 30*time.Second)
		q.At("b", time.Now().Add(10*time.Second))
		q.At("b", time.Now().Add(40*time.Second))
		begin := time.Now()
		if name, _ := q.Next(t.Context()); name != "b" || time.Since(begin) != 10*time.Second {
			t.Errorf("%q after %s", name, time.Since(begin))
		}
		q.Done("b", false, 0)
		if name, _ := q.Next(t.Context()); name != "a" || time.Since(begin) != 30*time.Second {
			t.Errorf("%q after %s", name, time.Since(begin))
		}
		q.Done("a", true, 30*time.Second)
		q.Add("a")
		if take(t, q) != "a" {
			t.Error("an event has to wait for the pause")
		}
		q.Done("a", false, 0)
		q.At("c", time.Now().Add(time.Second))
		q.Forget("c")
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
				name, ok := q.Next(ctx)
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
				q.Done(name, false, 0)
			}
		})
	}
	names := []string{"a", "b", "c", "d"}
	for range 500 {
		for _, name := range names {
			q.Add(name)
		}
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !q.Idle() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the queue is not done")
		}
	}
	cancel()
	work.Wait()
	for _, name := range names {
		if count[name] == 0 {
			t.Errorf("%s was never worked on", name)
		}
	}
}
