package taint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

const (
	// tries bounds the attempts of Once per node.
	tries = 5
	// timeout bounds Once and Plan.
	timeout = time.Minute
)

// Once brings each node to its desired state within a minute, and ends. It acquires no lease and decides once, without a grace
// period. The error names the nodes that failed.
func Once(ctx context.Context, o Options) error {
	o.Policy.GracePeriod = 0
	return once(ctx, o, func(ctx context.Context, t *leadership, name string) error {
		backoff := wait.Backoff{Duration: retry, Factor: 2, Steps: tries - 1}
		for {
			err := t.reconcile(ctx, name)
			if err == nil || backoff.Steps == 0 || ctx.Err() != nil {
				return err
			}
			t.options.sleep(ctx, max(min(kube.RetryAfter(err), maxRetry), backoff.Step()))
		}
	})
}

// Plan returns for each node the change that Once would make, in the order of the nodes' names. It changes nothing.
func Plan(ctx context.Context, o Options) ([]string, error) {
	o.Policy.GracePeriod, o.Events = 0, nil
	var lines []string
	err := once(ctx, o, func(ctx context.Context, t *leadership, name string) error {
		if _, d, known := t.decide(ctx, name); known {
			lines = append(lines, line(name, d))
		}
		return nil
	})
	return lines, err
}

func line(name string, d readiness.Decision) string {
	text := fmt.Sprintf("node %s: %s: %s", name, d.Action, d.Reason.Sentence())
	if d.Requirement != "" {
		text += fmt.Sprintf(" (requirement %q)", d.Requirement)
	}
	if d.NoActionReason != "" {
		text += " (" + string(d.NoActionReason) + ")"
	}
	return text
}

// once waits until the caches are synced and calls do for each node.
func once(ctx context.Context, o Options, do func(context.Context, *leadership, string) error) error {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	ctx, cancel := context.WithCancelCause(ctx)
	t := newLeadership(o)
	defer t.queue.ShutDown()
	// The reflectors end before the leadership does.
	defer t.work.Wait()
	defer cancel(nil)
	t.work.Go(func() {
		o.sleep(ctx, timeout)
		cancel(fmt.Errorf("it is not done after %s", timeout))
	})
	t.fatal = func(err error) { cancel(err) }
	t.startReflectors(ctx)
	select {
	case <-ctx.Done():
		return fmt.Errorf("waiting for nodes and pods: %w", context.Cause(ctx))
	case <-t.synced:
	}
	var errs []error
	for _, name := range t.names() {
		err := do(ctx, t, name)
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			break
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("node %q: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (t *leadership) names() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.nodes))
}
