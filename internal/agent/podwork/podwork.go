// Package podwork hands the pods of a watch to race repair and the audit.
//
// It promises that one worker at a time works on a pod; that pods of different UIDs never share a memory; that a change of a pod's
// addresses is reported, so that nothing is concluded from its previous network namespace; that a failed turn is retried with a back-off;
// and that a namespace is entered only if it is certain to be the pod's. It keeps of each pod only what the watch delivers.
//
// Start reading at Options and Controller.Run. turn.go has what a turn offers, pods.go the pods, policy.go the changes of the plugin's
// configuration, events.go the events on pods, settings.go the settings of all users of this package.
package podwork

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

const (
	// RetryBase is the pause after the first failure. It doubles with each further one.
	RetryBase = 500 * time.Millisecond
	// RetryMax is the longest pause, unless Options.RetryMax is set.
	RetryMax = 2 * time.Minute
)

// ErrWaits is the error of a turn that goes on with a notification. The pauses after failures go on to grow.
var ErrWaits = errors.New("waiting")

// Env is shared by all turns. Log, Events and Plugin are required.
type Env struct {
	// Clock defaults to the system's clock.
	Clock  clock.WithTickerAndDelayedExecution
	Log    *slog.Logger
	Events *eventrecorder.Recorder
	// Plugin returns the current configuration of the node's plugin.
	Plugin func() (cniconf.NetConf, error)
	// Find finds the network namespace of a pod of this node; nil where the namespaces cannot be reached.
	Find func(context.Context, sandbox.Pod) (*sandbox.Namespace, error)
	// Reported returns the latest decision about the pod whose runtime UID satisfies is; nil: none is known.
	Reported func(is func(uid string) bool) (agentapi.Report, bool)
	// Node is the node whose pods are worked on, or "" for all nodes; then no namespace can be reached.
	Node string
	// ToolPath is the search path of iptables, in the format of $PATH.
	ToolPath string
	// Host is the node of this process, for the source of events.
	Host string
}

// Options are the pods of a Controller and the work on them. M is the memory of a pod between two turns.
type Options[M any] struct {
	Env

	// Follow notifies of the pods until its context ends.
	Follow func(context.Context, kube.Listener[kube.Pod])
	// Reconcile works on a pod. After an error other than ErrPolicy and ErrWaits it is called again.
	Reconcile func(context.Context, *Turn, *M) error
	// OtherSandbox resets the memory's part about the pod's network namespace; Ended is for a namespace that is gone or about to go.
	// They, Changed and Gone are called under the lock and must not call the Controller.
	OtherSandbox, Ended func(*M)
	// Changed is called with the memory before and after a turn; Gone with the memory of a pod that was deleted or replaced.
	Changed func(before, now *M)
	Gone    func(types.NamespacedName, *M)
	// Watch receives the error of the watch, or nil when the watch works and on the first complete list.
	Watch func(err error)

	// Workers is the number of workers, 4 by default.
	Workers int
	// PodTimeout bounds a turn, 1 min by default.
	PodTimeout time.Duration
	// RetryMax is the longest pause after failures, 2 min by default.
	RetryMax time.Duration
}

// Controller keeps the pods and gives each its turns.
type Controller[M any] struct {
	Options[M]

	// queue holds each pod once and returns it to one worker at a time; retries is the back-off of failed turns.
	queue   workqueue.TypedDelayingInterface[types.NamespacedName]
	retries workqueue.TypedRateLimiter[types.NamespacedName]
	workers sync.WaitGroup

	mu sync.Mutex
	// pods has one entry per name: a pod with another UID replaces the previous one.
	pods map[types.NamespacedName]*entry[M]

	synced   chan struct{}
	syncOnce sync.Once
}

// New returns a controller that does nothing before Run.
func New[M any](o Options[M]) *Controller[M] {
	o.Workers, o.PodTimeout, o.RetryMax = cmp.Or(o.Workers, 4), cmp.Or(o.PodTimeout, time.Minute), cmp.Or(o.RetryMax, RetryMax)
	o.Clock = cmp.Or[clock.WithTickerAndDelayedExecution](o.Clock, clock.RealClock{})
	return &Controller[M]{
		Options: o,
		queue:   workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.NamespacedName]{Clock: o.Clock}),
		retries: workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](RetryBase, o.RetryMax),
		pods:    map[types.NamespacedName]*entry[M]{}, synced: make(chan struct{}),
	}
}

