package enrol

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfwatch"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// work is a turn of a pod.
type work struct {
	*Controller
	*podwork.Turn

	e *entry
	// at is the step under way.
	at metrics.AmbientStep
}

// waits ends a turn that goes on with a notification of ztunnel, the probe set, the API server or the watch.
func waits(format string, args ...any) error {
	return fmt.Errorf("%w for %w", podwork.ErrWaits, fmt.Errorf(format, args...))
}

func (c *Controller) reconcile(ctx context.Context, t *podwork.Turn, _ *struct{}) error {
	select {
	case <-c.primed:
	case <-ctx.Done():
		return ctx.Err()
	}
	e := c.entry(t.Pod.Facts.UID)
	if e == nil {
		return nil
	}
	e.turn.Lock()
	defer e.turn.Unlock()
	if e.ended() {
		return nil
	}
	w := &work{Controller: c, Turn: t, e: e}
	wanted := t.Decision.Outcome == sidecar.Enrol && !c.isZtunnel(t.Pod) && !podwork.PodOf(t.Pod).Ended
	err := w.step(ctx, wanted)
	status, served := Status{Wanted: wanted}, netns.Inode{}
	switch {
	case err != nil:
		status.Missing = podwork.Cause(ctx, err)
	case !wanted:
		status.Missing = errNotEligible.Error()
	case e.seen.space != nil:
		served = e.seen.space.Inode()
	}
	before := e.status()
	e.set(status, served)
	if wanted && (before.Missing == "") != (status.Missing == "") {
		c.Moved(e.key)
	}
	if err != nil && w.at != "" && !errors.Is(err, podwork.ErrWaits) {
		c.Failed(w.at)
	}
	return err
}

// step brings the pod one step further.
func (w *work) step(ctx context.Context, wanted bool) error {
	w.e.mu.Lock()
	err := w.e.patchErr
	w.e.patchErr = nil
	w.e.mu.Unlock()
	switch {
	case err != nil: // the next turn asks again, after a pause
		w.at = metrics.StepAnnotation
		return err
	case podwork.PodOf(w.Pod).Ended:
		w.found(w.e.uid)
		w.e.offered(nil)
		w.leave(w.e)
		w.e.seen.drop()
		return w.annotate("")
	case w.Err != nil:
		return w.Err
	case wanted:
		return w.enrol(ctx)
	}
	w.found(w.e.uid)
	return w.release(ctx)
}

// isZtunnel reports whether a pod is a ztunnel. Its traffic must not go to itself.
func (c *Controller) isZtunnel(p kube.Pod) bool {
	return p.Facts.Namespace == c.SystemNamespace && p.Facts.Labels[ambient.ZtunnelLabel] == ambient.ZtunnelApp
}

// enrol: namespace, rules, ztunnel, probe set, annotation.
func (w *work) enrol(ctx context.Context) error {
	s := &w.e.seen
	w.at = metrics.StepNamespace
	if err := w.namespace(); err != nil {
		return err
	}
	if s.running && w.e.annotation() == "" { // else the next agent would not find the rules of a pod that is not wanted any more
		w.at = metrics.StepAnnotation
		return w.annotate(ambient.RedirectionPending)
	}
	// Rules without ztunnel refuse all connections. A pod that runs outside of the mesh keeps its own until a ztunnel is connected.
	spared := s.running && s.applied == nil && w.e.annotation() != ambient.RedirectionEnabled &&
		errors.Is(w.Ztunnels.State(w.e.uid).Err, ztunnels.ErrNoZtunnel)
	w.at = metrics.StepRules
	if !spared {
		if err := w.rules(ctx); err != nil {
			return err
		}
	}
	w.Ztunnels.Put(workload(w.Pod), s.space)
	if s.replaced != nil {
		s.replaced.Close()
		s.replaced = nil
	}
	w.at = metrics.StepZtunnel
	if err := w.acknowledged(); err != nil {
		return err
	}
	if spared { // a ztunnel has connected meanwhile
		if err := w.rules(ctx); err != nil {
			return err
		}
	}
	w.Probes.Put(w.e.uid, s.addresses)
	if in, err := w.Probes.State(w.e.uid); err != nil {
		return waits("the probe set of the node: %w", err)
	} else if !in && len(s.addresses) > 0 { // without an address, no probe reaches the pod: its status may bring one
		return waits("the probe set of the node")
	}
	return w.annotate(ambient.RedirectionEnabled)
}

