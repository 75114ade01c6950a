package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

const (
	// maxAttempt and a third of the budget bound each attempt, so that a hanging attempt leaves time for others.
	maxAttempt = 3 * time.Second
	// minPause is the shortest first pause between two attempts, maxPause the longest last pause.
	minPause = 25 * time.Millisecond
	maxPause = 500 * time.Millisecond
)

// Lookup fetches one pod's facts for the plugin within a budget. It repeats [Client.PodSelected] after failures as their [Class] allows
// until the budget is used up. Pauses grow from 25 to 50 ms up to 500 ms to 1 s, with jitter, so that the pods of a node do not
// send requests in step. An error is an [Error] about all attempts; it is also context.Canceled if the caller canceled ctx.
func (c *Client) Lookup(
	ctx context.Context, key PodRef, selects func(pod, namespace map[string]string) bool, budget time.Duration,
) (sidecar.Facts, error) {
	limited, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	deadline, _ := limited.Deadline()
	l := lookup{
		attempt: min(budget/3, maxAttempt), deadline: deadline,
		backoff: wait.Backoff{Duration: minPause, Factor: 2, Jitter: 1, Cap: maxPause, Steps: 100},
	}
	total := time.Until(deadline)
	for {
		attempt, end := context.WithTimeout(limited, l.attempt)
		pod, err := c.PodSelected(attempt, key, selects)
		end()
		if err == nil {
			return pod.Facts, nil
		}
		l.record(err, limited.Err() != nil)
		pause, again := l.pause()
		if !again || !sleep(limited, pause) {
			break
		}
	}
	failed := l.last
	switch canceled := errors.Is(ctx.Err(), context.Canceled); {
	case canceled && failed.Class != Canceled:
		cause := fmt.Errorf("%w; before that: %s", context.Canceled, failed.Class)
		failed = Error{Class: Canceled, Verb: failed.Verb, Object: failed.Object, Server: failed.Server, Err: cause}
	case !canceled:
		failed.Exhausted = l.exhausted || limited.Err() != nil
	}
	failed.File, failed.Attempts = c.config.Kubeconfig, l.attempts
	failed.Elapsed = total - time.Until(deadline)
	return sidecar.Facts{}, &failed
}

// sleep returns false if ctx ends before the pause.
func sleep(ctx context.Context, pause time.Duration) bool {
	pausing, end := context.WithTimeout(ctx, pause)
	defer end()
	<-pausing.Done()
	return ctx.Err() == nil
}

// lookup is the state of one call of [Client.Lookup].
type lookup struct {
	attempt  time.Duration
	deadline time.Time // of the budget, or the caller's earlier deadline
	backoff  wait.Backoff

	attempts  int
	refusals  int // failures of a class with a bounded number of attempts
	exhausted bool
	last      Error
}

// record stores the failure that explains the look-up: a complete attempt explains more than a later attempt that the budget
// cut short.
func (l *lookup) record(err error, cut bool) {
	if ClassOf(err) != InvalidKey {
		l.attempts++
	}
	if failed, ok := errors.AsType[*Error](err); ok && (!cut || l.attempts <= 1) {
		l.last = *failed
	}
}

// pause decides whether another attempt follows, and returns the pause before it.
func (l *lookup) pause() (time.Duration, bool) {
	if limit, _ := l.last.policy(); limit > 0 {
		l.refusals++
		if l.refusals >= limit {
			return 0, false
		}
	}
	left := time.Until(l.deadline)
	pause := l.backoff.Step() + l.last.RetryAfter
	if pause < left {
		return pause, true
	}
	// The rest of the budget serves another attempt rather than a pause, unless the server's Retry-After forbids it.
	if l.last.RetryAfter >= left || left < 2*minPause {
		l.exhausted = true
		return 0, false
	}
	return max(l.last.RetryAfter, left/2), true
}
