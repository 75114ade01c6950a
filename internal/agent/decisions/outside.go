package decisions

import (
	"context"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// outside records in the ring the pods that the plugin leaves alone.
type outside struct {
	ring   *Ring
	policy func() (sidecar.Policy, error)

	mu sync.Mutex
	// changed has the pods to decide about, gone the UIDs of deleted pods.
	changed map[types.NamespacedName]kube.Pod
	gone    []string
	wake    chan struct{}

	// entered has the reason of each pod's entry by UID. Only the worker uses it.
	entered map[string]sidecar.Reason
}

// RecordOutside records the pods from follow that the plugin's own decision leaves alone, once per pod and reason, until ctx ends: the
// plugin does not report pods that the runtime's annotations show to be outside the mesh, because a report would double the cost of
// their ADD. A pod is recorded once it has an address, because its ADD is over then.
func (r *Ring) RecordOutside(
	ctx context.Context, follow func(context.Context, kube.Listener[kube.Pod]), policy func() (sidecar.Policy, error),
) {
	o := &outside{
		ring: r, policy: policy, changed: map[types.NamespacedName]kube.Pod{}, wake: make(chan struct{}, 1),
		entered: map[string]sidecar.Reason{},
	}
	var worker sync.WaitGroup
	worker.Go(func() { o.work(ctx) })
	follow(ctx, kube.Listener[kube.Pod]{
		OnUpdate: func(p kube.Pod) {
			if len(p.Addresses) > 0 && !p.Started.IsZero() {
				o.change(func() { o.changed[p.Key()] = p })
			}
		},
		OnDelete: func(p kube.Pod) {
			o.change(func() { o.gone = append(o.gone, p.Facts.UID) })
		},
		OnSync: func() {}, OnError: func(error) {},
	})
	worker.Wait()
}

// change notes a change and wakes the worker: a decision takes too long for a listener.
func (o *outside) change(note func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	note()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outside) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		}
		o.mu.Lock()
		changed, gone := o.changed, o.gone
		o.changed, o.gone = map[types.NamespacedName]kube.Pod{}, nil
		o.mu.Unlock()
		o.enter(changed)
		for _, uid := range gone {
			delete(o.entered, uid)
		}
	}
}

// enter decides about pods in the order of their start, and records those that are left alone.
func (o *outside) enter(changed map[types.NamespacedName]kube.Pod) {
	policy, err := o.policy()
	if err != nil {
		return // the plugin cannot decide either
	}
	pods := make([]kube.Pod, 0, len(changed))
	for _, p := range changed {
		pods = append(pods, p)
	}
	slices.SortFunc(pods, func(a, b kube.Pod) int { return a.Started.Compare(b.Started) })
	for _, p := range pods {
		d := sidecar.Decide(p.Facts, policy)
		if d.Outcome != sidecar.Pass || o.entered[p.Facts.UID] == d.Reason {
			continue
		}
		o.entered[p.Facts.UID] = d.Reason
		one := agentapi.Report{
			Time: p.Started, Namespace: p.Facts.Namespace, Pod: p.Facts.Name, UID: p.Facts.UID, Reason: string(d.Reason), Detail: d.Detail,
			Source: agentapi.SourceWatch,
		}
		one.Trim()
		o.ring.addOutside(one, p.Is)
	}
}