func workload(p kube.Pod) ztunnels.Workload {
	return ztunnels.Workload{UID: p.Facts.UID, Name: p.Facts.Name, Namespace: p.Facts.Namespace, ServiceAccount: p.ServiceAccount}
}

// namespace makes sure that the namespace is known: the one that the plugin offered, or one that has the pod's addresses. A pod whose
// status gets other addresses may have another sandbox. At an offer, the status may still have those of the sandbox before.
func (w *work) namespace() error {
	s := &w.e.seen
	if o := w.e.take(); o != nil {
		return w.accept(o)
	}
	switch {
	case s.space != nil && (len(w.Pod.Addresses) == 0 || sameSet(s.status, w.Pod.Addresses)):
		return nil
	case len(w.Pod.Addresses) == 0:
		return waits("an address in its status, or for its plugin")
	case s.space != nil && w.hasAddress(s.space):
		s.status, s.addresses = w.Pod.Addresses, w.Pod.Addresses
		return nil
	case w.Pod.Deleting && s.space == nil:
		return waits("its end")
	case !w.Reachable():
		return errUnreachable
	}
	return w.search(w.e)
}

var errUnreachable = errors.New("its network namespace cannot be reached: mount the node's /proc at /host/proc")

// accept takes over an offer.
func (w *work) accept(o *offer) error {
	s := &w.e.seen
	if o.found != nil {
		if err := w.Claims(o.found); err != nil {
			o.space.Close()
			return err
		}
		w.Log.Debug("found the pod's network namespace", slog.String("source", string(o.found.Source)))
	} else {
		w.found(w.e.uid) // what a search under way finds may be the sandbox before this one
	}
	w.use(o.space)
	s.running = o.found != nil
	s.status, s.addresses = w.Pod.Addresses, o.addresses
	if len(o.addresses) == 0 {
		s.addresses = s.status
	}
	return nil
}

// hasAddress reports whether a namespace has one of the pod's addresses.
func (w *work) hasAddress(space *netns.Namespace) bool {
	all, err := netns.In(space, route.Addresses)
	return err == nil && slices.ContainsFunc(all, func(a netip.Addr) bool { return slices.Contains(w.Pod.Addresses, a) })
}

// use takes over a namespace. The one before stays open until ztunnel has the new one.
func (w *work) use(space *netns.Namespace) {
	s := &w.e.seen
	if s.space != nil && s.space.Inode() == space.Inode() {
		space.Close()
		return
	}
	if s.guard != nil {
		s.guard.Close()
	}
	replaced := s.space
	if s.replaced != nil { // ztunnel never got s.space
		s.space.Close()
		replaced = s.replaced
	}
	*s = seen{space: space, replaced: replaced}
}

func sameSet(a, b []netip.Addr) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(one netip.Addr) bool { return !slices.Contains(b, one) })
}

// rules makes sure that the namespace has the wanted rules. It compares them again only after a change.
func (w *work) rules(ctx context.Context) error {
	s, spec := &w.e.seen, w.Decision.Ambient
	if s.guard == nil {
		if err := w.watch(); err != nil {
			return err
		}
	}
	same := s.applied != nil && reflect.DeepEqual(*s.applied, spec)
	if touched := w.e.touched.Swap(false); same && !touched {
		return nil
	}
	space := w.Space(s.space)
	return s.space.Do(func() error { return w.apply(ctx, space, same) }) // one entry for all
}

// apply compares the rules, and writes them if they differ. A change of the wanted rules' own version was made by apply itself.
func (w *work) apply(ctx context.Context, space redirection.Namespace, same bool) error {
	s, spec := &w.e.seen, w.Decision.Ambient
	before, err := space.Version()
	if err == nil && same && before == s.version {
		return nil
	}
	began := w.Clock.Now()
	if pause := s.due.Sub(began); pause > 0 && (same || s.unreadable != nil) {
		w.e.touched.Store(true)
		w.Again(pause)
		return s.unreadable
	}
	s.applied = nil // until this has succeeded
	if err != nil {
		return err
	}
	report, err := space.Apply(ctx, spec, redirection.Reconcile)
	now := w.Clock.Now()
	s.due, s.unreadable = now.Add(share*now.Sub(began)), nil
	if errors.Is(err, redirection.ErrUninspectable) {
		s.due, s.unreadable = now.Add(time.Minute), waits("rules that can be read: %w", err)
		w.Again(time.Minute)
		return s.unreadable
	}
	if err != nil {
		err = fmt.Errorf("writing its rules: %w", err)
		s.unreadable = waits("the next attempt: %w", err)
		return err
	}
	if s.version, err = space.Version(); err != nil {
		return err
	}
	if len(report.Programs) > 0 {
		before.Generation++
		w.Log.InfoContext(ctx, "wrote the rules of an ambient pod", slog.Any("tools", report.Tools))
	}
	if before.Generation != s.version.Generation { // another program has changed rules meanwhile
		s.version = redirection.Version{}
		w.e.touched.Store(true)
		w.Again(time.Second)
	}
	s.applied = &spec
	return nil
}

