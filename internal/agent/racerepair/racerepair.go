// Package racerepair repairs pods that run without redirection: it redirects them in place, deletes them, labels them or, at
// the least, reports them.
//
// It promises that an action on a pod rests on the plugin's own decision about the pod and uses the plugin's own code to write
// rules; that no action reaches a pod of another UID than the classified one; that a finished action is not repeated, also by
// the next agent; that every action and every failure is an Event on the pod and a count; and that a pod whose namespace is not
// certain is not touched. It never touches the namespace of the host, never delays other work on the node by a wait for the API
// server, and keeps of each pod only the fields that decide. While the plugin's configuration cannot be used no pod is changed:
// the decision about the pod is unknown then.
//
// The audit inspects the pods that run: one at a time, a share of a core at most, and never in the way of a repair. It promises
// one event for each change of a pod's state, none for a pod that ends, and holds no namespace open between two inspections.
//
// Start reading at Run. pods.go has the cache of pods, work.go the job of one pod, actions.go the actions, report.go the
// events, policy.go the changes of the plugin's configuration. Of the audit, audit.go has the states, observe.go the
// inspection and the repair, schedule.go the order of the pods, serve.go the answers, asked.go their limits.
package racerepair

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Part is the name of race repair in a health.State. docs/errors.md has the comment.
const (
	// The watch of the pods works. If not, no pod is repaired: the reason is the API server's answer.
	Part health.PartName = "pods"
)

const (
	// retryBase is the pause after a failure, doubled up to retryMax.
	retryBase = 500 * time.Millisecond
	retryMax  = 2 * time.Minute
	// confirmAfter is the time for which a pod must be without rules before it is deleted or labelled for that alone.
	confirmAfter = 3 * time.Second
	// onceTries bounds the attempts of Once per pod, as in the reference, onceTimeout their time for all pods.
	onceTries   = 5
	onceTimeout = 2 * time.Minute
)

// Options are the dependencies and settings. API, Events, Log, Metrics and Plugin are required.
type Options struct {
	API    *kube.Client
	Events *eventrecorder.Recorder
	// Clock defaults to the system's clock.
	Clock   clock.WithTickerAndDelayedExecution
	Log     *slog.Logger
	Metrics *metrics.Repair
	// Health, if any, receives the state of the watch of the pods.
	Health *health.State

	// Follow notifies of the trimmed pods of the node if the agent watches them already; nil starts a watch.
	Follow func(context.Context, kube.Listener[kube.Pod])

	Settings Settings
	// Audit are the settings of the audit; AuditOnly leaves repairs to another controller.
	Audit     AuditSettings
	AuditOnly bool
	// Reports reports whether another controller records events about the pod's rules; nil if there is none.
	Reports func(kube.Pod) bool
	// AuditedNode is the node whose pods another controller audits, and counts by state; "" is none.
	AuditedNode string
	// Processes lists the processes of the node's pods by pod UID, nil where they cannot be seen.
	Processes func(context.Context) (map[string][]sandbox.Process, error)
	// Plugin returns the current configuration of the node's plugin.
	Plugin func() (cniconf.NetConf, error)
	// Reported returns the latest decision about a pod, by whether a runtime's UID is the pod's; nil knows none.
	Reported func(is func(uid string) bool) (agentapi.Report, bool)
	// Find finds the network namespace of a pod of this node; nil where the namespaces cannot be reached.
	Find func(context.Context, sandbox.Pod) (*sandbox.Namespace, error)
	// ToolPath is the search path of iptables, as in $PATH.
	ToolPath string
	// Host is the node of this process, for events.
	Host string

	// Workers is the number of workers, 4 by default.
	Workers int
	// PodTimeout bounds the job of one pod, 1 min by default.
	PodTimeout time.Duration
}

// Controller is a running race repair and audit.
type Controller struct{ *controller }

// New returns a controller that does nothing before Run.
func New(o Options) *Controller { return &Controller{newController(o)} }

// Run runs until ctx ends. It retries failures, and waits for an unreachable API server.
func (c *Controller) Run(ctx context.Context) { c.run(ctx) }

// Run runs a new controller until ctx ends.
func Run(ctx context.Context, o Options) { New(o).Run(ctx) }

