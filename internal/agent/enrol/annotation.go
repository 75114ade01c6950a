package enrol

import (
	"context"

	"github.com/meshcni/istio-cni/internal/kube"
)

// annotate makes sure that the annotation has a value, "" for none.
func (w *work) annotate(value string) error {
	if w.e.annotation() == value {
		return nil
	}
	w.write(value)
	return waits("the API server to take its annotation")
}

// request is a wanted value of a pod's annotation; before is the value that the watch had delivered.
type request struct {
	e             *entry
	value, before string
}

// write has the API server asked to write the annotation, unless it is being asked. The pod gets a turn when it has answered.
func (w *work) write(value string) {
	e := w.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.patching {
		return
	}
	if again := guardPause - w.Clock.Since(e.lastAt); value == e.last && again > 0 { // another client overwrites it
		w.Again(again)
		return
	}
	e.patching = true
	w.writes.Add(request{e, value, e.delivered()})
}

// runWrites writes annotations until the queue is shut down.
func (c *Controller) runWrites(ctx context.Context) {
	for {
		next, shutdown := c.writes.Get()
		if shutdown || ctx.Err() != nil {
			return
		}
		c.patch(ctx, next)
		c.writes.Done(next)
	}
}

func (c *Controller) patch(ctx context.Context, next request) {
	e := next.e
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	err := c.API.PatchRedirection(ctx, kube.PodRef{Namespace: e.key.Namespace, Name: e.key.Name, UID: e.uid}, next.value)
	e.mu.Lock()
	e.patching = false
	switch {
	case err != nil && kube.ClassOf(err) != kube.NotFound: // else the pod is gone, as the watch will say
		e.patchErr = err
	case e.delivered() == next.before: // the watch comes later
		e.written = &next.value
		fallthrough
	default:
		e.last, e.lastAt = next.value, c.pods.Clock.Now()
	}
	e.mu.Unlock()
	c.pods.Enqueue(e.key)
}

// writing reports whether the API server is being asked.
func (e *entry) writing() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.patching
}
