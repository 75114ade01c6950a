package racerepair

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// AuditSettings are the user's settings of the audit.
type AuditSettings struct {
	// Interval is the time between two inspections of a pod that does not change, 0 for no audit.
	Interval time.Duration
	// Repair writes the rules of a pod that has lost or changed some; otherwise they are only reported.
	Repair bool
	// Restricted reports whether Repair was set and has no effect.
	Restricted bool
	// PodCondition publishes [kube.RedirectionVerified] on each pod.
	PodCondition bool
}

const (
	// slowFactor is the ratio of the time between two slow inspections of a pod to their time beyond slow.
	slowFactor = 1000
	// startup is the time that the proxy has for opening its listeners.
	startup = 15 * time.Second
	// confirmation is the time between the two failed inspections after which a pod is not-inspected: the namespace of a pod
	// that ends is gone before the API server shows that.
	confirmation = 10 * time.Second
)

// audited is the memory of the audit of a pod.
type audited struct {
	status audit.Status
	// due is the time of the next inspection, zero for a pod that is not inspected.
	due time.Time
	// took is the duration of the last inspection, asked that of the job with it, which a request pays for.
	took, asked time.Duration
	// input is what the result rests on besides the namespace.
	input input
	// version is that of the rules from which rules was made, the zero version if they have to be read.
	version redirection.Version
	rules   rules
	place   place
	// captured is the Spec whose rules the pod had when it was captured last.
	captured *redirect.Spec
	// failures is the number of consecutive failed inspections.
	failures int
	// reported is the state of the last event, "" before the first inspection.
	reported audit.State
	// repairs is the number of repairs since the pod was captured for calm, repairAfter the time of the next one.
	repairs     int
	repairAfter time.Time
}

// rules is the result of reading the rules, of bounded size.
type rules struct {
	problems []audit.Problem
	mesh     bool
	// repairable reports whether writing the wanted rules would change something.
	repairable bool
	// earlier reports whether the rules are those of the settings with which the pod was captured last: others apply from its next start
	// on, so that nothing is written, as by race repair.
	earlier bool
	tools   string
}

// place is where the namespace was found. A namespace whose path and number are the same is searched again only now and then.
type place struct {
	path  string
	inode netns.Inode
	uses  int
}

// input has the inputs of an inspection: a change is inspected at once.
type input struct {
	spec      redirect.Spec
	addresses []netip.Addr
	// running are the IDs of the running containers, proxy is since when the proxy should be there.
	running []string
	proxy   time.Time
	// plugin are the parts of the plugin's configuration that the Spec does not have.
	plugin string
}

func (j *job) input() input {
	in := input{
		spec: j.decision.Spec, addresses: j.pod.Addresses, proxy: j.proxySince(), plugin: string(j.conf.Backend) + " " + j.conf.ForceIptables,
	}
	if j.conf.Problems != nil {
		in.plugin += " " + j.conf.Problems.Error()
	}
	for _, c := range slices.Concat(j.pod.Init, j.pod.Containers, j.pod.Ephemeral) {
		if c.State.Running {
			in.running = append(in.running, c.Name+" "+c.ID)
		}
	}
	return in
}

// audit inspects the pod if that is requested, and makes a changed pod due.
func (j *job) audit(ctx context.Context) {
	a := &j.memory.audited
	if j.Audit.Interval == 0 || !j.reachable() || !inspectable(j.pod) {
		*a = audited{}
		return
	}
	if j.decision.Outcome == sidecar.Pass {
		sentence := "is not redirected by the plugin: " + j.decision.Reason.Sentence()
		*a = audited{status: audit.Status{State: audit.Outside, Sentence: sentence, Remedy: j.decision.Reason.Remedy()}}
		return
	}
	if in := j.input(); !reflect.DeepEqual(in, a.input) {
		a.input, a.version, a.place = in, redirection.Version{}, place{} // also another sandbox of the same address
		// A pod that is slow to inspect must not have that at will, by changing an annotation.
		a.due = j.Clock.Now()
		if rested := a.status.Checked.Add(duty * a.took); rested.After(a.due) {
			a.due = rested
		}
	}
	if len(j.waiting) > 0 {
		j.verify(ctx)
	}
}

// verify inspects the pod, sets its status and the time of the next inspection, and reports a change.
func (j *job) verify(ctx context.Context) {
	a := &j.memory.audited
	byPod, listed := j.podProcesses(ctx, j.forced) // whose cost is not this pod's
	j.processes, j.listed = byPod[j.pod.Facts.UID], listed
	began := j.Clock.Now()
	problems, err := j.observe(ctx)
	if err == nil {
		problems = j.restore(ctx, problems)
	}
	a.took = j.Clock.Since(began)
	if errors.Is(context.Cause(ctx), context.Canceled) { // the controller ends; not the PodTimeout
		return
	}
	if !j.unchanged() { // the result is about a pod that has ended, or left its namespace, meanwhile
		*a = audited{}
		return
	}
	a.due = j.next(err)
	if err != nil {
		a.version, a.place = redirection.Version{}, place{}
		if a.failures++; a.failures == 1 && !permanent(err) {
			a.due = j.Clock.Now().Add(confirmation)
			if !j.forced {
				return
			}
		}
		problems = []audit.Problem{{State: audit.NotInspected, Detail: cause(ctx, err) + remedy(err)}}
	} else {
		a.failures = 0
	}
	j.setStatus(problems)
	if a.failures != 1 || permanent(err) {
		j.reportChange(ctx)
	}
}

// permanent reports whether a failed inspection needs no confirmation.
func permanent(err error) bool {
	return errors.Is(err, errRefused) || errors.Is(err, errPolicy) || errors.Is(err, redirection.ErrUninspectable) ||
		errors.Is(err, sandbox.ErrAmbiguous) || errors.Is(err, sandbox.ErrClaimed) || errors.Is(err, sandbox.ErrLoopback)
}

