// Package probes keeps the addresses of the ambient pods of this node in the host's set, whose members the kubelet's probes reach
// with an address that the pods' rules let pass (node/probeset).
//
// It promises that Put and Remove never wait for the kernel; that the set follows the latest calls, by one worker that repeats what
// fails; that what other programs do to it is undone, at their notification or within recheckInterval; that an address which two pods
// have is that pod's which got it last; and that nothing leaves the set before Complete, so that probes pass while the agent restarts,
// nor while its pod is known without an address. It never writes outside of the set's table, but for the rules of the reference that it
// replaces.
//
// Start reading at Keeper.
package probes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfwatch"
	"github.com/meshcni/istio-cni/internal/node/probeset"
)

// Options configures a Keeper.
type Options struct {
	// Host is the node's network namespace, which stays open until Run has returned.
	Host *netns.Namespace
	// V4 and V6 are the source addresses of probes. Without IPv6, the IPv6 addresses of pods are left out.
	V4, V6 netip.Addr
	IPv6   bool
	// Changed is called, without locks held, with the UID of a pod whose State or Removed may have changed. It must not block.
	Changed func(uid string)
	Log     *slog.Logger
	// Clock is the real one if nil.
	Clock clock.WithTicker
}

const (
	// recheckInterval is the time between comparisons, for notifications that were lost or could not be subscribed to.
	recheckInterval = 10 * time.Second
	// notifyInterval bounds how often other programs' changes cause a comparison: kube-proxy may change rules all the time.
	notifyInterval = time.Second
	// The pause after a failure doubles from firstPause to lastPause.
	firstPause = 100 * time.Millisecond
	lastPause  = recheckInterval
)

// Keeper keeps the set. Its methods are safe for concurrent use.
type Keeper struct {
	Options

	open func(*netns.Namespace, time.Duration) (*nfwatch.Watch, error)
	wake chan struct{}

	mu       sync.Mutex
	pods     map[string]*pod
	removed  map[string]uint64 // the Removes that no attempt has followed yet
	calls    uint64            // the number of the last Put or Remove
	complete bool
	// applied is the number of the last call that the kernel's set has, and err why a later attempt failed.
	applied uint64
	err     error
}

// pod is a pod with its addresses.
type pod struct {
	uid       string
	addresses []netip.Addr
	since     uint64 // the Put that gave it these addresses
	in        bool   // the last attempt's State
	err       error
}

// New returns a Keeper without pods.
func New(o Options) *Keeper {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	return &Keeper{Options: o, open: nfwatch.Open, wake: make(chan struct{}, 1), pods: map[string]*pod{}, removed: map[string]uint64{}}
}

// Put wants the addresses of a pod in the set, and no other addresses of it. No addresses means that they are not known yet. Put with
// the same addresses changes nothing.
func (k *Keeper) Put(uid string, addresses []netip.Addr) {
	addresses = slices.DeleteFunc(slices.Clone(addresses), func(a netip.Addr) bool { return !a.IsValid() })
	for i, a := range addresses {
		addresses[i] = probeset.Plain(a)
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	addresses = slices.Compact(addresses)
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.pods[uid]; p != nil && slices.Equal(p.addresses, addresses) {
		return
	}
	delete(k.removed, uid)
	k.calls++
	k.pods[uid] = &pod{uid: uid, addresses: addresses, since: k.calls}
	k.poke()
}

// Remove removes a pod's addresses from the set, but for those that another pod has.
func (k *Keeper) Remove(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pods[uid] != nil {
		delete(k.pods, uid)
		k.calls++
		k.removed[uid] = k.calls
		k.poke()
	}
}

// Removed reports whether the set was brought up to date after Remove, or whether that failed, which is repeated. Changed is called then.
func (k *Keeper) Removed(uid string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.removed[uid] == 0
}

// Complete says that all pods were put which have been wanted before this agent started: other entries are removed from now on.
func (k *Keeper) Complete() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.complete = true
	k.poke()
}

// poke wakes the worker.
func (k *Keeper) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// State reports whether the set has all addresses of a pod that it can have, and why not, as of the last attempt: Changed follows each
// change of it. It is false for a pod without addresses, and for one whose address another pod got later, which err then says.
func (k *Keeper) State(uid string) (in bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.pods[uid]; p != nil {
		return p.in, p.err
	}
	return false, nil
}

