// Package podrepair looks after pods that run without redirection: it redirects them in place, deletes them, labels them
// or, at the least, reports them.
//
// It promises that what is done to a pod rests on the plugin's own decision about it and uses the plugin's own way of
// writing rules; that nothing is done to a pod of another UID than the one that was judged; that work which is done is
// not done again, also by the next agent; that every action and every failure is an Event on the pod and a count; and
// that a pod whose namespace cannot be told for sure is not touched. It never touches the namespace of the host, never
// waits for the API server before anything else on the node can go on, and keeps of each pod only what decides. While the
// plugin's configuration cannot be used no pod is changed: what it says about the pod is not known then.
//
// Start reading at Run. work.go has what becomes of a pod, inplace.go, remove.go and label.go the actions, claim.go whose a
// namespace is, report.go the events, policy.go what happens when the plugin is told something else.
package podrepair

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/podns"
)

// Part is what repair is called in a health.State.
const Part = "pods"

// Options are what repair works with. API, Events, Log, Metrics and Plugin are required.
type Options struct {
	API    *kube.Client
	Events *kube.EventRecorder
	// Clock is the system's by default.
	Clock   clock.WithTickerAndDelayedExecution
	Log     *slog.Logger
	Metrics *metrics.Repair
	// Health is told whether the pods are in sight, unless nil.
	Health *health.State

	// Follow tells of the pods of the node, where somebody keeps them in sight already; nil where they are to be followed here.
	Follow func(context.Context, kube.Listener[kube.Pod])

	Settings Settings
	// Plugin is what the plugin of the node is told now.
	Plugin func() (cniconf.NetConf, error)
	// Find finds the network namespace of a pod of this node; nil where those cannot be reached.
	Find func(context.Context, podns.Pod) (*podns.Namespace, error)
	// ToolPath is where iptables is looked for, as in $PATH.
	ToolPath string
	// Host is the node where this runs, for events.
	Host string

	// Retry is the pause after a failure, doubled up to MaxRetry; 500 ms and 2 min by default.
	Retry, MaxRetry time.Duration
	// Confirm is for how long a pod must be without rules before it is deleted or labelled for that alone, 3 s by default.
	Confirm time.Duration
	// Workers is how many pods are worked on at the same time, 4 by default.
	Workers int
	// Patience bounds Once, 2 min by default.
	Patience time.Duration
	// PolicyEvery is how often Plugin is asked whether it says something new, 10 s by default: all pods are judged anew then.
	PolicyEvery time.Duration
	// PodLimit bounds the work on one pod, 1 min by default: whatever hangs must not keep the other pods waiting.
	PodLimit time.Duration
}

func (o Options) withDefaults() Options {
	for _, setting := range []struct {
		is *time.Duration
		by time.Duration
	}{
		{&o.Retry, 500 * time.Millisecond},
		{&o.MaxRetry, 2 * time.Minute},
		{&o.Confirm, 3 * time.Second},
		{&o.Patience, 2 * time.Minute},
		{&o.PolicyEvery, 10 * time.Second},
		{&o.PodLimit, time.Minute},
	} {
		if *setting.is <= 0 {
			*setting.is = setting.by
		}
	}
	if o.Workers <= 0 {
		o.Workers = 4
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return o
}

// entry is a pod as it was seen last, and what is known of it besides.
type entry struct {
	pod kube.Pod
	memory
}

// memory is what is remembered of a pod of one UID.
type memory struct {
	// removed says that the API server has accepted that the pod goes.
	removed bool
	state   metrics.PodState
	// repairedAt is when its rules were last seen or made as wanted.
	repairedAt time.Time
	// missingSince is since when its rules are known to be missing.
	missingSince time.Time
	// told is what was reported of it.
	told map[string]bool
	// failures is how often in a row its namespace could not be looked at.
	failures int
	// deleteAfter is when it may be deleted, zero as long as there was no reason for that.
	deleteAfter time.Time
}

// otherSandbox forgets what was known of the namespace.
func (m *memory) otherSandbox() {
	m.repairedAt, m.missingSince, m.failures = time.Time{}, time.Time{}, 0
}

// controller is race repair at work.
type controller struct {
	Options

	// queue has each pod once, and gives it to one worker at a time; retries says how long a pod rests that failed.
	queue   workqueue.TypedDelayingInterface[types.NamespacedName]
	retries workqueue.TypedRateLimiter[types.NamespacedName]
	work    sync.WaitGroup

	// removals is the token bucket of deletions.
	removals *rate.Limiter

	mu sync.Mutex
	// pods have one of each name: a pod of another UID takes the place of the one before.
	pods map[types.NamespacedName]*entry

	synced   chan struct{}
	syncOnce sync.Once
}

func newController(o Options) *controller {
	o = o.withDefaults()
	return &controller{
		Options: o, queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.NamespacedName]{Clock: o.Clock}),
		retries:  workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](o.Retry, o.MaxRetry),
		removals: rate.NewLimiter(rate.Every(removalInterval), removalBurst),
		pods:     map[types.NamespacedName]*entry{}, synced: make(chan struct{}),
	}
}

