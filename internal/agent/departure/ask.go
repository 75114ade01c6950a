package departure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
)

// errUnconfirmed is a refusal that could not be asked about again.
var errUnconfirmed = errors.New("a refusal that was not confirmed")

// ask asks until there is an answer to rely on, or ctx ends. A transient failure is tried again; a refusal of one of the
// confirmed classes counts when it comes a second time, however many transient failures lie between; any other error is an
// answer.
func ask[T any](
	ctx context.Context, b Budget, confirmed []kube.Class, request func(context.Context) (T, error),
) (T, error) {
	var none T
	var refused kube.Class
	var before error
	for {
		answer, err := once(ctx, b.Attempt, request)
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil && before != nil {
			// What the end of the time cut short says less than the whole answer before it.
			return none, unconfirmed(refused, before)
		}
		wait := b.Pause
		failed, ok := errors.AsType[*kube.Error](err)
		switch {
		case !ok:
			return none, err
		case failed.Transient():
			wait = max(wait, failed.RetryAfter)
		case slices.Contains(confirmed, failed.Class) && failed.Class != refused:
			refused = failed.Class
			wait = b.Confirm
		default:
			return none, err
		}
		if !sleep(ctx, wait) {
			return none, unconfirmed(refused, err)
		}
		before = err
	}
}

// unconfirmed marks an error after a refusal that has not come twice.
func unconfirmed(refused kube.Class, err error) error {
	if refused == "" {
		return err
	}
	return fmt.Errorf("%w: %w", errUnconfirmed, err)
}

func once[T any](ctx context.Context, limit time.Duration, request func(context.Context) (T, error)) (T, error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return request(limited)
}

// sleep tells whether ctx is still alive after the wait; it does not wait for what it cannot live to see.
func sleep(ctx context.Context, wait time.Duration) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
		return false
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
