// Package enrol brings the pods of ambient mode into the mesh and takes them out again.
//
// It promises that the annotation of a pod says enabled only after its rules are written, ztunnel has acknowledged it and the probe set
// has its addresses, and that a release takes this value away first; that a failed step is repeated until it succeeds or is not wanted
// any more; that no pod waits for the ztunnel, the API server or the rules of another pod; that a killed agent leaves nothing that the
// next one does not find, by the annotation; and that it starts no process. Each turn compares what is wanted with what is there.
//
// Start reading at Controller. entry.go has the state of a pod, turn.go its steps, annotation.go its annotation, find.go the search for
// namespaces, start.go the start.
package enrol

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/probes"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Options are the dependencies. All are required.
type Options struct {
	podwork.Env

	API *kube.Client
	// Follow notifies of the pods of the node; Pod returns a pod that Follow has notified of, or soon will.
	Follow func(context.Context, kube.Listener[kube.Pod])
	Pod    func(context.Context, kube.PodRef) (kube.Pod, error)
	// Places are where the namespaces of pods are. Host is the node's own namespace.
	Places   sandbox.Places
	Host     netns.Inode
	Ztunnels *ztunnels.Server
	Probes   *probes.Keeper
	// TrustRules leaves the rules of pods that are enrolled at the start as they are.
	TrustRules bool
	// SystemNamespace is the namespace of ztunnel's own pods, which are never enrolled.
	SystemNamespace string
	// Failed counts a failed try of a step.
	Failed func(metrics.AmbientStep)
	// Moved is called when the last step of a wanted pod is done, and when one is missing again, such as after the end of ztunnel.
	Moved func(types.NamespacedName)
}

const (
	// retryMax is the longest pause between two attempts. A pod in creation waits for them.
	retryMax = 5 * time.Second
	// patchTimeout bounds a request to the API server, maxPatches the concurrent ones.
	patchTimeout, maxPatches = 10 * time.Second, 8
	// margin is the time in which an answer reaches a plugin before it hangs up: it would not learn what is missing.
	margin = 500 * time.Millisecond
	// referenceTimeout is the time that Istio's plugin waits. It sends no UID.
	referenceTimeout = 5 * time.Second
)

// Controller enrols and releases the pods of a node.
type Controller struct {
	Options

	pods *podwork.Controller[struct{}]
	// writes are the annotations that the API server is to be asked for.
	writes *workqueue.Typed[request]
	// primed is closed when the snapshot for ztunnel is complete; until then no pod has a turn.
	primed chan struct{}

	mu      sync.Mutex
	entries map[string]*entry // by UID
	// lost are the UIDs of the pods whose namespace is searched; wake begins a search.
	lost map[string]bool
	wake chan struct{}
}

// New returns a Controller that does nothing before Run. The changes of o.Ztunnels and o.Probes go to Notify.
func New(o Options) *Controller {
	c := &Controller{
		Options: o, writes: workqueue.NewTyped[request](), primed: make(chan struct{}), entries: map[string]*entry{},
		lost: map[string]bool{}, wake: make(chan struct{}, 1),
	}
	nothing := func(*struct{}) {}
	c.pods = podwork.New(podwork.Options[struct{}]{
		Env: o.Env, Follow: c.follow, Reconcile: c.reconcile, RetryMax: retryMax,
		OtherSandbox: nothing, Ended: nothing, Changed: func(_, _ *struct{}) {}, Gone: func(types.NamespacedName, *struct{}) {}, Watch: func(error) {},
	})
	return c
}

// Run works until ctx ends. The rules, the probe set and the annotations stay.
func (c *Controller) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, c.writes.ShutDown)()
	var parts sync.WaitGroup
	parts.Go(func() { c.Probes.Run(ctx) })
	for range maxPatches {
		parts.Go(func() { c.runWrites(ctx) })
	}
	parts.Go(func() {
		if c.prime(ctx) {
			c.Ztunnels.Serve(ctx)
		}
	})
	c.pods.Run(ctx, c.find)
	parts.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, e := range c.entries {
		e.close(func() {})
		delete(c.entries, uid)
	}
}

// Primed is closed when the pods of the node are known, and ztunnel may connect.
func (c *Controller) Primed() <-chan struct{} { return c.primed }

// Notify gives a pod a turn.
func (c *Controller) Notify(uid string) {
	if e := c.entry(uid); e != nil {
		c.pods.Enqueue(e.key)
	}
}

func (c *Controller) entry(uid string) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries[uid]
}

// errNotEligible is the error for a pod that ambient mode does not serve. Its plugin and this agent saw different labels, so the next
// attempt of the kubelet decides anew.
var errNotEligible = errors.New("the pod is not eligible for ambient mode")

// Add enrols a pod in creation. It returns when the pod is enrolled in the event's namespace; the error names the missing step.
func (c *Controller) Add(ctx context.Context, ev agentapi.Event) error {
	limit := agentapi.EventTimeout
	if ev.PodUID == "" {
		limit = referenceTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit-margin)
	defer cancel()
	pod, err := c.Pod(ctx, kube.PodRef{Namespace: ev.PodNamespace, Name: ev.PodName, UID: ev.PodUID})
	if err != nil {
		return fmt.Errorf("pod %s/%s: %w", ev.PodNamespace, ev.PodName, err)
	}
	conf, err := c.Plugin()
	if err != nil {
		return err
	}
	if d := sidecar.Decide(pod.Facts, conf.Policy()); d.Outcome != sidecar.Enrol {
		return fmt.Errorf("pod %s: %w: %s", pod.Key(), errNotEligible, d.Reason.Sentence())
	}
	space, err := c.open(ev.Netns)
	if err != nil {
		return fmt.Errorf("pod %s: %w", pod.Key(), err)
	}
	e := c.entry(pod.Facts.UID)
	if e == nil {
		space.Close()
		return fmt.Errorf("pod %s: it is gone", pod.Key())
	}
	inode := space.Inode()
	e.offered(&offer{space: space, addresses: ev.Addresses()})
	c.pods.Enqueue(e.key)
	return e.wait(ctx, inode)
}

// open opens the namespace at a path of the node, which must not be the node's own.
func (c *Controller) open(path string) (*netns.Namespace, error) {
	space, err := c.Places.Open(path)
	if err != nil {
		return nil, err
	}
	host, err := space.IsHost()
	if err == nil && (host || space.Inode() == c.Host) {
		err = fmt.Errorf("%q is the node's own network namespace, which is never touched", path)
	}
	if err != nil {
		space.Close()
		return nil, err
	}
	return space, nil
}

// Counts returns the numbers of pods in the ambient mesh, and of those that are wanted there and are not in it yet.
func (c *Controller) Counts() (enrolled, pending int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		switch s := e.status(); {
		case !s.Wanted:
		case s.Missing == "":
			enrolled++
		default:
			pending++
		}
	}
	return enrolled, pending
}

// Status is what the agent has done for a pod.
type Status struct {
	// Wanted: the pod is to be in the ambient mesh. Missing is the first step that is not done, "" for an enrolled pod.
	Wanted  bool
	Missing string
}

// Status returns the status of a pod, or false if it is unknown.
func (c *Controller) Status(uid string) (Status, bool) {
	e := c.entry(uid)
	if e == nil {
		return Status{}, false
	}
	return e.status(), true
}
