package enrol

import (
	"context"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// search has the namespace of a pod searched, together with those of all other pods that wait: a label of a namespace can enrol
// hundreds. The pod gets a turn after each search. It returns why the last one did not find it.
func (c *Controller) search(e *entry) error {
	c.mu.Lock()
	known := c.lost[e.uid]
	c.lost[e.uid] = true
	c.mu.Unlock()
	if !known {
		select {
		case c.wake <- struct{}{}:
		default: // it is about to begin
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost != nil {
		return waits("its network namespace: %w", e.lost)
	}
	return waits("its network namespace")
}

// found ends the search for a pod's namespace. It returns false if there was none.
func (c *Controller) found(uid string) (searched bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	searched = c.lost[uid]
	delete(c.lost, uid)
	return searched
}

// gather is the time in which pods join a search.
const gather = 20 * time.Millisecond

// find searches as long as there are lost pods, after pauses that grow to retryMax if there are no others.
func (c *Controller) find(ctx context.Context) {
	pause := podwork.RetryBase
	for ctx.Err() == nil {
		again := c.pods.Clock.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-c.wake:
			pause = podwork.RetryBase
			c.pods.Sleep(ctx, gather)
		case <-again.C():
			pause = min(2*pause, retryMax)
		}
		again.Stop()
		c.findLost(ctx)
	}
}

func (c *Controller) findLost(ctx context.Context) {
	var wanted []sandbox.Pod
	c.mu.Lock()
	for uid := range c.lost {
		e := c.entries[uid]
		if e == nil {
			delete(c.lost, uid)
			continue
		}
		p := e.latest()
		wanted = append(wanted, sandbox.Pod{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: uid, Addresses: p.Addresses})
	}
	c.mu.Unlock()
	if len(wanted) == 0 {
		return
	}
	for uid, result := range c.Places.FindAll(ctx, wanted) {
		e := c.entry(uid)
		switch {
		case result.Err == nil && (!c.found(uid) || e == nil):
			result.Namespace.Close()
			continue
		case e == nil:
			continue
		case result.Err == nil:
			e.discovered(result.Namespace)
		default:
			e.mu.Lock()
			e.lost = result.Err
			e.mu.Unlock()
		}
		c.pods.Enqueue(e.key)
	}
}
