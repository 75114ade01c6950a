package taint

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// leadership is the state of a leader: its caches of nodes and pods, and their workers. Each leadership starts with empty caches.
type leadership struct {
	options Options
	// queue has each node once, and returns it to one worker at a time; retries is the back-off of nodes that failed.
	queue   workqueue.TypedDelayingInterface[string]
	retries workqueue.TypedRateLimiter[string]
	work    sync.WaitGroup
	// synced is closed when the caches are complete for the first time.
	synced   chan struct{}
	syncOnce sync.Once
	// fatal receives errors for Once and Plan, which must end and cannot wait for a recovery.
	fatal func(error)

	mu     sync.Mutex
	policy readiness.Policy
	// required are the policy's requirements with their pods, nil until the requirements are known.
	required    []requirement
	nodesListed bool
	nodes       map[string]*node
	sources     map[source]*podSet
	complete    bool
	// forbidden has the nodes whose last change the API server refused for lack of permission.
	forbidden map[string]bool
}

// node is a node in the cache.
type node struct {
	state    kube.NodeState
	memory   readiness.Memory
	decision readiness.Decision // zero before the first decision
}

// source is a collection of pods with a reflector.
type source struct{ namespace, selector string }

// requirement is met by pods of any of the sets.
type requirement struct {
	readiness.Requirement

	sets []*podSet
}

// podSet has the pods of a source by their node's name.
type podSet struct {
	end    context.CancelFunc
	listed bool
	// warned is set after the log entry that the requirement selects no pod.
	warned bool
	// onNode has no entry for a node without such pods.
	onNode map[string]map[types.NamespacedName]readiness.Pod
}

func newLeadership(o Options) *leadership {
	t := &leadership{
		options: o, policy: o.Policy,
		queue:   workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Clock: o.Clock}),
		retries: workqueue.NewTypedItemExponentialFailureRateLimiter[string](retry, maxRetry),
		synced:  make(chan struct{}), fatal: func(error) {},
		nodes: map[string]*node{}, sources: map[source]*podSet{}, forbidden: map[string]bool{},
	}
	o.Metrics.ReadQueue(t.queue.Len)
	return t
}

// run works until ctx ends.
func (t *leadership) run(ctx context.Context) {
	defer func() {
		for name := range t.forbidden {
			t.setRefused(name, nil) // the next leader sets the state
		}
	}()
	defer context.AfterFunc(ctx, t.queue.ShutDown)() // the last worker ends after ShutDown
	defer t.work.Wait()
	t.startReflectors(ctx)
	for range workers {
		t.work.Go(func() {
			for t.processNext(ctx) {
			}
		})
	}
}

// processNext processes the next node of the queue. It reports whether to continue: a queue after ShutDown still returns its
// items, which are dropped.
func (t *leadership) processNext(ctx context.Context) bool {
	name, shutdown := t.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}
	defer t.queue.Done(name)
	err := t.reconcile(ctx, name)
	if err == nil {
		t.retries.Forget(name)
		return true
	}
	t.queue.AddAfter(name, max(min(kube.RetryAfter(err), maxRetry), t.retries.When(name)))
	return true
}

// startReflectors starts the reflectors of nodes and, once the requirements are known, of pods.
func (t *leadership) startReflectors(ctx context.Context) {
	t.options.Health.NotReady(PartCaches, "nodes and pods are not all known yet")
	t.work.Go(func() {
		t.options.API.WatchNodes(ctx, t.options.Condition, kube.Listener[kube.NodeState]{
			OnUpdate: t.updateNode, OnDelete: t.deleteNode, OnError: t.onError(ctx, metrics.WatchedNodes, "nodes"),
			OnSync: func() {
				t.mu.Lock()
				defer t.mu.Unlock()
				t.nodesListed = true
				t.check()
			},
		})
	})
	if t.options.ConfigMap.Name == "" {
		t.require(ctx, t.policy.Requirements)
		return
	}
	t.options.Health.NotReady(PartRequirements, "the ConfigMap is not read yet")
	at := t.options.ConfigMap
	t.work.Go(func() {
		t.options.API.WatchConfigMap(ctx, at.Namespace, at.Name, func(data map[string]string) { t.configure(ctx, data) },
			t.onError(ctx, metrics.WatchedConfigMap, "ConfigMap "+at.Namespace+"/"+at.Name))
	})
}

// onError logs and counts a watch that fails. The cache stays in use.
func (t *leadership) onError(ctx context.Context, what metrics.Watched, name string) func(error) {
	return func(err error) {
		if err == nil {
			t.options.Log.InfoContext(ctx, "watch works again", slog.String("what", name))
			return
		}
		t.options.Metrics.WatchFailed(what)
		t.options.Log.WarnContext(ctx, "watch fails", slog.String("what", name), slog.String("error", err.Error()))
		if class := kube.ClassOf(err); class == kube.Forbidden || class == kube.Unauthorized || class == kube.InvalidKey {
			t.fatal(fmt.Errorf("watching %s: %w", name, err))
		}
	}
}