func (k *Keeper) state(p *pod, entries map[netip.Addr]string) (in bool, err error) {
	if len(p.addresses) == 0 {
		return false, nil
	}
	for _, a := range p.addresses {
		if of := entries[a]; of != p.uid {
			return false, fmt.Errorf("address %s is pod %s's, which got it later", a, of)
		}
	}
	return p.since <= k.applied, k.err
}

// entries returns the pod of each address: the one that got it last.
func (k *Keeper) entries() map[netip.Addr]string {
	entries, since := map[netip.Addr]string{}, map[netip.Addr]uint64{}
	for uid, p := range k.pods {
		for _, a := range p.addresses {
			if p.since > since[a] {
				entries[a], since[a] = uid, p.since
			}
		}
	}
	return entries
}

// Run keeps the set until ctx ends. The set stays.
func (k *Keeper) Run(ctx context.Context) {
	w := worker{Keeper: k}
	defer w.close()
	tick := k.Clock.NewTicker(recheckInterval)
	defer tick.Stop()
	for pause := firstPause; ctx.Err() == nil; {
		if err := w.apply(ctx); err != nil {
			select {
			case <-ctx.Done():
			case <-k.Clock.After(pause):
			}
			pause = min(2*pause, lastPause)
			continue
		}
		pause = firstPause
		select {
		case <-ctx.Done():
		case <-k.wake:
		case <-w.changed():
		case <-tick.C():
		}
	}
}

// worker has what only Run needs.
type worker struct {
	*Keeper

	watch *nfwatch.Watch
	// replaced: what another agent left on the host is gone.
	replaced bool
	// failing is the text of the last error.
	failing string
}

func (w *worker) close() {
	if w.watch != nil {
		w.watch.Close()
	}
}

// changed receives a value when the node's rules have changed.
func (w *worker) changed() <-chan struct{} {
	if w.watch == nil {
		return nil
	}
	return w.watch.Changed()
}

// apply brings the kernel's set to the latest state. Other failures than that only cost a log line: the next comparison repeats them.
func (w *worker) apply(ctx context.Context) error {
	lesser := w.subscribe() // before the comparison, so that no change is missed
	want, calls, complete := w.want()
	changed, err := probeset.Apply(w.Host, want) //nolint:contextcheck // the kernel answers at once, and reading is bounded
	if changed {
		w.Log.DebugContext(ctx, "the addresses of ambient pods on the host were written", slog.Int("addresses", len(want.Pods)))
	}
	w.settle(calls, err)
	if err == nil && complete && !w.replaced {
		failed := probeset.RemoveReference(w.Host)
		w.replaced = failed == nil
		lesser = errors.Join(lesser, failed)
	}
	w.report(ctx, errors.Join(err, lesser))
	return err
}

func (w *worker) subscribe() (err error) {
	if w.watch == nil {
		w.watch, err = w.open(w.Host, notifyInterval)
	}
	return err
}

// want returns the wanted state, with the number of the last call in it.
func (k *Keeper) want() (w probeset.Want, calls uint64, complete bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	unknown := map[string]bool{} // pods that have an address, which is not known
	for uid, p := range k.pods {
		unknown[uid] = len(p.addresses) == 0
	}
	complete = k.complete
	return probeset.Want{
		V4: k.V4, V6: k.V6, IPv6: k.IPv6, Pods: k.entries(),
		Keep: func(_ netip.Addr, uid string) bool { return !complete || unknown[uid] },
	}, k.calls, complete
}

// settle records the result of an attempt, and calls Changed for each pod whose State or Removed it has changed.
func (k *Keeper) settle(calls uint64, err error) {
	var changed []string
	k.mu.Lock()
	if k.err = err; err == nil {
		k.applied = calls
	}
	entries := k.entries()
	for uid, p := range k.pods {
		in, err := k.state(p, entries)
		if in != p.in || fmt.Sprint(err) != fmt.Sprint(p.err) {
			changed = append(changed, uid)
		}
		p.in, p.err = in, err
	}
	for uid, at := range k.removed {
		if at <= calls {
			delete(k.removed, uid)
			changed = append(changed, uid)
		}
	}
	k.mu.Unlock()
	if k.Changed != nil {
		for _, uid := range changed {
			k.Changed(uid)
		}
	}
}

// report logs an error once, and its end.
func (w *worker) report(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == w.failing:
	case err != nil:
		w.Log.WarnContext(ctx, "the host's side of ambient mode is not as it should be: probes of ambient pods may fail", slog.String("error", text))
	default:
		w.Log.InfoContext(ctx, "the host's side of ambient mode is as it should be")
	}
	w.failing = text
}
