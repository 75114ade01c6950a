package auditor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// errRefused is the cause for a pod that the plugin would refuse.
var errRefused = errors.New("the pod's settings are invalid")

// observe compares the namespace with the wanted redirection. It reads the rules only if their version has changed or a
// request waits for the result.
func (w *work) observe(ctx context.Context) ([]audit.Problem, error) {
	switch {
	case w.Decision.Outcome == sidecar.Refuse:
		return nil, fmt.Errorf("%w: %w", errRefused, w.Decision.Err)
	case w.Conf.Problems != nil:
		return nil, fmt.Errorf("%w: %w", podwork.ErrPolicy, w.Conf.Problems)
	case w.Decision.Sandbox != "":
		return []audit.Problem{{State: audit.Sandboxed, Detail: w.sandboxed()}}, nil
	}
	m := w.memory
	var o audit.Observation
	err := w.knownNamespace(ctx, func(space redirection.Namespace) error {
		return space.NetNS.Do(func() error { return w.read(ctx, space, &o) }) // one entry for all
	})
	o.Mesh, o.Rules = m.rules.mesh, m.rules.problems
	w.enrolment(&o)
	return audit.Assess(w.Decision.Wanted(), o), err
}

// missing is Options.Enrolment for the pod. Where another agent enrols, the annotation shows that it has done its steps.
func (w *work) missing() (step string, known bool) {
	now := w.Pod.Facts.Annotations[ambient.RedirectionKey]
	switch {
	case w.Decision.Outcome != sidecar.Enrol:
	case w.Enrolment != nil:
		return w.Enrolment(w.Pod.Facts.UID)
	case w.Settings.Observe && now != ambient.RedirectionEnabled:
		return fmt.Sprintf("the annotation %s is %q, not %q", ambient.RedirectionKey, now, ambient.RedirectionEnabled), true
	}
	return "", true
}

// unlisted returns that an address of the pod is not in the probe set, "" if all are.
func (w *work) unlisted() (step string, err error) {
	if w.Decision.Outcome != sidecar.Enrol || w.ProbeSet == nil {
		return "", nil
	}
	set, err := w.ProbeSet()
	for _, a := range w.Pod.Addresses {
		if _, in := set[a]; !in && err == nil && (a.Is4() || w.Decision.Ambient.IPv6) {
			step = fmt.Sprintf("the probe set of the node does not have the pod's address %s: its probes are captured", a)
		}
	}
	return step, err
}

// enrolment adds the missing step. A pod that has never had its rules is pending, not bypassed.
func (w *work) enrolment(o *audit.Observation) {
	step, known := w.missing()
	if unlisted, err := w.unlisted(); step == "" {
		step, o.Unknown = unlisted, cmp.Or(o.Unknown, err)
	}
	never := w.memory.captured == nil && !o.Mesh
	if never && !known {
		step = "the agent has not begun to enrol it"
	}
	if o.Pending = step; never && step != "" {
		o.Rules = nil
	}
}

// sandboxed describes a pod in a sandbox for its status.
func (w *work) sandboxed() string {
	validation := "no istio-validation has found the redirection inside"
	if repair.Validated(podwork.PodOf(w.Pod)) {
		validation = "its istio-validation has found the redirection inside"
	}
	return fmt.Sprintf("RuntimeClass %q: %s; %s", w.Pod.Facts.RuntimeClass, w.Decision.Sandbox.Sentence(), validation)
}

// perhapsSandboxed returns a hint, or "", for a pod that cannot be inspected: gVisor removes the addresses from the namespace.
func (w *work) perhapsSandboxed() string {
	if class := w.Pod.Facts.RuntimeClass; class != "" {
		return fmt.Sprintf(". If pods of RuntimeClass %q have a network stack of their own, add it to sandboxedRuntimes", class)
	}
	return ""
}

// read fills in the observation of a namespace.
func (w *work) read(ctx context.Context, space redirection.Namespace, o *audit.Observation) error {
	m, want := w.memory, w.Decision.Wanted()
	version, err := space.Version()
	if err != nil {
		return err
	}
	if w.forced || version != m.version {
		if err = w.readRules(ctx, space); err != nil {
			return err
		}
		m.version = version
	}
	if o.Families, err = space.Families(want); err != nil {
		return err
	}
	if o.Routing, err = space.VerifyRouting(want, redirection.Report{Families: o.Families}); err != nil {
		return err
	}
	var in peers
	if w.Decision.Outcome != sidecar.Enrol { // ztunnel has no process in the pod
		if in, err = w.peers(space); err != nil {
			return err
		}
		o.Collisions = w.collisions(in)
	}
	o.Listeners, o.Unknown = w.listeners(space, in)
	return nil
}

// readRules reads and compares the rules, and keeps a summary.
func (w *work) readRules(ctx context.Context, space redirection.Namespace) error {
	m, want := w.memory, w.Decision.Wanted()
	m.version = redirection.Version{}
	_, report, err := space.AuditAny(ctx, want)
	m.rules = rules{
		problems: audit.Rules(report.Mesh, report.Diffs, report.Ways), mesh: report.Mesh, repairable: !report.Clean(), tools: toolsOf(report),
	}
	switch {
	case err != nil:
	case report.Clean():
		m.captured = want
	case m.captured != nil && !reflect.DeepEqual(m.captured, want):
		_, before, failed := space.AuditAny(ctx, m.captured)
		if failed == nil && before.Clean() && len(before.Ways) == 0 {
			detail := "its settings or the plugin's have changed, and the pod keeps the earlier rules until it is restarted"
			if m.rules.earlier = w.Decision.Outcome == sidecar.Capture; !m.rules.earlier {
				detail = "its settings or the node's have changed, and the pod still has the earlier rules"
			}
			m.rules.problems = []audit.Problem{{State: audit.Drifted, Detail: detail}}
		}
	}
	return err
}

