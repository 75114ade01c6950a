package enrol

import (
	"cmp"
	"context"
	"log/slog"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// prime adds the pods that ztunnel may already serve to the snapshot and the probe set, before ztunnel may connect: ztunnel stops the
// proxies of pods that the snapshot lacks. Turns verify the rules afterwards. It returns false if ctx ended.
func (c *Controller) prime(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c.pods.Synced():
	}
	served := c.served()
	var wanted []sandbox.Pod
	for _, p := range served {
		if len(p.Addresses) > 0 {
			wanted = append(wanted, sandbox.Pod{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, Addresses: p.Addresses})
		}
	}
	found := c.Places.FindAll(ctx, wanted)
	for _, p := range served {
		c.adopt(ctx, p, found[p.Facts.UID])
	}
	c.Log.InfoContext(ctx, "ztunnel may connect", slog.Int("pods", len(served)))
	c.Probes.Complete()
	close(c.primed)
	return true
}

// served returns the pods that ztunnel may serve, the oldest first. Of a pending pod, only the annotation may be missing.
func (c *Controller) served() (all []kube.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		p := e.latest()
		value := p.Facts.Annotations[ambient.RedirectionKey]
		served := value == ambient.RedirectionEnabled || value == ambient.RedirectionPending && p.Facts.Selected
		if served && p.Facts.Eligible() && !podwork.PodOf(p).Ended && !c.isZtunnel(p) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b kube.Pod) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.Facts.UID, b.Facts.UID))
	})
	return all
}

// adopt enters a pod into the snapshot. ztunnel keeps a pod whose namespace is not found; the pod's turns go on searching.
func (c *Controller) adopt(ctx context.Context, p kube.Pod, found sandbox.Result) {
	e := c.entry(p.Facts.UID)
	if e != nil {
		e.turn.Lock()
		defer e.turn.Unlock()
	}
	if e == nil || e.ended() { // it was deleted meanwhile
		if found.Namespace != nil {
			found.Namespace.Close()
		}
		return
	}
	c.Probes.Put(e.uid, p.Addresses) // without addresses, those of the last agent stay
	if found.Namespace != nil && !found.Namespace.Inhabited {
		found.Namespace.Close()
		found = sandbox.Result{Err: podwork.ErrUninhabited}
	}
	if found.Namespace == nil {
		c.Log.InfoContext(ctx, "the network namespace of an enrolled pod is not found yet", slog.String("pod", e.key.String()), slog.Any("error", found.Err))
		c.Ztunnels.Keep(e.uid)
		return
	}
	e.seen = seen{space: found.Namespace.Namespace, running: true, addresses: p.Addresses, status: p.Addresses}
	if c.TrustRules && p.Facts.Annotations[ambient.RedirectionKey] == ambient.RedirectionEnabled {
		if conf, err := c.Plugin(); err == nil {
			spec, _ := ambient.Of(conf.Policy().Ambient, p.Facts.Annotations)
			e.seen.applied = &spec
		}
	}
	c.Ztunnels.Put(workload(p), e.seen.space)
}
