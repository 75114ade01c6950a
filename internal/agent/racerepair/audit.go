package racerepair

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// AuditSettings are the user's settings of the audit.
type AuditSettings struct {
	// Interval is the time between two inspections of a pod that does not change, 0 for no audit.
	Interval time.Duration
	// Repair writes the rules of a pod that has lost or changed some; otherwise they are only reported.
	Repair bool
	// PodCondition publishes [kube.RedirectionVerified] on each pod.
	PodCondition bool
}

// Bounds of the audit's cost.
const (
	// duty is the ratio of the time between two inspections to the time of an inspection: one percent of a core.
	duty = 99
	// maxPause bounds the pause after one slow inspection, so that one pod does not delay the others for long; a pod whose
	// inspection is slow is inspected less often instead, by slowFactor.
	maxPause   = 10 * time.Second
	slowFactor = 1000
	// startup is the time that the proxy has for opening its listeners.
	startup = 15 * time.Second
)

// audited is the memory of the audit of a pod.
type audited struct {
	status audit.Status
	// due is the time of the next inspection of a pod that does not change.
	due time.Time
	// input is what the result rests on besides the namespace.
	input input
	// version is that of the rules from which report was made, the zero version if they have to be read.
	version redirection.Version
	report  redirection.Report
}

// input has the inputs of an inspection: a change is inspected at once.
type input struct {
	spec      redirect.Spec
	addresses []netip.Addr
	// running are the IDs of the running containers.
	running []string
}

// auditState is the shared state of the audit: the time before which no pod is inspected, and the processes of the node's pods.
type auditState struct {
	notBefore time.Time
	processes map[string][]audit.Process // by pod UID
	scanned   time.Time
}

func (j *job) input() input {
	in := input{spec: j.decision.Spec, addresses: j.pod.Addresses}
	for _, c := range slices.Concat(j.pod.Init, j.pod.Containers) {
		if c.State.Running {
			in.running = append(in.running, c.Name+" "+c.ID)
		}
	}
	return in
}

// audit inspects the pod if that is due, and reports a change of its state.
func (j *job) audit(ctx context.Context) {
	a := &j.memory.audited
	if j.Audit.Interval == 0 || !j.reachable() || podOf(j.pod).Ended || j.pod.Deleting || len(j.pod.Addresses) == 0 {
		*a = audited{}
		return
	}
	if j.decision.Outcome == sidecar.Pass {
		sentence := "is not redirected by the plugin: " + j.decision.Reason.Sentence()
		*a = audited{status: audit.Status{State: audit.Outside, Sentence: sentence, Remedy: j.decision.Reason.Remedy()}}
		return
	}
	now, in := j.Clock.Now(), j.input()
	changed := !reflect.DeepEqual(in, a.input)
	wait := a.due.Sub(now)
	if changed || j.forced {
		wait = 0
	}
	if !j.forced {
		wait = max(wait, j.pause(now))
	}
	if wait > 0 {
		j.queue.AddAfter(j.key(), wait)
		return
	}
	a.input = in
	before := a.status
	if !j.inspectAudit(ctx, changed) {
		return
	}
	took := j.Clock.Since(now)
	j.spend(now.Add(took), took)
	next := max(j.Audit.Interval, slowFactor*took)
	next += time.Duration(rand.Int64N(int64(next/5) + 1)) //nolint:gosec // jitter
	if began := j.proxySince(); !began.IsZero() && j.Clock.Since(began) < startup {
		next = startup
	}
	a.due = j.Clock.Now().Add(next)
	j.queue.AddAfter(j.key(), next)
	j.reportChange(ctx, before)
}

func (j *job) key() types.NamespacedName { return j.pod.Key() }

// pause returns the time until an inspection is allowed.
func (c *controller) pause(now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.auditing.notBefore.Sub(now)
}

// spend delays the next inspection, so that inspections take one percent of the time.
func (c *controller) spend(now time.Time, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.auditing.notBefore = now.Add(min(duty*took, maxPause))
}

