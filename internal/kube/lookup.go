package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Budget bounds a look-up. Zero fields take the defaults.
type Budget struct {
	// Total is the time for the whole look-up, all attempts and pauses together; 10 s by default.
	Total time.Duration
	// Attempt is the time for one attempt, so that one that hangs leaves room for others; a third of Total and at
	// most 3 s by default.
	Attempt time.Duration
	// FirstBackoff is the pause after the first failed attempt, 50 ms by default. It doubles with every attempt up to
	// MaxBackoff, 1 s by default. Pauses are shortened at random by up to a half, so that the pods of a node do not
	// ask in step.
	FirstBackoff, MaxBackoff time.Duration
}

func (b Budget) withDefaults() Budget {
	if b.Total <= 0 {
		b.Total = 10 * time.Second
	}
	if b.Attempt <= 0 {
		const longest = 3 * time.Second
		b.Attempt = min(b.Total/3, longest)
	}
	if b.FirstBackoff <= 0 {
		b.FirstBackoff = 50 * time.Millisecond
	}
	if b.MaxBackoff <= 0 {
		b.MaxBackoff = time.Second
	}
	b.MaxBackoff = max(b.MaxBackoff, b.FirstBackoff)
	return b
}

// Lookup fetches one pod's facts for the plugin. It is [Client.Pod], once if the answer is good, and again after failures
// as their [Class] says until the budget is used up. Before each further attempt the kubeconfig is read again. An error is
// an [Error] that tells of all attempts; when ctx was canceled it is also context.Canceled.
func (c *Client) Lookup(ctx context.Context, key PodKey, b Budget) (sidecar.Facts, error) {
	b = b.withDefaults()
	limited, cancel := context.WithTimeout(ctx, b.Total)
	defer cancel()
	deadline, _ := limited.Deadline()
	total := time.Until(deadline)
	l := lookup{budget: b, backoff: b.FirstBackoff, deadline: deadline}
	for {
		pod, err := l.attempt(limited, c, key)
		if err == nil {
			return pod.Facts, nil
		}
		l.remember(limited, err)
		wait, again := l.pause()
		if !again || !sleep(limited, wait) {
			break
		}
	}
	failed := l.last
	failed.Exhausted = l.exhausted || limited.Err() != nil
	if errors.Is(ctx.Err(), context.Canceled) {
		canceled(&failed)
	}
	failed.Object, failed.File, failed.Attempts = key.String(), c.config.Kubeconfig, l.attempts
	failed.Elapsed = total - time.Until(deadline)
	return sidecar.Facts{}, &failed
}

// lookup is one call of [Client.Lookup].
type lookup struct {
	budget   Budget
	deadline time.Time // of the budget, or of the caller's context if that is earlier

	attempts  int
	refusals  int // failures whose class is tried a bounded number of times
	backoff   time.Duration
	exhausted bool
	last      Error
}

func (l *lookup) attempt(ctx context.Context, c *Client, key PodKey) (Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, l.budget.Attempt)
	defer cancel()
	pod, err := c.Pod(ctx, key)
	if ClassOf(err) != InvalidKey {
		l.attempts++
	}
	return pod, err
}

// remember keeps the failure that explains the look-up: an attempt that the end of the budget cut short says less than
// a complete one before it.
func (l *lookup) remember(limited context.Context, err error) {
	failed, ok := errors.AsType[*Error](err)
	if ok && (limited.Err() == nil || l.attempts <= 1) {
		l.last = *failed
	}
}

// pause decides whether another attempt follows, and after how long.
func (l *lookup) pause() (time.Duration, bool) {
	if limit := l.last.attempts(); limit > 0 {
		l.refusals++
		if l.refusals >= limit {
			return 0, false
		}
	}
	left := time.Until(l.deadline)
	wait := l.backoff/2 + rand.N(l.backoff/2+1) //nolint:gosec // spreading load needs no secrecy
	l.backoff = min(2*l.backoff, l.budget.MaxBackoff)
	wait += l.last.RetryAfter
	if wait < left {
		return wait, true
	}
	// The rest of the budget is for asking rather than for pausing, unless the server forbids it.
	if l.last.RetryAfter >= left || left < l.budget.FirstBackoff {
		l.exhausted = true
		return 0, false
	}
	return max(l.last.RetryAfter, left/2), true
}

func canceled(failed *Error) {
	cause := context.Canceled
	if failed.Class != Canceled && failed.Class != "" {
		cause = fmt.Errorf("%w; before that: %s", cause, failed.Class)
	}
	failed.Class, failed.Err, failed.Message, failed.Status, failed.Exhausted = Canceled, cause, "", 0, false
}