// guardPause is the shortest time between two comparisons of a pod's rules: a tenant may change them at any rate. A comparison is
// followed by a pause of share times its length, also if it failed: many rules take long, and the workers serve all pods.
const (
	guardPause = time.Second
	share      = 20
)

// watch gives the pod a turn whenever a rule of its namespace has changed.
func (w *work) watch() error {
	guard, err := nfwatch.Open(w.e.seen.space, guardPause)
	if err != nil {
		return fmt.Errorf("watching its rules: %w", err)
	}
	w.e.seen.guard = guard
	c, e := w.Controller, w.e
	go func() {
		for range guard.Changed() { // until Close
			e.touched.Store(true)
			c.pods.Enqueue(e.key)
		}
	}()
	return nil
}

// acknowledged reports whether the newest ztunnel serves the pod. Until then, the annotation of a new pod is pending.
func (w *work) acknowledged() error {
	s := &w.e.seen
	state := w.Ztunnels.State(w.e.uid)
	switch {
	case state.Acked:
		s.retryAt, s.pause = time.Time{}, 0
		return nil
	case state.Err == nil:
		return waits("the acknowledgement of ztunnel")
	}
	if w.e.annotation() == "" {
		w.write(ambient.RedirectionPending)
	}
	now := w.Clock.Now()
	switch {
	case errors.Is(state.Err, ztunnels.ErrNoZtunnel):
		return waits("ztunnel: %w", state.Err)
	case s.retryAt.IsZero():
		s.pause = min(max(2*s.pause, podwork.RetryBase), retryMax)
		s.retryAt = now.Add(s.pause)
		w.Again(s.pause)
		w.Failed(w.at)
	case !now.Before(s.retryAt):
		s.retryAt = time.Time{}
		w.Ztunnels.Retry(w.e.uid)
	}
	return waits("ztunnel, which refuses the pod: %w", state.Err)
}

// release takes a running pod out of the mesh: annotation, ztunnel, rules, probe set. The annotation is pending meanwhile, so that an
// agent that starts in between goes on.
func (w *work) release(ctx context.Context) error {
	e, s := w.e, &w.e.seen
	w.Ambient = true
	e.offered(nil)
	if e.writing() {
		return waits("the API server to take its annotation")
	}
	annotation := e.annotation()
	if annotation == "" && s.space == nil {
		return nil
	}
	if annotation == ambient.RedirectionEnabled {
		return w.annotate(ambient.RedirectionPending)
	}
	w.Ztunnels.Remove(e.uid)
	if !w.Ztunnels.Removed(e.uid) {
		return waits("ztunnel to acknowledge the deletion of the pod")
	}
	w.at = metrics.StepRules
	if err := w.clean(ctx); err != nil {
		return err
	}
	w.leave(e)
	if !w.Probes.Removed(e.uid) {
		return waits("the probe set of the node, which still has the pod")
	}
	s.drop()
	return w.annotate("")
}

// clean removes the rules of a pod that goes on without the mesh.
func (w *work) clean(ctx context.Context) error {
	s := &w.e.seen
	remove := func(space redirection.Namespace) error {
		spec, _ := ambient.Of(w.Conf.Policy().Ambient, w.Pod.Facts.Annotations)
		report, err := space.Clean(ctx, spec)
		if err != nil {
			return fmt.Errorf("removing its rules: %w", err)
		}
		if len(report.Programs) > 0 {
			w.Log.InfoContext(ctx, "removed the rules of a pod that left ambient mode")
		}
		return nil
	}
	switch {
	case s.space != nil:
		return remove(w.Space(s.space))
	case w.Pod.Deleting || len(w.Pod.Addresses) == 0 || !w.Pod.Facts.Eligible(): // the rules of a sidecar share chains with ambient mode's
		return nil
	case !w.Reachable():
		return errUnreachable
	}
	return w.InNamespace(ctx, remove)
}