// inspectAudit sets the status by an inspection of the namespace, and repairs the rules if that is wanted. It returns false if the
// controller ended meanwhile.
func (j *job) inspectAudit(ctx context.Context, changed bool) bool {
	a := &j.memory.audited
	problems, err := j.observe(ctx, changed)
	if err == nil && j.Audit.Repair && slices.ContainsFunc(problems, func(p audit.Problem) bool { return p.State == audit.Bypassed || p.State == audit.Drifted }) {
		problems, err = j.restore(ctx, problems)
	}
	if errors.Is(context.Cause(ctx), context.Canceled) { // not the PodTimeout
		return false
	}
	state := audit.StateOf(problems)
	if err != nil {
		state = audit.NotInspected
		problems = []audit.Problem{{State: state, Detail: cause(ctx, err) + remedy(err)}}
		a.version = redirection.Version{}
	}
	now := j.Clock.Now()
	since := a.status.Since
	if a.status.State != state {
		since = now
	}
	a.status = audit.Status{
		State: state, Sentence: state.Sentence(), Remedy: state.Remedy(), Since: since, Checked: now, Problems: problems,
		Backend: strings.Join(a.report.Tools, ","), Exceptions: audit.Exceptions(j.decision.Spec, sidecar.KeyOf),
	}
	return true
}

// errRefused is the cause for a pod that the plugin would refuse.
var errRefused = errors.New("the pod's settings are invalid")

// observe compares the namespace with the wanted redirection. It reads the rules only if their version has changed.
func (j *job) observe(ctx context.Context, changed bool) ([]audit.Problem, error) {
	if j.decision.Outcome == sidecar.Refuse {
		return nil, fmt.Errorf("%w: %w", errRefused, j.decision.Err)
	}
	if j.conf.Problems != nil {
		return nil, fmt.Errorf("%w: %w", errPolicy, j.conf.Problems)
	}
	a, spec := &j.memory.audited, j.decision.Spec
	var o audit.Observation
	err := j.inNamespace(ctx, func(space redirection.Namespace) error {
		version, err := space.Version()
		if err != nil {
			return err
		}
		if changed || version != a.version {
			a.version = redirection.Version{}
			if a.report, err = space.Verify(ctx, spec); err != nil {
				return err
			}
			a.version = version
		}
		if a.report.Families, err = space.Families(spec); err != nil {
			return err
		}
		if a.report.Routing, err = space.VerifyRouting(spec, a.report); err != nil {
			return err
		}
		if began := j.proxySince(); !began.IsZero() && j.Clock.Since(began) >= startup {
			var all []sockdiag.Listener
			err = space.NetNS.Do(func() (err error) {
				all, err = sockdiag.Listening()
				return err
			})
			o.Accepts = func(to netip.AddrPort) bool {
				return slices.ContainsFunc(all, func(l sockdiag.Listener) bool { return l.Accepts(to) })
			}
		}
		return err
	})
	o.Mesh, o.Diffs, o.Routing, o.Families = a.report.Mesh, a.report.Diffs, a.report.Routing, a.report.Families
	o.Collisions = j.collisions(ctx)
	return audit.Assess(spec, o), err
}

// proxySince returns since when the proxy runs, the zero time if it does not.
func (j *job) proxySince() time.Time {
	for _, c := range slices.Concat(j.pod.Init, j.pod.Containers) {
		if c.Name == sidecar.ProxyContainer && c.State.Running {
			return c.State.Began
		}
	}
	return time.Time{}
}

// scanInterval is the time for which a list of the node's processes is used.
const scanInterval = 30 * time.Second

// collisions lists the processes of the pod that run with an identity of the proxy in another container.
func (j *job) collisions(ctx context.Context) []audit.Process {
	names := map[string]string{}
	for _, c := range slices.Concat(j.pod.Init, j.pod.Containers) {
		if c.ID != "" && !sidecar.OfTheMesh(c.Name) {
			names[c.ID] = c.Name
		}
	}
	var all []audit.Process
	for _, p := range j.podProcesses(ctx)[j.pod.Facts.UID] {
		spec := j.decision.Spec
		if name := names[p.Container]; name != "" && (slices.Contains(spec.UIDs, p.UID) || slices.Contains(spec.GIDs, p.GID)) {
			p.Container = name
			all = append(all, p)
		}
	}
	return all
}

// podProcesses lists the processes of all pods by pod UID. A list is used for scanInterval.
func (c *controller) podProcesses(ctx context.Context) map[string][]audit.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Clock.Now()
	if c.Processes == nil || c.auditing.processes != nil && now.Sub(c.auditing.scanned) < scanInterval {
		return c.auditing.processes
	}
	all, err := c.Processes(ctx)
	if err != nil {
		c.Log.WarnContext(ctx, "the processes of the node cannot be listed", slog.String("error", err.Error()))
	}
	c.auditing.processes, c.auditing.scanned = all, now
	return all
}

