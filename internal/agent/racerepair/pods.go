package racerepair

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
)

// entry is the last delivered version of a pod, with its memory.
type entry struct {
	pod kube.Pod
	memory

	// waiting are closed after the next inspection. forced reports whether a request waits for the result.
	waiting []chan struct{}
	forced  bool
}

// release ends the waits for an inspection.
func (e *entry) release() {
	for _, done := range e.waiting {
		close(done)
	}
	e.waiting = nil
}

func sameAddresses(a, b kube.Pod) bool { return slices.Equal(a.Addresses, b.Addresses) }

// memory is the state of a pod of one UID between two jobs.
type memory struct {
	// deleted reports that the API server has accepted the deletion.
	deleted bool
	// deleteAfter is the time at which the rate limit allows the deletion, zero before the first reason to delete.
	deleteAfter time.Time
	state       metrics.PodState
	// repairedAt is the time of the last inspection that found the rules in place, or of the last repair.
	repairedAt time.Time
	// missingSince is the time of the first inspection that found no rules.
	missingSince time.Time
	// refusedAt is the time of the last refusal of a deletion or label beside repair in place.
	refusedAt time.Time
	// reported has the topics of the events that are recorded once.
	reported map[string]bool
	// failures is the number of consecutive failed inspections of the namespace.
	failures int
	// broken reports that race repair has reported the pod's rules.
	broken  bool
	audited audited
	// published is the condition that was written last.
	published published
}

// otherSandbox resets the fields that describe the namespace.
func (m *memory) otherSandbox() {
	m.repairedAt, m.missingSince, m.failures, m.audited = time.Time{}, time.Time{}, 0, audited{}
}

// watch keeps the pods up to date until ctx ends, and returns the last error of the watch.
func (c *controller) watch(ctx context.Context) (last error) {
	follow := c.Follow
	if follow == nil {
		s := c.Settings
		scope := kube.PodScope{
			Node: s.Node, LabelSelector: s.LabelSelectors, FieldSelector: s.FieldSelectors,
			Transform: podcache.Trim([]string{s.LabelKey, s.Predicate.Annotation}, s.Predicate.Message),
		}
		follow = func(ctx context.Context, l kube.Listener[kube.Pod]) { c.API.WatchPods(ctx, scope, l) }
	}
	follow(ctx, kube.Listener[kube.Pod]{
		OnUpdate: c.update,
		OnDelete: c.delete,
		OnSync: func() {
			c.syncOnce.Do(func() { close(c.synced) })
			c.Health.Ready(Part)
		},
		OnError: func(err error) {
			last = err
			if err == nil {
				c.Log.InfoContext(ctx, "the watch of the pods works again")
				c.Health.Ready(Part)
				return
			}
			c.Metrics.PodWatchFailed()
			c.Health.NotReady(Part, err.Error())
			c.Log.WarnContext(ctx, "the watch of the pods fails: no pod is repaired", slog.String("error", err.Error()))
		},
	})
	return last
}

func (c *controller) update(p kube.Pod) {
	c.mu.Lock()
	e := c.pods[p.Key()]
	if e == nil || e.pod.Facts.UID != p.Facts.UID {
		if e != nil {
			c.Metrics.SetPodState(e.state, "")
			e.release()
		}
		e = &entry{memory: memory{reported: map[string]bool{}}}
		c.pods[p.Key()] = e
	}
	if !sameAddresses(e.pod, p) {
		e.otherSandbox()
	}
	e.pod = p
	if !inspectable(p) {
		e.audited = audited{}
	}
	c.mu.Unlock()
	c.queue.Add(p.Key())
}

func (c *controller) delete(p kube.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.pods[p.Key()]; e != nil && e.pod.Facts.UID == p.Facts.UID {
		c.Metrics.SetPodState(e.state, "")
		e.release()
		delete(c.pods, p.Key())
		c.retries.Forget(p.Key())
	}
}

func (c *controller) keys() []types.NamespacedName {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Keys(c.pods), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
}

// podWithSameIP returns another running pod that has one of the pod's addresses, "" for none.
func (c *controller) podWithSameIP(p kube.Pod) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range c.pods {
		if k == p.Key() || podOf(e.pod).Ended || e.pod.Facts.HostNetwork {
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

// podOf returns the fields of a pod that repair.Classify reads.
func podOf(p kube.Pod) repair.Pod {
	return repair.Pod{
		Facts: p.Facts, Addressed: len(p.Addresses) > 0, Deleting: p.Deleting,
		Ended: p.Phase == "Succeeded" || p.Phase == "Failed", NeverRestarts: p.RestartPolicy == "Never",
		Init: p.Init, Containers: p.Containers,
	}
}