// configure applies the requirements of the ConfigMap, or nil without a ConfigMap. Invalid requirements change nothing.
func (t *leadership) configure(ctx context.Context, data map[string]string) {
	at := t.options.ConfigMap
	var found []readiness.Requirement
	err := fmt.Errorf("there is no ConfigMap %s/%s", at.Namespace, at.Name)
	if data != nil {
		found, err = requirementsOf(data)
	}
	if err == nil {
		t.options.Log.InfoContext(ctx, "requirements", slog.Any("of", found))
		t.require(ctx, found)
		return
	}
	t.mu.Lock()
	before := t.required != nil
	t.mu.Unlock()
	message := err.Error() + "; the previous requirements stay in force"
	if !before {
		message = err.Error() + "; no node is changed until there are requirements"
		t.options.Health.NotReady(PartRequirements, message)
	}
	t.options.Metrics.ConfigRefused()
	t.options.Log.WarnContext(ctx, "requirements cannot be used", slog.String("error", message))
	t.options.event(kube.ObjectRef{Kind: "ConfigMap", APIVersion: "v1", Namespace: at.Namespace, Name: at.Name}, kube.EventWarning, eventRequirements, message)
	t.fatal(fmt.Errorf("reading requirements: %w", err))
}

// require replaces the requirements. They apply once their pods are synced.
func (t *leadership) require(ctx context.Context, all []readiness.Requirement) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.sources
	t.sources, t.required, t.complete = map[source]*podSet{}, []requirement{}, false
	for _, r := range all {
		wanted := requirement{Requirement: r}
		for _, namespace := range r.Namespaces {
			wanted.sets = append(wanted.sets, t.podSetOf(ctx, source{namespace, r.Selector}, before))
		}
		t.required = append(t.required, wanted)
	}
	for s, set := range before {
		if t.sources[s] == nil {
			set.end()
		}
	}
	t.policy.Requirements = all
	t.options.Health.Ready(PartRequirements)
	t.check()
}

// podSetOf returns the pods of a source, from an existing or a new reflector. It needs the lock.
func (t *leadership) podSetOf(parent context.Context, s source, before map[source]*podSet) *podSet {
	if set := cmp.Or(t.sources[s], before[s]); set != nil {
		t.sources[s] = set
		return set
	}
	ctx, end := context.WithCancel(parent)
	set := &podSet{end: end, onNode: map[string]map[types.NamespacedName]readiness.Pod{}}
	t.sources[s] = set
	t.work.Go(func() {
		defer end()
		scope := kube.PodScope{Namespace: s.namespace, LabelSelector: s.selector, Transform: transform}
		t.options.API.WatchPods(ctx, scope, kube.Listener[kube.Pod]{
			OnUpdate: func(pod kube.Pod) { t.updatePod(set, pod) },
			OnDelete: func(pod kube.Pod) { t.deletePod(set, pod) },
			OnSync: func() {
				t.mu.Lock()
				defer t.mu.Unlock()
				set.listed = true
				t.check()
			},
			OnError: t.onError(ctx, metrics.WatchedPods, fmt.Sprintf("pods of namespace %q with %q", s.namespace, s.selector)),
		})
	})
	return set
}

// transform drops the fields that no decision about a node reads, because each node has such a pod.
func transform(p *kube.Pod) {
	*p = kube.Pod{
		Facts:    sidecar.Facts{Namespace: p.Facts.Namespace, Name: p.Facts.Name},
		NodeName: p.NodeName, Ready: p.Ready, ReadySince: p.ReadySince, Deleting: p.Deleting,
	}
}

// check starts the decisions about all nodes once all caches are synced. It needs the lock.
func (t *leadership) check() {
	if t.complete || t.required == nil || !t.nodesListed {
		return
	}
	for _, set := range t.sources {
		if !set.listed {
			return
		}
	}
	t.complete = true
	t.options.Health.Ready(PartCaches)
	t.options.Log.Info("nodes and pods are known", slog.Int("nodes", len(t.nodes)))
	for _, name := range slices.Sorted(maps.Keys(t.nodes)) {
		t.queue.Add(name)
	}
	t.syncOnce.Do(func() { close(t.synced) })
}

func (t *leadership) updateNode(state kube.NodeState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[state.Name]
	switch {
	case n == nil:
		t.nodes[state.Name] = &node{state: state}
	case state.Before(n.state):
		return // the response to this controller's change was faster than the watch
	case n.state.SameBut(state):
		n.state = state
		n.memory = n.memory.WithHeartbeat(state.Node)
		return
	default:
		n.state = state
	}
	if t.complete {
		t.queue.Add(state.Name)
	}
}

func (t *leadership) deleteNode(state kube.NodeState) {
	t.mu.Lock()
	if n := t.nodes[state.Name]; n != nil {
		t.options.Metrics.SetNodeReason(n.decision.Reason, "")
		delete(t.nodes, state.Name)
	}
	t.mu.Unlock()
	t.setRefused(state.Name, nil)
	t.retries.Forget(state.Name)
}

func (t *leadership) updatePod(set *podSet, pod kube.Pod) {
	if pod.NodeName == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key := pod.Key()
	here := set.onNode[pod.NodeName]
	if here == nil {
		here = map[types.NamespacedName]readiness.Pod{}
		set.onNode[pod.NodeName] = here
	}
	before, found := here[key]
	now := readiness.Pod{Ready: pod.Ready, Since: pod.ReadySince, Terminating: pod.Deleting}
	here[key] = now
	if t.complete && (!found || before != now) {
		t.queue.Add(pod.NodeName)
	}
}

func (t *leadership) deletePod(set *podSet, pod kube.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := pod.Key()
	if _, found := set.onNode[pod.NodeName][key]; !found {
		return
	}
	delete(set.onNode[pod.NodeName], key)
	if len(set.onNode[pod.NodeName]) == 0 {
		delete(set.onNode, pod.NodeName)
	}
	if t.complete {
		t.queue.Add(pod.NodeName)
	}
}
