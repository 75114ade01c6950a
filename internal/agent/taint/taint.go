// Package taint is the taint controller: it removes a taint from the nodes where the plugin's agent is ready, and adds it to
// the nodes where the agent is not ready.
//
// It promises that no decision precedes the sync of all caches; that one replica of several works at a time; that a node is
// changed by a JSON patch which tests the values behind the decision, so that other writers lose nothing; that a node in its
// desired state costs no request; and that a failed change is retried with back-off for as long as it is needed. Bad
// requirements in a ConfigMap leave the last good ones in force.
//
// It never decides by itself (core/readiness does), updates a whole node, or changes another taint. It reaches the API only
// through internal/kube.
//
// Start reading at Run; leader.go is the election, leadership.go a leader's caches, work.go the work on one node.
package taint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

// The parts of the controller's health. docs/errors.md has the comments.
const (
	// One replica has the lease. If not, no node is changed: the API server is away, or the account has no right to leases in that
	// namespace.
	PartElection health.PartName = "election"
	// The ConfigMap of the legacy mode was read. If not, it is missing or invalid, and no node is changed.
	PartRequirements health.PartName = "requirements"
	// Nodes and pods are known and watched. If not, the API server is away, or the account has no right to `list` and `watch` them.
	PartCaches health.PartName = "caches"
	// Listed once the API server has refused a change of a node: grant `patch` on `nodes`, and on `nodes/status` for
	// `--node-condition`.
	PartWrites health.PartName = "writes"
)

// Parts returns the parts that must be ready from the start.
func Parts() []health.PartName {
	return []health.PartName{PartElection, PartRequirements, PartCaches}
}

// Component is the source of the controller's events.
const Component = "istio-cni-taint"

// ConfigMap names the object that has the requirements, in the legacy format.
type ConfigMap struct{ Namespace, Name string }

const (
	// retry is the pause after a failed change, doubled up to maxRetry.
	retry    = 100 * time.Millisecond
	maxRetry = time.Minute
	workers  = 4
)

// The reasons of events. docs/errors.md has the comments.
const (
	// The taint was put on a running node (`--add`); the message has the reason from the table above.
	eventTainted kube.EventReason = "MeshCNINotReady"
	// Normal: the taint was removed from the node.
	eventUntainted kube.EventReason = "MeshCNIReady"
	// On the ConfigMap, which is missing or cannot be used; the message names the key.
	eventRequirements kube.EventReason = "InvalidTaintRequirements"
)

// Options are the dependencies and settings of a controller. API, Log, Health and Metrics are required.
type Options struct {
	API *kube.Client
	// Clock defaults to the system's clock.
	Clock   clock.WithTicker
	Log     *slog.Logger
	Health  *health.State
	Metrics *metrics.Taint

	// Events records events about nodes and the ConfigMap; nil drops them.
	Events *eventrecorder.Recorder

	// Policy configures the decisions; a ConfigMap with a name replaces its requirements. The key and effect of its taint are required.
	Policy    readiness.Policy
	ConfigMap ConfigMap
	// Lease is the lock of the election, nil for a single controller.
	Lease *Lease
	// Condition is the type of the node condition to publish, empty for none.
	Condition string
	// Host is the node of this process, for events.
	Host string
}

// Run works until ctx ends: it acquires the lease, works while it holds the lease, and releases the lease.
func Run(ctx context.Context, o Options) {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	lead := func(ctx context.Context) {
		o.Metrics.SetLeader(true)
		defer o.Metrics.SetLeader(false)
		newLeadership(o).run(ctx)
	}
	if o.Lease == nil {
		o.Health.Ready(PartElection)
		lead(ctx)
		return
	}
	o.standby()
	elect(ctx, o, lead)
}

// event records an event of the controller.
func (o Options) event(object kube.ObjectRef, kind kube.EventType, reason kube.EventReason, message string) {
	o.Events.Record(kube.Event{Object: object, Reason: reason, Message: message, Type: kind, Component: Component, Host: o.Host})
}

// sleep waits for d or the end of ctx.
func (o Options) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-o.Clock.After(d):
	}
}

// standby reports a replica that waits for the lease as ready.
func (o Options) standby() {
	o.Health.Ready(PartRequirements)
	o.Health.Ready(PartCaches)
}

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
	t.mu.Lock()
	names := slices.Sorted(maps.Keys(t.nodes))
	t.mu.Unlock()
	for _, name := range names {
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