// restore writes the wanted rules, and returns the problems that remain.
func (j *job) restore(ctx context.Context, found []audit.Problem) ([]audit.Problem, error) {
	var report redirection.Report
	err := j.inNamespace(ctx, func(space redirection.Namespace) (err error) {
		report, err = space.Apply(ctx, j.decision.Spec, redirection.Reconcile)
		return err
	})
	what := summary(found)
	if err != nil {
		j.Metrics.AuditRepaired(metrics.RepairFail)
		j.event(kube.EventWarning, ReasonRepaired, "the pod "+what+", and its rules cannot be restored: "+cause(ctx, err)+remedy(err))
		return nil, err
	}
	j.Metrics.AuditRepaired(metrics.RepairSuccess)
	j.log.InfoContext(ctx, "restored the pod's rules", slog.String("problem", what), slog.String("tools", strings.Join(report.Tools, ",")))
	j.event(kube.EventNormal, ReasonRepaired, "the pod "+what+"; its rules are restored. Connections that it opened meanwhile stay outside of "+
		"the mesh until they are closed")
	return j.observe(ctx, true)
}

// summary is the sentence of the most serious state and its first problem.
func summary(problems []audit.Problem) string {
	state := audit.StateOf(problems)
	for _, p := range problems {
		if p.State == state {
			return state.Sentence() + ": " + p.Detail
		}
	}
	return state.Sentence()
}

// stateReasons are the reasons of the events about a change of a state.
var stateReasons = map[audit.State]EventReason{ //nolint:gochecknoglobals // a constant table
	audit.Bypassed: ReasonBroken, audit.ForeignRule: ReasonForeignRule, audit.Drifted: ReasonDrifted, audit.NoListener: ReasonNoListener,
	audit.UIDCollision: ReasonUIDCollision, audit.IPv6Open: ReasonIPv6Open, audit.NotInspected: ReasonUnverified,
	audit.Captured: ReasonVerified,
}

// reportChange records an event when the state has changed, and counts the state.
func (j *job) reportChange(ctx context.Context, before audit.Status) {
	now := j.memory.audited.status
	j.memory.state = map[audit.State]metrics.PodState{
		audit.Bypassed: metrics.PodBroken, audit.Drifted: metrics.PodDrifted, audit.ForeignRule: metrics.PodDrifted,
		audit.NotInspected: metrics.PodUnknown,
	}[now.State]
	if j.memory.state == "" {
		j.memory.state = metrics.PodRedirected
	}
	if now.State == before.State || now.State == audit.Captured && before.State == "" {
		return
	}
	if now.State == audit.Captured {
		j.event(kube.EventNormal, stateReasons[now.State], "the pod "+now.Sentence+" again")
		return
	}
	text := "the pod " + summary(now.Problems) + ". Remedy: " + now.Remedy
	j.log.WarnContext(ctx, "the audit found a problem", slog.String("state", string(now.State)), slog.String("message", text))
	j.event(kube.EventWarning, stateReasons[now.State], text)
}

// Pods returns the status of every pod of the node.
func (c *Controller) Pods() []audit.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]audit.Status, 0, len(c.pods))
	for _, e := range c.pods {
		if e.audited.status.State != "" {
			all = append(all, named(e))
		}
	}
	return all
}

func named(e *entry) audit.Status {
	s := e.audited.status
	s.Namespace, s.Pod, s.UID = e.pod.Facts.Namespace, e.pod.Facts.Name, e.pod.Facts.UID
	return s
}

// ErrNoPod says that the node has no pod of that name.
var ErrNoPod = errors.New("no such pod on this node")

// Check inspects a pod now and returns its status.
func (c *Controller) Check(ctx context.Context, k types.NamespacedName) (audit.Status, error) {
	c.mu.Lock()
	e := c.pods[k]
	if e == nil {
		c.mu.Unlock()
		return audit.Status{}, ErrNoPod
	}
	done := make(chan struct{})
	e.waiting = append(e.waiting, done)
	c.mu.Unlock()
	c.queue.Add(k)
	select {
	case <-ctx.Done():
		return audit.Status{}, ctx.Err()
	case <-done:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.pods[k]; e == nil {
		return audit.Status{}, ErrNoPod
	}
	return named(e), nil
}