type controller struct {
	Options

	confirmAfter time.Duration
	// queue has each pod once, and returns it to one worker at a time; retries is the back-off of pods that failed.
	queue   workqueue.TypedDelayingInterface[types.NamespacedName]
	retries workqueue.TypedRateLimiter[types.NamespacedName]
	workers sync.WaitGroup
	// deletions is the token bucket of deletions, budget that of the time of the audit's inspections, asked those of inspections for
	// requests.
	deletions, budget *rate.Limiter
	asked             map[Way]*rate.Limiter

	mu sync.Mutex
	// pods have one entry per name: a pod of another UID replaces the previous one.
	pods map[types.NamespacedName]*entry

	processes processes
	// wake ends the idle time of the schedule, checks bounds the inspections that requests have caused, ended ends their waits.
	wake, checks, ended chan struct{}
	// traced are the packet traces of pods.
	traced map[types.NamespacedName]*tracing
	// unpublished reports that the right to publish the condition is missing, which is logged once.
	unpublished atomic.Bool
	// refused is set after the first refusal of a deletion or label beside repair in place, which alone is logged.
	refused atomic.Bool

	synced   chan struct{}
	syncOnce sync.Once
}

func newController(o Options) *controller {
	o.Health = cmp.Or(o.Health, health.NewState(health.Options{}))
	o.Workers, o.PodTimeout = cmp.Or(o.Workers, 4), cmp.Or(o.PodTimeout, time.Minute)
	o.Clock = cmp.Or[clock.WithTickerAndDelayedExecution](o.Clock, clock.RealClock{})
	return &controller{
		Options: o, confirmAfter: confirmAfter,
		queue:     workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.NamespacedName]{Clock: o.Clock}),
		retries:   workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](retryBase, retryMax),
		deletions: rate.NewLimiter(rate.Every(deletionInterval), deletionBurst), budget: newBudget(duty, burst), asked: newAsked(),
		pods: map[types.NamespacedName]*entry{}, traced: map[types.NamespacedName]*tracing{}, synced: make(chan struct{}),
		wake: make(chan struct{}, 1), checks: make(chan struct{}, maxChecks), ended: make(chan struct{}),
	}
}

func (c *controller) run(ctx context.Context) {
	defer context.AfterFunc(ctx, c.queue.ShutDown)()
	defer close(c.ended)
	before := c.policy(ctx, "")
	for range c.Workers {
		c.workers.Go(func() { c.runWorker(ctx) })
	}
	c.workers.Go(func() { c.watchPolicy(ctx, before) })
	if c.Audit.Interval > 0 {
		c.workers.Go(func() { c.schedule(ctx) })
	}
	_ = c.watch(ctx)
	c.workers.Wait()
}

// runWorker processes the queue after the initial list of pods, as all pods decide whose an address is. A queue after ShutDown
// still returns its items; the worker drops them.
func (c *controller) runWorker(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-c.synced:
	}
	for {
		k, shutdown := c.queue.Get()
		if shutdown || ctx.Err() != nil {
			return
		}
		c.process(ctx, k)
		c.queue.Done(k)
	}
}

// process reconciles a pod, and enqueues the pod again after an error.
func (c *controller) process(ctx context.Context, k types.NamespacedName) {
	err := c.reconcile(ctx, k)
	if err == nil || errors.Is(err, errPolicy) {
		c.retries.Forget(k)
		return
	}
	if ctx.Err() == nil {
		c.Log.WarnContext(ctx, "the work on a pod failed, and is retried", slog.String("pod", k.String()), slog.String("error", err.Error()))
	}
	c.queue.AddAfter(k, max(kube.RetryAfter(err), c.retries.When(k)))
}

// sleep waits for d or the end of ctx.
func (c *controller) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-c.Clock.After(d):
	}
}

// withTimeout cancels ctx after d, by the controller's clock. The text of the cause is problem and d.
func (c *controller) withTimeout(ctx context.Context, d time.Duration, problem string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := c.Clock.AfterFunc(d, func() { cancel(fmt.Errorf("%s %s", problem, d)) })
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

// Once repairs each present pod, within two minutes. The error names each pod that could not be repaired.
func Once(ctx context.Context, o Options) error {
	c := newController(o)
	defer c.queue.ShutDown()
	defer c.workers.Wait()
	ctx, cancel := c.withTimeout(ctx, onceTimeout, "it is not done after")
	defer cancel()
	c.confirmAfter = 0 // Once inspects each pod once
	c.deletions.SetLimit(rate.Inf)
	var watchErr error
	c.workers.Go(func() { watchErr = c.watch(ctx) })
	select {
	case <-ctx.Done():
		c.workers.Wait()
		return errors.Join(fmt.Errorf("waiting for the pods: %w", context.Cause(ctx)), watchErr)
	case <-c.synced:
	}
	var errs []error
	for _, k := range c.keys() {
		backoff := wait.Backoff{Duration: retryBase, Factor: 2, Steps: onceTries - 1}
		err := c.reconcile(ctx, k)
		for err != nil && backoff.Steps > 0 && !errors.Is(err, errPolicy) && ctx.Err() == nil {
			c.sleep(ctx, max(kube.RetryAfter(err), backoff.Step()))
			err = c.reconcile(ctx, k)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s: %w", k, err))
		}
	}
	return errors.Join(errs...)
}
