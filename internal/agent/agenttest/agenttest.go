// Package agenttest has common helpers for tests of the agent's parts: waiting for a condition, running a function until the
// test ends, a server on a Unix socket, and a goroutine that steps a fake clock.
package agenttest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

// Start returns the initial time of a new clock.
func Start() time.Time { return time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC) }

// NewClock returns a clock that moves only when the test steps it.
func NewClock() *clocktesting.FakeClock { return clocktesting.NewFakeClock(Start()) }

// Until waits for a condition, and after two minutes fails the test with the text of otherwise: the race detector is slow.
func Until(t *testing.T, otherwise func() string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(5 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("timeout: %s", otherwise())
		}
	}
}

// Metric returns the value of a series, given with its labels, from the text of package metrics.
func Metric(t *testing.T, text []byte, series string) (value int) {
	t.Helper()
	_, rest, _ := strings.Cut("\n"+string(text), "\n"+series+" ")
	if _, err := fmt.Sscan(rest, &value); err != nil {
		t.Fatalf("%s: %v", series, err)
	}
	return value
}

// Run steps the clock until the test ends, 50 times as fast as real time.
func Run(t *testing.T, clock *clocktesting.FakeClock) {
	t.Helper()
	Go(t, func(ctx context.Context) {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				clock.Step(100 * time.Millisecond)
			}
		}
	})
}
