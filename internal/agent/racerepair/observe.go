package racerepair

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
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// errRefused is the cause for a pod that the plugin would refuse.
var errRefused = errors.New("the pod's settings are invalid")

// observe compares the namespace with the wanted redirection. It reads the rules only if their version has changed or a
// request waits for the result.
func (j *job) observe(ctx context.Context) ([]audit.Problem, error) {
	switch {
	case j.decision.Outcome == sidecar.Refuse:
		return nil, fmt.Errorf("%w: %w", errRefused, j.decision.Err)
	case j.conf.Problems != nil:
		return nil, fmt.Errorf("%w: %w", errPolicy, j.conf.Problems)
	}
	a, spec := &j.memory.audited, j.decision.Spec
	var o audit.Observation
	err := j.knownNamespace(ctx, func(space redirection.Namespace) error {
		version, err := space.Version()
		if err != nil {
			return err
		}
		if j.forced || version != a.version {
			if err = j.readRules(ctx, space); err != nil {
				return err
			}
			a.version = version
		}
		if o.Families, err = space.Families(spec); err != nil {
			return err
		}
		if o.Routing, err = space.VerifyRouting(spec, redirection.Report{Families: o.Families}); err != nil {
			return err
		}
		in, err := j.peers(space)
		if err != nil {
			return err
		}
		o.Collisions = j.collisions(in)
		o.Listeners, o.Unknown = j.listeners(space, in)
		return nil
	})
	o.Mesh, o.Rules = a.rules.mesh, a.rules.problems
	return audit.Assess(spec, o), err
}

// readRules reads and compares the rules, and keeps what is needed of them.
func (j *job) readRules(ctx context.Context, space redirection.Namespace) error {
	a, spec := &j.memory.audited, j.decision.Spec
	a.version = redirection.Version{}
	_, report, err := space.AuditAny(ctx, spec)
	a.rules = rules{
		problems: audit.Rules(report.Mesh, report.Diffs, report.Ways), mesh: report.Mesh, repairable: !report.Clean(), tools: toolsOf(report),
	}
	switch {
	case err != nil:
	case report.Clean():
		a.captured = &spec
	case a.captured != nil && !reflect.DeepEqual(*a.captured, spec):
		_, before, failed := space.AuditAny(ctx, *a.captured)
		if failed == nil && before.Clean() && len(before.Ways) == 0 {
			detail := "its settings or the plugin's have changed, and the rules are those from before, until it is restarted"
			a.rules.earlier, a.rules.problems = true, []audit.Problem{{State: audit.Drifted, Detail: detail}}
		}
	}
	return err
}

// peers are the processes of a pod. ids converts to the user namespace whose ids the rules have.
type peers struct {
	processes []sandbox.Process
	ids       sandbox.IDs
}

// peers returns the pod's processes with the ids of its namespace, none if those are not known.
func (j *job) peers(space redirection.Namespace) (in peers, err error) {
	users, own, err := space.NetNS.Users()
	if known := own; err == nil {
		if !own {
			in.ids, known = sandbox.IDsOf(users, j.processes)
		}
		if known {
			in.processes = j.processes
		}
	}
	return in, err
}