// Run works, and runs the others, until ctx ends. It retries failures, and waits for an unreachable API server.
func (c *Controller[M]) Run(ctx context.Context, others ...func(context.Context)) {
	defer context.AfterFunc(ctx, c.queue.ShutDown)()
	before := c.policy(ctx, "")
	for range c.Workers {
		c.workers.Go(func() { c.runWorker(ctx) })
	}
	c.workers.Go(func() { c.watchPolicy(ctx, before) })
	for _, work := range others {
		c.workers.Go(func() { work(ctx) })
	}
	_ = c.watch(ctx)
	c.workers.Wait()
}

// runWorker processes the queue after the initial list of pods, because the owner of an address is known only from all pods. After
// ShutDown the queue still returns its items; the worker drops them.
func (c *Controller[M]) runWorker(ctx context.Context) {
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

// process gives a pod its turn, and enqueues the pod again after an error.
func (c *Controller[M]) process(ctx context.Context, k types.NamespacedName) {
	err := c.turn(ctx, k)
	switch {
	case err == nil || errors.Is(err, ErrPolicy):
		c.retries.Forget(k)
		return
	case errors.Is(err, ErrWaits):
		return
	}
	if ctx.Err() == nil {
		c.Log.WarnContext(ctx, "the work on a pod failed, and is retried", slog.String("pod", k.String()), slog.String("error", err.Error()))
	}
	c.queue.AddAfter(k, max(kube.RetryAfter(err), c.retries.When(k)))
}

// turn works on one version of a pod.
func (c *Controller[M]) turn(ctx context.Context, k types.NamespacedName) error {
	c.mu.Lock()
	e := c.pods[k]
	if e == nil {
		c.mu.Unlock()
		return nil
	}
	t, memory := c.newTurn(e.pod), e.memory // only this turn follows the memory's pointers
	c.mu.Unlock()
	defer c.remember(t, &memory)
	ctx, cancel := c.withTimeout(ctx, c.PodTimeout, "the work on the pod takes more than")
	defer cancel()
	defer t.close()
	t.decide()
	return c.Reconcile(ctx, t, &memory)
}

// remember stores the memory of a turn, unless the pod's UID has changed.
func (c *Controller[M]) remember(t *Turn, memory *M) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, end := range t.atEnd {
		defer end()
	}
	e := c.pods[t.Pod.Key()]
	if e == nil || e.pod.Facts.UID != t.Pod.Facts.UID {
		return
	}
	c.Changed(&e.memory, memory)
	e.memory = *memory
	if !sameAddresses(e.pod, t.Pod) {
		c.OtherSandbox(&e.memory) // the turn worked on the previous sandbox
	}
	if !Inspectable(e.pod) {
		c.Ended(&e.memory)
	}
}

// withTimeout cancels ctx after d, by the controller's clock. The cause's text is problem followed by d.
func (e *Env) withTimeout(ctx context.Context, d time.Duration, problem string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := e.Clock.AfterFunc(d, func() { cancel(fmt.Errorf("%s %s", problem, d)) })
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

// Sleep waits for d, by the controller's clock, or the end of ctx.
func (e *Env) Sleep(ctx context.Context, d time.Duration) {
	if d <= 0 { // a fake clock would wait
		return
	}
	select {
	case <-ctx.Done():
	case <-e.Clock.After(d):
	}
}

// Once gives each present pod a turn, with up to tries attempts, in at most the time within. The error names each pod that failed.
func (c *Controller[M]) Once(ctx context.Context, tries int, within time.Duration) error {
	defer c.queue.ShutDown()
	defer c.workers.Wait()
	ctx, cancel := c.withTimeout(ctx, within, "it is not done after")
	defer cancel()
	var watchErr error
	c.workers.Go(func() { watchErr = c.watch(ctx) })
	select {
	case <-ctx.Done():
		c.workers.Wait()
		return errors.Join(fmt.Errorf("waiting for the pods: %w", context.Cause(ctx)), watchErr)
	case <-c.synced:
	}
	var errs []error
	for _, k := range c.Keys() {
		err := c.turn(ctx, k)
		for pause := RetryBase; err != nil && pause < RetryBase<<(tries-1) && !errors.Is(err, ErrPolicy) && ctx.Err() == nil; pause *= 2 {
			c.Sleep(ctx, max(kube.RetryAfter(err), pause))
			err = c.turn(ctx, k)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s: %w", k, err))
		}
	}
	return errors.Join(errs...)
}

// decide sets the plugin's configuration and its decision about the pod.
func (t *Turn) decide() {
	var err error
	if t.Conf, err = t.Plugin(); err != nil {
		t.Conf.Problems, t.Err = err, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	t.Decision = sidecar.Decide(t.Pod.Facts, t.Conf.Policy())
	t.Ambient = t.Decision.Outcome == sidecar.Enrol
}
