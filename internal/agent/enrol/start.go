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

// prime tells the ztunnel server and the probe set of all pods that the last agent has enrolled, before ztunnel may connect: it stops the
// proxies of pods that the snapshot lacks. Turns verify the rules afterwards. It returns false if ctx ended.
func (c *Controller) prime(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c.pods.Synced():
	}
	enabled := c.enabled()
	var wanted []sandbox.Pod
	for _, p := range enabled {
		if len(p.Addresses) > 0 {
			wanted = append(wanted, sandbox.Pod{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, Addresses: p.Addresses})
		}
	}
	found := c.Places.FindAll(ctx, wanted)
	for _, p := range enabled {
		c.adopt(ctx, p, found[p.Facts.UID])
	}
	c.Log.InfoContext(ctx, "ztunnel may connect", slog.Int("pods", len(enabled)))
	c.Probes.Complete()
	close(c.primed)
	return true
}

// enabled returns the enrolled pods, the oldest first.
func (c *Controller) enabled() (all []kube.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		p := e.latest()
		if p.Facts.Annotations[ambient.RedirectionKey] == ambient.RedirectionEnabled && !podwork.PodOf(p).Ended && !c.isZtunnel(p) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b kube.Pod) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.Facts.UID, b.Facts.UID))
	})
	return all
}

// adopt enters an enrolled pod into the snapshot. ztunnel keeps a pod whose namespace is not found; the pod's turns go on searching.
func (c *Controller) adopt(ctx context.Context, p kube.Pod, found sandbox.Result) {
	e := c.entry(p.Facts.UID)
	if e == nil { // it was deleted meanwhile
		if found.Namespace != nil {
			found.Namespace.Close()
		}
		return
	}
	e.turn.Lock()
	defer e.turn.Unlock()
	c.Probes.Put(e.uid, p.Addresses) // without addresses, those of the last agent stay
	if e.seen.closed || found.Namespace == nil {
		c.Log.InfoContext(ctx, "the network namespace of an enrolled pod is not found yet", slog.String("pod", e.key.String()), slog.Any("error", found.Err))
		c.Ztunnels.Keep(e.uid)
		return
	}
	e.seen.space, e.seen.addresses, e.seen.status = found.Namespace.Namespace, p.Addresses, p.Addresses
	if c.TrustRules {
		if conf, err := c.Plugin(); err == nil {
			spec, _ := ambient.Of(conf.Policy().Ambient, p.Facts.Annotations)
			e.seen.applied = &spec
		}
	}
	c.Ztunnels.Put(workload(p), e.seen.space)
}
