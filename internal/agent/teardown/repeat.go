package teardown

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
)

// The time bounds of a decision and of its parts.
const (
	// Total is the time for the whole decision.
	Total = 5 * time.Second
	// attempt bounds one request, so that a hanging request leaves time for others.
	attempt = Total / 3
	// pause is the time between two equal requests.
	pause = Total / 10
	// confirmation is the pause before a refused request is repeated: a token that was just rotated has arrived by then.
	confirmation = Total / 5
)

// errUnconfirmed is a refusal without a second, equal refusal.
var errUnconfirmed = errors.New("a refusal that was not confirmed")

// repeat repeats a request until a reliable answer, or until ctx ends. It retries a transient failure. A refusal of one of the
// confirmed classes is an answer the second time, however many transient failures lie between. Any other error is an answer.
func repeat[T any](ctx context.Context, confirmed []kube.Class, request func(context.Context) (T, error)) (T, error) {
	var none T
	var refused kube.Class
	var before error
	for {
		limited, cancel := context.WithTimeout(ctx, attempt)
		answer, err := request(limited)
		cancel()
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil && before != nil {
			// The error of an expired ctx is weaker evidence than the previous error.
			return none, unconfirmed(refused, before)
		}
		wait := pause
		failed, ok := errors.AsType[*kube.Error](err)
		switch {
		case !ok:
			return none, err
		case failed.Transient():
			wait = max(wait, failed.RetryAfter)
		case slices.Contains(confirmed, failed.Class) && failed.Class != refused:
			refused, wait = failed.Class, confirmation
		default:
			return none, err
		}
		if !sleep(ctx, wait) {
			return none, unconfirmed(refused, err)
		}
		before = err
	}
}

// sleep waits. It returns false at once if ctx ends first.
func sleep(ctx context.Context, wait time.Duration) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
		return false
	}
	pausing, end := context.WithTimeout(ctx, wait)
	defer end()
	<-pausing.Done()
	return ctx.Err() == nil
}

// unconfirmed marks an error after a single refusal.
func unconfirmed(refused kube.Class, err error) error {
	if refused == "" {
		return err
	}
	return fmt.Errorf("%w: %w", errUnconfirmed, err)
}
