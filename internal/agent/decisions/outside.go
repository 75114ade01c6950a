package decisions

import (
	"context"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// outside records in the ring the pods that the plugin leaves alone. follow calls its methods one at a time.
type outside struct {
	ring   *Ring
	policy func() (sidecar.Policy, error)
	// first has the pods of the first list until it is complete, or the watch fails.
	first  []kube.Pod
	listed bool
	// entered has the reason of each pod's entry by UID.
	entered map[string]sidecar.Reason
}

// RecordOutside records the pods from follow that the plugin's own decision leaves alone, once per pod and reason, until ctx ends: the
// plugin does not report pods that the runtime's annotations show to be outside the mesh, because a report would double the cost of
// their ADD. A pod is recorded once it has an address, because its ADD is over then. The pods of the first list are recorded in the
// order of their start.
func (r *Ring) RecordOutside(
	ctx context.Context, follow func(context.Context, kube.Listener[kube.Pod]), policy func() (sidecar.Policy, error),
) {
	o := &outside{ring: r, policy: policy, entered: map[string]sidecar.Reason{}}
	follow(ctx, kube.Listener[kube.Pod]{
		OnUpdate: o.update, OnDelete: func(p kube.Pod) { delete(o.entered, p.Facts.UID) },
		OnSync: o.list, OnError: func(error) { o.list() },
	})
}

func (o *outside) update(p kube.Pod) {
	switch {
	case len(p.Addresses) == 0 || p.Started.IsZero():
	case o.listed:
		o.enter(p)
	default:
		o.first = append(o.first, p)
	}
}

func (o *outside) list() {
	slices.SortStableFunc(o.first, func(a, b kube.Pod) int { return a.Started.Compare(b.Started) })
	for _, p := range o.first {
		o.enter(p)
	}
	o.first, o.listed = nil, true
}

// enter decides about a pod, and records it if it is left alone. While the policy is unknown, the plugin cannot decide either.
func (o *outside) enter(p kube.Pod) {
	policy, err := o.policy()
	if err != nil {
		return
	}
	d := sidecar.Decide(p.Facts, policy)
	if d.Outcome != sidecar.Pass || o.entered[p.Facts.UID] == d.Reason {
		return
	}
	o.entered[p.Facts.UID] = d.Reason
	one := agentapi.Report{
		Time: p.Started, Namespace: p.Facts.Namespace, Pod: p.Facts.Name, UID: p.Facts.UID, Reason: string(d.Reason), Detail: d.Detail,
		Source: agentapi.SourceWatch,
	}
	one.Trim()
	o.ring.addOutside(one, p.Is)
}
