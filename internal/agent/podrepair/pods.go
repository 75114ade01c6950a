package podrepair

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

func (c *controller) follow(ctx context.Context) { _ = c.followUntil(ctx) }

// followUntil keeps the pods in sight, and gives the last trouble that it had with that.
func (c *controller) followUntil(ctx context.Context) (last error) {
	scope := kube.PodScope{
		Node: c.Settings.Node, LabelSelector: c.Settings.LabelSelectors, FieldSelector: c.Settings.FieldSelectors, Transform: c.transform,
	}
	follow := c.Follow
	if follow == nil {
		follow = func(ctx context.Context, tell kube.Listener[kube.Pod]) { c.API.WatchPods(ctx, scope, tell) }
	}
	follow(ctx, kube.Listener[kube.Pod]{
		OnUpdate: func(p kube.Pod) {
			if c.Follow != nil { // it is others' as well
				p.Init, p.Containers = slices.Clone(p.Init), slices.Clone(p.Containers)
				c.transform(&p)
			}
			c.set(p)
		},
		OnDelete: c.gone,
		OnSync: func() {
			c.syncOnce.Do(func() { close(c.synced) })
			c.ready("")
		},
		OnError: func(err error) {
			last = err
			if err == nil {
				c.Log.InfoContext(ctx, "the pods are in sight again")
				c.ready("")
				return
			}
			c.Metrics.PodsTroubled()
			c.ready(err.Error())
			c.Log.WarnContext(ctx, "the pods are out of sight: none is repaired", slog.String("error", err.Error()))
		},
	})
	return last
}

// ready reports that the pods are in sight, or why not.
func (c *controller) ready(but string) {
	switch {
	case c.Health == nil:
	case but == "":
		c.Health.Ready(Part)
	default:
		c.Health.NotReady(Part, but)
	}
}

// transform drops what no decision rests on: thousands of pods may have to be remembered. Addresses of pods outside of the mesh are
// what keeps others from being sought by them.
func (c *controller) transform(p *kube.Pod) {
	annotation := c.Settings.Predicate.Annotation
	value, has := p.Facts.Annotations[annotation]
	if annotation != "" && !has {
		*p = kube.Pod{
			Facts: sidecar.Facts{
				Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, HostNetwork: p.Facts.HostNetwork,
			},
			Version: p.Version, NodeName: p.NodeName, Addresses: p.Addresses, Phase: p.Phase,
		}
		return
	}
	slim := p.Facts.Trim()
	if has && annotation != sidecar.StatusKey {
		slim.Annotations = with(slim.Annotations, annotation, value)
	}
	if mark, marked := p.Facts.Labels[c.Settings.LabelKey]; marked {
		slim.Labels = with(slim.Labels, c.Settings.LabelKey, mark)
	}
	p.Facts = slim
	for i := range p.Init {
		for _, state := range []*repair.State{&p.Init[i].State, &p.Init[i].Last} {
			// A container may leave a message of 4 KiB.
			if state.Message = strings.TrimSpace(state.Message); state.Message != strings.TrimSpace(c.Settings.Predicate.Message) {
				state.Message = ""
			}
		}
	}
	for i, of := range p.Containers {
		p.Containers[i] = repair.Container{
			State: repair.State{Running: of.State.Running, Terminated: of.State.Terminated},
			Last:  repair.State{Running: of.Last.Running, Terminated: of.Last.Terminated},
		}
	}
}

func with(of map[string]string, name, value string) map[string]string {
	if of == nil {
		of = map[string]string{}
	}
	of[name] = value
	return of
}

func (c *controller) set(p kube.Pod) {
	c.mu.Lock()
	e := c.pods[p.Key()]
	if e == nil || e.pod.Facts.UID != p.Facts.UID {
		if e != nil {
			c.Metrics.Stands(e.state, "")
		}
		e = &entry{memory: memory{told: map[string]bool{}}}
		c.pods[p.Key()] = e
	}
	if !slices.Equal(e.pod.Addresses, p.Addresses) {
		e.otherSandbox()
	}
	e.pod = p
	c.mu.Unlock()
	c.queue.Add(p.Key())
}

func (c *controller) gone(p kube.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.pods[p.Key()]; e != nil && e.pod.Facts.UID == p.Facts.UID {
		c.Metrics.Stands(e.state, "")
		delete(c.pods, p.Key())
		c.retries.Forget(p.Key())
	}
}

func (c *controller) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.pods {
		c.Metrics.Stands(e.state, "")
	}
}

func (c *controller) keys() []types.NamespacedName {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Keys(c.pods), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
}

// podOf gives what decides.
func podOf(p kube.Pod) repair.Pod {
	return repair.Pod{
		Facts: p.Facts, Addressed: len(p.Addresses) > 0, Deleting: p.Deleting,
		Ended: p.Phase == "Succeeded" || p.Phase == "Failed", NeverRestarts: p.RestartPolicy == "Never",
		Init: p.Init, Containers: p.Containers,
	}
}