// peers are the processes of a pod. ids converts to the user namespace whose IDs the rules use.
type peers struct {
	processes []sandbox.Process
	ids       sandbox.IDs
}

// peers returns the pod's processes and the IDs of its user namespace, or no processes if the IDs are unknown.
func (w *work) peers(space redirection.Namespace) (in peers, err error) {
	users, own, err := space.NetNS.Users()
	if known := own; err == nil {
		if !own {
			in.ids, known = sandbox.IDsOf(users, w.processes)
		}
		if known {
			in.processes = w.processes
		}
	}
	return in, err
}

// listeners returns a function that finds an address's listeners, nil while the proxy may still be starting, or why they are unknown.
// A pod without listeners is checked until it has some: otherwise each restart of a crashing proxy would clear the fault.
func (w *work) listeners(space redirection.Namespace, in peers) (listeners func(netip.AddrPort) []audit.Listener, unknown error) {
	began, noListener := w.proxySince(), func(p audit.Problem) bool { return p.State == audit.NoListener }
	early := w.Clock.Since(began) < startup && !slices.ContainsFunc(w.memory.status.Problems, noListener)
	if began.IsZero() || early {
		return nil, nil
	}
	all, err := netns.In(space.NetNS, sockdiag.Listening)
	if err != nil {
		return nil, err
	}
	if w.listed.Before(began.Add(time.Second)) { // the kubelet's times have whole seconds: the list may lack the proxy
		in.processes = nil
	}
	return func(to netip.AddrPort) (found []audit.Listener) {
		for _, l := range all {
			if l.Accepts(to) {
				found = append(found, in.listener(l.UID))
			}
		}
		return found
	}, nil
}

// listener returns the listener with a UID, and the GIDs of all processes with that UID.
func (in peers) listener(uid uint32) audit.Listener {
	one := audit.Listener{UID: in.ids.UID(uid)}
	for _, p := range in.processes {
		if p.UID == uid {
			one.GIDs = append(one.GIDs, in.ids.GID(p.GID))
		}
	}
	return one
}

// proxySince returns the time from which the proxy should run: its start, or else the latest of its end, the pod's start and the
// ends of init containers. It is the zero time for a pod that is just starting. For a pod in ambient mode it is the time since which it
// is seen to be enrolled, zero while it is not.
func (w *work) proxySince() time.Time {
	if w.Decision.Outcome == sidecar.Enrol {
		return w.memory.enrolled
	}
	all := slices.Concat(w.Pod.Init, w.Pod.Containers)
	at := slices.IndexFunc(all, func(c repair.Container) bool { return c.Name == sidecar.ProxyContainer })
	if at < 0 {
		return time.Time{}
	}
	proxy := all[at]
	if proxy.State.Running {
		return proxy.State.Began
	}
	times := []time.Time{w.Pod.Started, proxy.State.Finished, proxy.Last.Finished}
	for _, c := range w.Pod.Init {
		times = append(times, c.State.Finished)
	}
	// The kubelet pulls each image just before it starts that container: the application may already run.
	starts := !proxy.State.Terminated && slices.Contains([]string{"", "ContainerCreating", "PodInitializing"}, proxy.State.Reason)
	for _, c := range w.Pod.Containers {
		if starts && c.State.Running {
			starts, times = false, append(times, c.State.Began)
		}
	}
	if starts {
		return time.Time{}
	}
	return slices.MaxFunc(times, time.Time.Compare)
}

// searchEvery is the number of inspections after which a known namespace is searched again: the node's records may then
// name another one.
const searchEvery = 12

// knownNamespace runs fn, which must only read, with the pod's network namespace. It searches for the namespace on a user's request and
// after searchEvery uses.
func (w *work) knownNamespace(ctx context.Context, fn func(redirection.Namespace) error) error {
	m := w.memory
	if m.uses++; m.place == (podwork.Place{}) || m.uses >= searchEvery || w.forced {
		m.place, m.uses = podwork.Place{}, 0
	}
	w.Place = cmp.Or(w.Place, m.place)
	err := w.InKnownNamespace(ctx, fn)
	m.place = w.Place
	return err
}

// collisions lists the processes of other containers of the pod that run with the proxy's UID or GID.
func (w *work) collisions(in peers) (all []audit.Process) {
	names := map[string]string{}
	for i, c := range slices.Concat(w.Pod.Init, w.Pod.Containers, w.Pod.Ephemeral) {
		if c.ID != "" && !sidecar.OfTheMesh(c.Name, i < len(w.Pod.Init)) {
			names[c.ID] = c.Name
		}
	}
	spec := w.Decision.Spec
	for _, p := range in.processes {
		one := audit.Process{PID: p.PID, Thread: p.Thread, Container: names[p.Container], UID: in.ids.UID(p.UID), GID: in.ids.GID(p.GID)}
		if one.Container != "" && (slices.Contains(spec.UIDs, one.UID) || slices.Contains(spec.GIDs, one.GID)) {
			all = append(all, one)
		}
	}
	return all
}
