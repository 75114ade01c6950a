package enrol

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfwatch"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// entry is the state of a pod of one UID.
type entry struct {
	uid string
	key types.NamespacedName

	// turn is held during a turn of the pod and during close. It protects seen, and the order of calls to ztunnels and probes.
	turn sync.Mutex
	seen seen
	// touched is set when the rules of the namespace have changed.
	touched atomic.Bool

	mu sync.Mutex
	// pod is the pod as last delivered by the watch. gone: it was deleted, or the agent ends.
	pod  kube.Pod
	gone bool
	// offer is the namespace of a new sandbox until the next turn takes it. lost is why the last search found none.
	offer *offer
	lost  error
	// patching is set while the API server is asked to write the annotation; patchErr is why that failed.
	patching bool
	patchErr error
	// last is the value that was written last, at lastAt. written is last until the watch delivers a change; nil afterwards.
	last    string
	lastAt  time.Time
	written *string
	current Status
	// served is the namespace in which the pod is enrolled, changed is closed when this or current changes.
	served  netns.Inode
	changed chan struct{}
}

// offer is a namespace: of a plugin, with the addresses that it reported, or found by the pod's addresses.
type offer struct {
	space     *netns.Namespace
	addresses []netip.Addr
	found     *sandbox.Namespace
}

// seen is what turns have found and done.
type seen struct {
	// space is the pod's namespace, nil if it is unknown; replaced is the one before until ztunnel no longer uses it. running: space was found,
	// so the pod lives on if this agent ends.
	space, replaced *netns.Namespace
	running         bool
	// addresses are those of space, status those of the pod's status when space was found.
	addresses, status []netip.Addr
	// guard reports changes of the rules in space.
	guard *nfwatch.Watch
	// applied are the rules in space, nil if they were not compared; version is their version.
	applied *ambient.Spec
	version redirection.Version
	// due is when changed rules may be compared again; unreadable is why the last comparison was given up.
	due        time.Time
	unreadable error
	// retryAt is when ztunnel is asked again after it has refused the pod, pause the time until then.
	retryAt time.Time
	pause   time.Duration
}

// follow keeps an entry for each pod, so that none is made after its pod has gone.
func (c *Controller) follow(ctx context.Context, l kube.Listener[kube.Pod]) {
	update, remove := l.OnUpdate, l.OnDelete
	l.OnUpdate = func(p kube.Pod) {
		c.track(p)
		update(p)
	}
	l.OnDelete = func(p kube.Pod) {
		remove(p)
		c.forget(p.Facts.UID)
	}
	c.Follow(ctx, l)
}

func (c *Controller) track(p kube.Pod) {
	c.mu.Lock()
	e := c.entries[p.Facts.UID]
	if e == nil {
		e = &entry{uid: p.Facts.UID, key: p.Key(), changed: make(chan struct{})}
		c.entries[p.Facts.UID] = e
	}
	c.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.Facts.Annotations[ambient.RedirectionKey] != e.delivered() {
		e.written = nil // by this agent, or by another writer since
	}
	e.pod = p
}

// delivered returns the value of the annotation in the watch. It needs the lock.
func (e *entry) delivered() string { return e.pod.Facts.Annotations[ambient.RedirectionKey] }

// forget ends a deleted pod, after its turn.
func (c *Controller) forget(uid string) {
	c.mu.Lock()
	e := c.entries[uid]
	delete(c.entries, uid)
	c.mu.Unlock()
	if e == nil {
		return
	}
	go e.close(func() { c.leave(e) }) // after a turn under way, which could add the pod again
}

// leave takes the pod from ztunnel and the probe set.
func (c *Controller) leave(e *entry) {
	c.Ztunnels.Remove(e.uid)
	c.Probes.Remove(e.uid)
}

// close waits for the turn, calls leave and closes the namespaces.
func (e *entry) close(leave func()) {
	e.turn.Lock()
	defer e.turn.Unlock()
	leave()
	e.seen.drop()
	e.mu.Lock()
	e.gone = true
	e.mu.Unlock()
	e.offered(nil)
	e.set(Status{Missing: "the pod is gone"}, netns.Inode{})
}

// drop closes what is open.
func (s *seen) drop() {
	if s.guard != nil {
		s.guard.Close()
	}
	for _, space := range []*netns.Namespace{s.space, s.replaced} {
		if space != nil {
			space.Close()
		}
	}
	*s = seen{}
}

// offered replaces the offer.
func (e *entry) offered(o *offer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.offer != nil {
		e.offer.space.Close()
	}
	if e.gone && o != nil {
		o.space.Close()
		o = nil
	}
	e.offer, e.lost = o, nil
	e.served = netns.Inode{}
}

// discovered offers a namespace that was found, unless a plugin has offered one meanwhile.
func (e *entry) discovered(found *sandbox.Namespace) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost = nil; e.offer != nil || e.gone {
		found.Close()
		return
	}
	e.offer = &offer{space: found.Namespace, addresses: e.pod.Addresses, found: found}
}

// ended reports whether the pod was deleted, or the agent ends.
func (e *entry) ended() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gone
}

// latest returns the pod as last delivered by the watch.
func (e *entry) latest() kube.Pod {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pod
}

// take returns the offer, nil without one.
func (e *entry) take() *offer {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.offer
	e.offer = nil
	return o
}

func (e *entry) status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current
}

// set records what a turn has reached.
func (e *entry) set(s Status, served netns.Inode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == s && e.served == served {
		return
	}
	e.current, e.served = s, served
	close(e.changed)
	e.changed = make(chan struct{})
}

// wait returns when the pod is enrolled in a namespace.
func (e *entry) wait(ctx context.Context, in netns.Inode) error {
	for {
		e.mu.Lock()
		done, s, changed := e.served == in, e.current, e.changed
		e.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if s.Missing == "" {
				s.Missing = "its turn has not begun"
			}
			return errors.New("pod " + e.key.String() + " is not in the ambient mesh yet: " + s.Missing)
		}
	}
}

// annotation returns the value of the annotation in the API.
func (e *entry) annotation() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.written != nil {
		return *e.written
	}
	return e.delivered()
}