// listeners returns who listens on an address, nil before the proxy has had its time to start. If that is unknown it returns the
// cause. A pod without listeners is checked until it has some: each start of a proxy that crashes would end the fault.
func (j *job) listeners(space redirection.Namespace, in peers) (listeners func(netip.AddrPort) []audit.Listener, unknown error) {
	began, silent := j.proxySince(), func(p audit.Problem) bool { return p.State == audit.NoListener }
	early := j.Clock.Since(began) < startup && !slices.ContainsFunc(j.memory.audited.status.Problems, silent)
	if began.IsZero() || early {
		return nil, nil
	}
	all, err := netns.In(space.NetNS, sockdiag.Listening)
	if err != nil {
		return nil, err
	}
	if j.listed.Before(began.Add(time.Second)) { // the kubelet's times have whole seconds: the list may lack the proxy
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

// listener returns the listener with a UID, and the GIDs of the processes that have the same UID.
func (in peers) listener(uid uint32) audit.Listener {
	one := audit.Listener{UID: in.ids.UID(uid)}
	for _, p := range in.processes {
		if p.UID == uid {
			one.GIDs = append(one.GIDs, in.ids.GID(p.GID))
		}
	}
	return one
}

// proxySince returns since when the proxy should be there: its start, or else the latest of its end, the pod's start and the ends of
// init containers. It is the zero time for a pod that is just starting.
func (j *job) proxySince() time.Time {
	all := slices.Concat(j.pod.Init, j.pod.Containers)
	at := slices.IndexFunc(all, func(c repair.Container) bool { return c.Name == sidecar.ProxyContainer })
	if at < 0 {
		return time.Time{}
	}
	proxy := all[at]
	if proxy.State.Running {
		return proxy.State.Began
	}
	times := []time.Time{j.pod.Started, proxy.State.Finished, proxy.Last.Finished}
	for _, c := range j.pod.Init {
		times = append(times, c.State.Finished)
	}
	// The kubelet starts the containers one after the other, with the pull of the image ahead of each: the application may run.
	starts := !proxy.State.Terminated && slices.Contains([]string{"", "ContainerCreating", "PodInitializing"}, proxy.State.Reason)
	for _, c := range j.pod.Containers {
		if starts && c.State.Running {
			starts, times = false, append(times, c.State.Began)
		}
	}
	if starts {
		return time.Time{}
	}
	return slices.MaxFunc(times, time.Time.Compare)
}

// searchEvery is the number of inspections after which a known namespace is searched again: the records of the node may
// name another one by then.
const searchEvery = 12

// knownNamespace runs fn, which must only read, with the pod's network namespace: that of the last inspection if its path still
// leads to it and no other pod has the pod's addresses, which saves the search.
func (j *job) knownNamespace(ctx context.Context, fn func(redirection.Namespace) error) error {
	at := &j.memory.audited.place
	if at.uses++; at.path != "" && at.uses < searchEvery && !j.forced && j.podWithSameIP(j.pod) == "" {
		if known, err := netns.Open(at.path); err == nil {
			defer known.Close()
			if known.Inode() == at.inode {
				return fn(j.space(known))
			}
		}
	}
	*at = place{}
	return j.inNamespace(ctx, fn)
}

// A list of the node's processes is used for scanInterval, and for longer if it took long: a pod can have very many. Where a request
// waits for the result it is used for scanForced.
const (
	scanInterval = time.Minute
	scanForced   = 5 * time.Second
)

// collisions lists the processes of the pod that run with an identity of the proxy in another container.
func (j *job) collisions(in peers) (all []audit.Process) {
	names := map[string]string{}
	for i, c := range slices.Concat(j.pod.Init, j.pod.Containers, j.pod.Ephemeral) {
		if c.ID != "" && !sidecar.OfTheMesh(c.Name, i < len(j.pod.Init)) {
			names[c.ID] = c.Name
		}
	}
	spec := j.decision.Spec
	for _, p := range in.processes {
		one := audit.Process{PID: p.PID, Thread: p.Thread, Container: names[p.Container], UID: in.ids.UID(p.UID), GID: in.ids.GID(p.GID)}
		if one.Container != "" && (slices.Contains(spec.UIDs, one.UID) || slices.Contains(spec.GIDs, one.GID)) {
			all = append(all, one)
		}
	}
	return all
}

// podProcesses lists the processes of all pods by pod UID. listed is the begin of the search, zero if the list may be incomplete.
func (c *controller) podProcesses(ctx context.Context, forced bool) (byPod map[string][]sandbox.Process, listed time.Time) {
	s := &c.processes
	s.mu.Lock() // not c.mu: the watch of the pods must not wait for the procfs
	defer s.mu.Unlock()
	began, age := c.Clock.Now(), max(scanInterval, duty*s.took)
	if forced {
		age = scanForced
	}
	if c.Processes == nil || s.byPod != nil && began.Sub(s.scanned) < age {
		return s.byPod, s.listed
	}
	all, err := c.Processes(ctx)
	if err != nil {
		c.Log.WarnContext(ctx, "the processes of the node cannot be listed", slog.String("error", err.Error()))
	}
	s.byPod, s.listed, s.scanned = all, began, c.Clock.Now()
	if s.took = s.scanned.Sub(began); err != nil {
		s.listed = time.Time{}
	}
	return s.byPod, s.listed
}

// The pause between two repairs of a pod is the interval after the first one, doubled up to maxRepairPause. It ends when the pod
// was captured for calm after it.
const (
	maxRepairPause = 6 * time.Hour
	calm           = time.Hour
)

// restorable reports whether writing the wanted rules is switched on, due, and can help. A pod on which race repair acts is left to
// it.
func (j *job) restorable(state audit.State) bool {
	a := &j.memory.audited
	byRepair := j.finding.Broken && j.mode() != repair.Report
	elsewhere := state == audit.ForeignRule && !a.rules.repairable // in a table that is not the mesh's
	return j.Audit.Repair && slices.Contains(aboutRules, state) && !byRepair && !elsewhere && !a.rules.earlier && !j.Clock.Now().Before(a.repairAfter)
}

// restore writes the wanted rules if need be, and returns the problems that remain.
func (j *job) restore(ctx context.Context, found []audit.Problem) []audit.Problem {
	a, state := &j.memory.audited, audit.StateOf(found)
	if !j.restorable(state) || !j.unchanged() {
		return found
	}
	a.repairAfter = j.Clock.Now().Add(min(j.Audit.Interval<<min(a.repairs, 16), maxRepairPause))
	a.repairs++
	var report redirection.Report
	err := j.inNamespace(ctx, func(space redirection.Namespace) (err error) {
		report, err = space.Apply(ctx, j.decision.Spec, redirection.Reconcile)
		return err
	})
	left := found
	if err == nil {
		left, err = j.observe(ctx)
	}
	if errors.Is(context.Cause(ctx), context.Canceled) || !j.unchanged() {
		return found
	}
	what := "the pod " + summary(found)
	if err != nil || slices.Contains(aboutRules, audit.StateOf(left)) {
		if err != nil {
			what, left = what+", and its rules cannot be restored: "+cause(ctx, err)+remedy(err), found
		} else {
			what += "; the wanted rules are written, and the pod still " + summary(left)
		}
		j.Metrics.AuditRepaired(metrics.RepairFail)
		j.event(kube.EventWarning, ReasonRepaired, what+j.backoffText())
		a.reported = audit.StateOf(left)
		return left
	}
	j.Metrics.AuditRepaired(metrics.RepairSuccess)
	j.log.InfoContext(ctx, "restored the pod's rules", slog.String("problem", what), slog.String("tools", toolsOf(report)))
	j.event(kube.EventNormal, ReasonRepaired, what+"; its rules are restored. Connections that it opened meanwhile stay outside of "+
		"the mesh until they are closed")
	a.reported = audit.Captured
	return left
}

// backoffText says when the next repair is, "" if none was tried.
func (j *job) backoffText() string {
	a := &j.memory.audited
	if wait := a.repairAfter.Sub(j.Clock.Now()); j.Audit.Repair && a.repairs > 0 && wait > 0 {
		return fmt.Sprintf(". Repair %d did not last: the next one is in %s at the earliest", a.repairs, wait.Round(time.Second))
	}
	return ""
}
