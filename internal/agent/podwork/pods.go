package podwork

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
)

// entry is a pod as last delivered by the watch, with its memory.
type entry[M any] struct {
	pod    kube.Pod
	memory M
}

func sameAddresses(a, b kube.Pod) bool { return slices.Equal(a.Addresses, b.Addresses) }

// watch keeps the pods up to date until ctx ends, and returns the last error of the watch.
func (c *Controller[M]) watch(ctx context.Context) (last error) {
	c.Follow(ctx, kube.Listener[kube.Pod]{
		OnUpdate: c.update,
		OnDelete: c.delete,
		OnSync: func() {
			c.syncOnce.Do(func() { close(c.synced) })
			c.Watch(nil)
		},
		OnError: func(err error) {
			if last = err; err == nil {
				c.Log.InfoContext(ctx, "the watch of the pods works again")
			} else {
				c.Log.WarnContext(ctx, "the watch of the pods fails: no pod is repaired", slog.String("error", err.Error()))
			}
			c.Watch(err)
		},
	})
	return last
}

func (c *Controller[M]) update(p kube.Pod) {
	c.mu.Lock()
	k := p.Key()
	e := c.pods[k]
	if e == nil || e.pod.Facts.UID != p.Facts.UID {
		if e != nil {
			c.Gone(k, &e.memory)
		}
		e = &entry[M]{pod: p}
		c.pods[k] = e
	}
	if !sameAddresses(e.pod, p) {
		c.OtherSandbox(&e.memory)
	}
	if e.pod = p; !Inspectable(p) {
		c.Ended(&e.memory)
	}
	c.mu.Unlock()
	c.queue.Add(k)
}

func (c *Controller[M]) delete(p kube.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := p.Key()
	if e := c.pods[k]; e != nil && e.pod.Facts.UID == p.Facts.UID {
		c.Gone(k, &e.memory)
		delete(c.pods, k)
		c.retries.Forget(k)
	}
}

// Enqueue gives a pod a turn.
func (c *Controller[M]) Enqueue(k types.NamespacedName) { c.queue.Add(k) }

// Synced is closed when all pods are known.
func (c *Controller[M]) Synced() <-chan struct{} { return c.synced }

// Keys returns the names of all pods, in order.
func (c *Controller[M]) Keys() []types.NamespacedName {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Keys(c.pods), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
}

// Each calls fn, under the lock, with every pod.
func (c *Controller[M]) Each(fn func(kube.Pod, *M)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.pods {
		fn(e.pod, &e.memory)
	}
}

// Get calls fn, under the lock, with a pod. It returns false if there is no such pod.
func (c *Controller[M]) Get(k types.NamespacedName, fn func(kube.Pod, *M)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[k]
	if e != nil {
		fn(e.pod, &e.memory)
	}
	return e != nil
}

// Look returns a read-only turn for a request, outside the queue, or nil if there is no such pod. The caller calls end.
func (c *Controller[M]) Look(k types.NamespacedName) (t *Turn, end func()) {
	if !c.Get(k, func(p kube.Pod, _ *M) { t = c.newTurn(p) }) {
		return nil, nil
	}
	t.decide()
	return t, t.close
}

// podWithSameIP returns the name of another running pod with one of the pod's addresses, or "".
func (c *Controller[M]) podWithSameIP(p kube.Pod) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range c.pods {
		if k == p.Key() || PodOf(e.pod).Ended || e.pod.Facts.HostNetwork {
			continue
		}
		for _, address := range e.pod.Addresses {
			if slices.Contains(p.Addresses, address) {
				return k.String()
			}
		}
	}
	return ""
}

// unchanged reports whether a pod has the same UID and addresses as p, and has not begun to end.
func (c *Controller[M]) unchanged(p kube.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[p.Key()]
	return e != nil && e.pod.Facts.UID == p.Facts.UID && Inspectable(e.pod) && sameAddresses(e.pod, p)
}

// Inspectable reports whether a pod has a network of its own that can be inspected.
func Inspectable(p kube.Pod) bool {
	return !PodOf(p).Ended && !p.Deleting && len(p.Addresses) > 0
}

// PodOf converts a pod to the fields that repair.Classify reads.
func PodOf(p kube.Pod) repair.Pod {
	return repair.Pod{
		Facts: p.Facts, Addressed: len(p.Addresses) > 0, Deleting: p.Deleting,
		Ended: p.Phase == "Succeeded" || p.Phase == "Failed", NeverRestarts: p.RestartPolicy == "Never",
		Init: p.Init, Containers: p.Containers,
	}
}