// Run looks after pods until ctx ends. What fails is tried again; an API server that is away is waited for.
func Run(ctx context.Context, o Options) {
	c := newController(o)
	defer context.AfterFunc(ctx, c.queue.ShutDown)()
	said := c.policy()
	c.logProblems(ctx)
	for range c.Workers {
		c.work.Go(func() { c.runWorker(ctx) })
	}
	c.work.Go(func() { c.watchPolicy(ctx, said) })
	c.follow(ctx)
	c.work.Wait()
	c.forgetAll()
}

// runWorker works off the queue once all pods are known, because they say whose an address is.
func (c *controller) runWorker(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-c.synced:
	}
	for c.processNext(ctx) {
	}
}

// processNext works on the next pod of the queue. It reports whether there may be more: a queue that is shut down still gives what
// it has, which is not worked on any more.
func (c *controller) processNext(ctx context.Context) bool {
	k, shutdown := c.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer c.queue.Done(k)
	wait, err := c.settle(ctx, k)
	if err == nil || errors.Is(err, errPolicy) {
		c.retries.Forget(k)
		return true
	}
	if ctx.Err() == nil {
		c.Log.WarnContext(ctx, "a pod could not be looked after, and will be again", slog.String("pod", k.String()),
			slog.String("error", err.Error()))
	}
	c.queue.AddAfter(k, max(wait, c.retries.When(k)))
	return true
}

// withPodLimit ends ctx when the time for a pod is over, by the controller's clock.
func (c *controller) withPodLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := c.Clock.AfterFunc(c.PodLimit, func() { cancel(fmt.Errorf("the work on the pod takes more than %s", c.PodLimit)) })
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

// sleep is a pause that ends with ctx.
func (c *controller) sleep(ctx context.Context, d time.Duration) {
	timer := c.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C():
	}
}

// Once looks after each pod that there is now, and ends. The error names each pod that could not be helped, within
// Options.Patience.
func Once(ctx context.Context, o Options) error {
	c := newController(o)
	defer c.queue.ShutDown()
	ctx, cancel := context.WithTimeoutCause(ctx, c.Patience, fmt.Errorf("it is not done after %s", c.Patience))
	defer cancel()
	c.Confirm = 0 // there is no second look
	c.removals.SetLimit(rate.Inf)
	follow, end := context.WithCancel(ctx)
	var troubles error
	c.work.Go(func() { troubles = c.followUntil(follow) })
	defer func() {
		end()
		c.work.Wait()
	}()
	select {
	case <-ctx.Done():
		end()
		c.work.Wait()
		return errors.Join(fmt.Errorf("waiting for the pods: %w", context.Cause(ctx)), troubles)
	case <-c.synced:
	}
	var errs []error
	for _, k := range c.keys() {
		if err := c.insist(ctx, k); err != nil {
			errs = append(errs, fmt.Errorf("pod %s: %w", k, err))
		}
	}
	return errors.Join(errs...)
}

// tries is how often Once tries a pod, as the reference does.
const tries = 5

func (c *controller) insist(ctx context.Context, k types.NamespacedName) error {
	backoff := wait.Backoff{Duration: c.Retry, Factor: 2, Steps: tries - 1}
	for {
		after, err := c.settle(ctx, k)
		if err == nil || backoff.Steps == 0 || errors.Is(err, errPolicy) || ctx.Err() != nil {
			return err
		}
		c.sleep(ctx, max(after, backoff.Step()))
	}
}