// next returns the time of the next inspection, at most the interval from now, unless this one was slow.
func (j *job) next(err error) time.Time {
	now, a := j.Clock.Now(), &j.memory.audited
	wait := j.Audit.Interval - time.Duration(rand.Int64N(int64(j.Audit.Interval/5)+1)) //nolint:gosec // jitter
	if began := j.proxySince(); err == nil && !began.IsZero() && now.Sub(began) < startup {
		wait = min(wait, startup-now.Sub(began))
	}
	return now.Add(max(wait, slowFactor*(a.took-slow)))
}

// setStatus makes the status of the problems.
func (j *job) setStatus(problems []audit.Problem) {
	a, now, state := &j.memory.audited, j.Clock.Now(), audit.StateOf(problems)
	since := a.status.Since
	if a.status.State != state {
		since = now
	}
	if state == audit.Captured && now.After(a.repairAfter.Add(calm)) {
		a.repairs = 0
	}
	a.status = audit.Status{
		State: state, Sentence: state.Sentence(), Remedy: j.remedy(state), Since: since, Checked: now, Problems: problems,
		Backend: a.rules.tools, Exceptions: audit.Exceptions(j.decision.Spec, sidecar.KeysOf(j.decision.Spec)),
	}
}

func (c *controller) remedy(s audit.State) string {
	return s.Remedy(c.Audit.Repair || c.Audit.Restricted)
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
var stateReasons = map[audit.State]kube.EventReason{ //nolint:gochecknoglobals // a constant table
	audit.Bypassed: ReasonBroken, audit.ForeignRule: ReasonForeignRule, audit.Drifted: ReasonDrifted,
	audit.ForeignListener: ReasonForeignListener, audit.NoListener: ReasonNoListener,
	audit.UIDCollision: ReasonUIDCollision, audit.IPv6Open: ReasonIPv6Open, audit.NotInspected: ReasonUnverified,
	audit.Captured: ReasonVerified,
}

// aboutRules are the states that race repair reports as well, for the pods that it works on.
var aboutRules = []audit.State{audit.Bypassed, audit.Drifted, audit.ForeignRule} //nolint:gochecknoglobals // a constant

// reportChange records an event when the state is another one than that of the last event.
func (j *job) reportChange(ctx context.Context) {
	a := &j.memory.audited
	now, before := a.status, a.reported
	a.reported = now.State
	if now.State == before || now.State == audit.Captured && before == "" {
		return
	}
	if now.State == audit.Captured {
		j.event(kube.EventNormal, ReasonVerified, "the pod "+now.Sentence+" again")
		return
	}
	text := "the pod " + summary(now.Problems) + ". Remedy: " + now.Remedy + j.backoffText()
	j.log.WarnContext(ctx, "the audit found a problem", slog.String("state", string(now.State)), slog.String("message", text))
	byRepair := j.finding.Broken || j.Reports != nil && j.Reports(j.pod)
	if !byRepair || !slices.Contains(aboutRules, now.State) { // else race repair records it
		j.event(kube.EventWarning, stateReasons[now.State], text)
	}
}

// podStates are the states of the gauge of pods that the audit has inspected.
var podStates = map[audit.State]metrics.PodState{ //nolint:gochecknoglobals // a constant table
	audit.Bypassed: metrics.PodBroken, audit.Drifted: metrics.PodDrifted, audit.ForeignRule: metrics.PodDrifted,
	audit.NotInspected: metrics.PodUnknown, audit.ForeignListener: metrics.PodRedirected, audit.NoListener: metrics.PodRedirected, audit.UIDCollision: metrics.PodRedirected,
	audit.IPv6Open: metrics.PodRedirected, audit.Captured: metrics.PodRedirected,
}

// count sets the state of the gauge: that of the audit if it has inspected the pod, else race repair's. A pod without a network
// is not redirected any more, whatever its validation has found.
func (j *job) count() {
	state, inspected := podStates[j.memory.audited.status.State]
	switch {
	case inspected:
		j.memory.state = state
	case j.AuditOnly, j.AuditedNode != "" && j.AuditedNode == j.pod.NodeName, j.memory.state == metrics.PodRedirected && !inspectable(j.pod):
		j.memory.state = ""
	}
}

// Pods returns the status of every pod of the node.
func (c *Controller) Pods() []audit.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]audit.Status, 0, len(c.pods))
	for _, e := range c.pods {
		switch {
		case e.audited.status.State != "":
			all = append(all, named(e))
		case !e.audited.due.IsZero(): // a pod that is left out would pass for one that is captured
			s, state := named(e), audit.NotInspected
			s.State, s.Sentence, s.Remedy = state, state.Sentence(), c.remedy(state)
			s.Problems = []audit.Problem{{State: state, Detail: "it waits for its first inspection"}}
			all = append(all, s)
		}
	}
	return all
}

// Synced reports whether the pods of the node are known.
func (c *Controller) Synced() bool {
	select {
	case <-c.synced:
		return true
	default:
		return false
	}
}

func named(e *entry) audit.Status {
	s := e.audited.status
	s.Namespace, s.Pod, s.UID = e.pod.Facts.Namespace, e.pod.Facts.Name, e.pod.Facts.UID
	return s
}

// Reports reports whether race repair reports that the pod's rules are missing or wrong.
func (c *Controller) Reports(p kube.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[p.Key()]
	return e != nil && e.pod.Facts.UID == p.Facts.UID && e.broken
}

// text of the tools of a report, of which both families mostly have the same.
func toolsOf(r redirection.Report) string {
	return strings.Join(slices.Compact(slices.Clone(r.Tools)), ",")
}
