package workqueue

import "time"

// Clock is the time of day and what waits for it.
type Clock struct {
	Now func() time.Time
	// After gives a channel that gets a value when the time is over, and a function that ends the waiting.
	After func(time.Duration) (<-chan time.Time, func())
}

// SystemClock waits by the system's timers.
func SystemClock(now func() time.Time) Clock {
	return Clock{Now: now, After: func(d time.Duration) (<-chan time.Time, func()) {
		timer := time.NewTimer(d)
		return timer.C, func() { timer.Stop() }
	}}
}
