// Package auditor inspects the running pods and reports whether their traffic is redirected, from their rules, routes and listeners.
//
// It promises one event for each change of a pod's state, and none for a pod that ends; that it uses a bounded share of a core, and
// never delays a repair; that it holds no namespace open between two inspections; and that requests have budgets of their own.
//
// Start reading at Reconcile. observe.go has the inspection, restore.go the repair of rules, report.go states and events, condition.go
// the pod condition, schedule.go the order of the pods, asked.go the limits of requests, processes.go the list of the node's processes.
package auditor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Options are the dependencies and settings. API, Metrics and Pods are required.
type Options struct {
	API      *kube.Client
	Metrics  *metrics.Repair
	Settings Settings
	// Selects reports whether the rules of a pod may be restored; nil selects all pods.
	Selects func(kube.Pod) bool
	// Processes lists the processes of the node's pods by pod UID, nil where they cannot be seen.
	Processes func(context.Context) (map[string][]sandbox.Process, error)
	// Enrolment returns the first step that is not done of the enrolment of a pod in ambient mode, "" for an enrolled pod, and false for
	// a pod that was not looked at yet. Nil where another agent enrols.
	Enrolment func(uid string) (missing string, known bool)
	// ProbeSet reads the addresses of pods in the node's probe set, where another agent enrols; nil where this agent does.
	ProbeSet func() (map[netip.Addr]string, error)
	// Env is shared with the turns.
	Env *podwork.Env
	// Pods gives access to the pods, see podwork.Controller.
	Pods Pods
}

// Pods are the pods of a podwork.Controller, with the audit's memory of each.
type Pods interface {
	Each(fn func(kube.Pod, *Memory))
	Get(k types.NamespacedName, fn func(kube.Pod, *Memory)) bool
	Enqueue(k types.NamespacedName)
	Keys() []types.NamespacedName
	Synced() <-chan struct{}
}

// Auditor audits pods.
type Auditor struct {
	Options

	// budget is the token bucket of inspection time; asked has the token buckets for requests.
	budget *rate.Limiter
	asked  map[Way]*rate.Limiter

	mu sync.Mutex
	// requested are the inspections that a caller waits for.
	requested map[types.NamespacedName]*request

	processes processes
	// wake ends the schedule's idle time, checks bounds concurrent inspections for requests, ended ends their waits.
	wake, checks, ended chan struct{}
	// unpublished is set when the right to publish the condition is missing, which is logged once.
	unpublished atomic.Bool
}

// request is a requested inspection; done is closed at its end. forced is set if its result answers a user's request.
type request struct {
	done   chan struct{}
	forced bool
}

// New returns an Auditor that does nothing before Run.
func New(o Options) *Auditor {
	return &Auditor{
		Options: o, budget: newBudget(duty, burst), asked: newAsked(), requested: map[types.NamespacedName]*request{},
		wake: make(chan struct{}, 1), checks: make(chan struct{}, maxChecks), ended: make(chan struct{}),
	}
}

// Run inspects pods until ctx ends.
func (a *Auditor) Run(ctx context.Context) {
	defer close(a.ended)
	a.schedule(ctx)
}

// Gone ends the waits for an inspection of a pod that was deleted or replaced.
func (a *Auditor) Gone(k types.NamespacedName) { a.take(k).release() }

// take removes and returns the request for a pod. A later request needs another turn: this turn may already have read the rules.
func (a *Auditor) take(k types.NamespacedName) *request {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.requested[k]
	delete(a.requested, k)
	return r
}

func (r *request) release() {
	if r != nil {
		close(r.done)
	}
}

// work is a turn of a pod.
type work struct {
	*Auditor
	*podwork.Turn

	memory *Memory
	// repair is the result of race repair in this turn.
	repair racerepair.Result
	// inspects is set if a caller waits for an inspection, forced if it is a user's request.
	inspects, forced bool
	// processes are the pod's processes at the time listed, which is zero for an incomplete list.
	processes []sandbox.Process
	listed    time.Time
}

// Reconcile runs after race repair: it inspects the pod of a turn if requested, and publishes its condition.
func (a *Auditor) Reconcile(ctx context.Context, t *podwork.Turn, m *Memory, done racerepair.Result) error {
	r := a.take(t.Pod.Key())
	t.AtEnd(func() {
		r.release()
		select {
		case a.wake <- struct{}{}:
		default: // a wake-up is already pending
		}
	})
	w := &work{Auditor: a, Turn: t, memory: m, repair: done, inspects: r != nil, forced: r != nil && r.forced}
	if done.Repaired {
		m.due, m.reported = a.Env.Clock.Now(), audit.Captured
	}
	w.audit(ctx)
	m.asked = a.Env.Clock.Since(t.Began)
	return w.publish(ctx)
}

// Settings are the user's settings of the audit.
type Settings struct {
	// Interval is the time between two inspections of a pod that does not change, 0 for no audit.
	Interval time.Duration
	// Repair restores lost or changed rules of a pod; otherwise they are only reported.
	Repair bool
	// PodCondition publishes [kube.RedirectionVerified] on each pod.
	PodCondition bool
	// Observe is set for pods that another plugin redirects.
	Observe bool
}

const (
	// slowFactor: after an inspection that took slow+d, the pod is not inspected for slowFactor*d.
	slowFactor = 1000
	// startup is the time allowed for the proxy to open its listeners.
	startup = 15 * time.Second
	// confirmation is the time between the two failed inspections after which a pod is not-inspected: the namespace of an
	// ending pod disappears before the API server shows the end. It is also the time after which a pending pod is reported.
	confirmation = 10 * time.Second
)

// Memory is the audit's state of a pod between two turns.
type Memory struct {
	status audit.Status
	// due is the time of the next inspection, zero for a pod that is not audited.
	due time.Time
	// took is the duration of the last inspection; asked is the duration of its whole turn, which a request is charged for.
	took, asked time.Duration
	// input is the result's input besides the namespace.
	input input
	// version is the version of the rules when they were read, zero if they must be read again.
	version redirection.Version
	rules   rules
	// place is where the namespace was found, uses the number of inspections since the search.
	place podwork.Place
	uses  int
	// enrolled is the time since which no step of the enrolment is missing, zero if one is.
	enrolled time.Time
	// captured has the rules of the pod when last captured.
	captured redirect.Wanted
	// failures is the number of consecutive failed inspections.
	failures int
	// reported is the state of the last event, "" before the first inspection.
	reported audit.State
	// repairs is the number of repairs since the pod was captured for calm, repairAfter the earliest time of the next one.
	repairs     int
	repairAfter time.Time
	// published is the condition that was written last.
	published published
}

// Reset forgets all but the published condition.
func (m *Memory) Reset() { *m = Memory{published: m.published} }

// rested returns at, or the end of the pause after the last inspection if that is later: a tenant must not trigger slow inspections at
// will by changing an annotation.
func (m *Memory) rested(at time.Time) time.Time {
	if rested := m.status.Checked.Add(duty * m.took); rested.After(at) {
		return rested
	}
	return at
}

// State returns the pod's state for the metric, and false if the audit has not inspected the pod.
func (m *Memory) State() (state metrics.PodState, inspected bool) {
	state = states[m.status.State].gauge
	return state, state != ""
}

// rules is the result of reading the rules, of bounded size.
type rules struct {
	problems []audit.Problem
	mesh     bool
	// repairable reports whether writing the wanted rules would change something.
	repairable bool
	// earlier is set if the rules match the settings at the pod's start. Changed settings apply after a restart, so nothing is written.
	earlier bool
	tools   string
}

// input has the inputs of an inspection.
type input struct {
	wanted     wanted
	containers containers
}

// wanted is the wanted state of the namespace. A change is inspected at once.
type wanted struct {
	rules     redirect.Wanted
	addresses []netip.Addr
	// pending is the missing step of the enrolment.
	pending string
	// plugin has the parts of the plugin's configuration that the Spec lacks.
	plugin string
}

// containers are the pod's containers. In a captured pod, a change without a restart waits, see audit.
type containers struct {
	// running has the names of the running containers, ids the IDs of all that have run. proxy is the result of proxySince.
	running []string
	ids     map[string]string
	proxy   time.Time
}

// restarted reports whether a container has been replaced since before. A new sandbox with the same address shows only this way, and
// a restarted proxy can listen elsewhere.
func (c containers) restarted(before containers) bool {
	for name, id := range before.ids {
		if c.ids[name] != id {
			return true
		}
	}
	return false
}

func (w *work) input() input {
	plugin := fmt.Sprint(w.Conf.Backend, w.Conf.ForceIptables, w.Decision.Sandbox)
	want := wanted{rules: w.Decision.Wanted(), addresses: w.Pod.Addresses, plugin: plugin}
	want.pending, _ = w.missing()
	if w.Conf.Problems != nil {
		want.plugin += " " + w.Conf.Problems.Error()
	}
	now := containers{proxy: w.proxySince(), ids: map[string]string{}}
	for _, c := range slices.Concat(w.Pod.Init, w.Pod.Containers, w.Pod.Ephemeral) {
		if c.State.Running {
			now.running = append(now.running, c.Name)
		}
		if c.ID != "" {
			now.ids[c.Name] = c.ID
		}
	}
	return input{want, now}
}

// audit inspects the pod if requested, and makes a changed pod due: at once, with a new search and all rules read; or within startup,
// if containers of a captured pod start or end for the first time. The delay is safe: the other containers still run in the inspected
// namespace, a container could change it at any later time as well, and the next inspection compares the namespace's number and the
// version of its rules. That inspection also looks for the proxy's listeners.
func (w *work) audit(ctx context.Context) {
	m := w.memory
	if w.Settings.Interval == 0 || !w.Reachable() || !podwork.Inspectable(w.Pod) {
		m.Reset()
		return
	}
	if w.Decision.Outcome == sidecar.Pass {
		sentence := "is not redirected by the plugin: " + w.Decision.Reason.Sentence()
		m.Reset()
		m.status = audit.Status{State: audit.Outside, Sentence: sentence, Remedy: w.Decision.Reason.Remedy()}
		return
	}
	switch step, known := w.missing(); {
	case !known || step != "":
		m.enrolled = time.Time{}
	case m.enrolled.IsZero():
		m.enrolled = w.Clock.Now()
	}
	in, before := w.input(), m.input
	m.input = in
	switch now := w.Clock.Now(); {
	case reflect.DeepEqual(in, before):
	case m.status.State != audit.Captured || m.failures > 0 || in.containers.restarted(before.containers) || !reflect.DeepEqual(in.wanted, before.wanted):
		m.version, m.place = redirection.Version{}, podwork.Place{}
		m.due = m.rested(now)
	default:
		if soon := m.rested(now.Add(startup)); soon.Before(m.due) {
			m.due = soon
		}
	}
	if w.inspects {
		w.verify(ctx)
	}
}

// verify inspects the pod, sets its status and the time of the next inspection, and reports a change.
func (w *work) verify(ctx context.Context) {
	m := w.memory
	byPod, listed := w.podProcesses(ctx, w.forced) // not charged to this pod
	w.processes, w.listed = byPod[w.Pod.Facts.UID], listed
	began := w.Clock.Now()
	problems, err := w.observe(ctx)
	if err == nil {
		problems = w.restore(ctx, problems)
	}
	m.took = w.Clock.Since(began)
	if errors.Is(context.Cause(ctx), context.Canceled) { // the controller ends; not the PodTimeout
		return
	}
	if !w.Unchanged() { // the pod has ended or left its namespace meanwhile
		m.Reset()
		return
	}
	m.due = w.next(err)
	if err != nil {
		m.version, m.place = redirection.Version{}, podwork.Place{}
		if m.failures++; m.failures == 1 && !permanent(err) {
			m.due = w.Clock.Now().Add(confirmation)
			if !w.forced {
				return
			}
		}
		problems = []audit.Problem{{State: audit.NotInspected, Detail: podwork.Cause(ctx, err) + w.perhapsSandboxed()}}
	} else {
		m.failures = 0
	}
	w.setStatus(problems)
	if m.failures != 1 || permanent(err) {
		w.reportChange(ctx)
	}
}

// permanent reports whether a failed inspection needs no confirmation.
func permanent(err error) bool {
	return errors.Is(err, errRefused) || errors.Is(err, podwork.ErrPolicy) || errors.Is(err, redirection.ErrUninspectable) ||
		errors.Is(err, sandbox.ErrAmbiguous) || errors.Is(err, sandbox.ErrClaimed) || errors.Is(err, sandbox.ErrLoopback)
}

// next returns the time of the next inspection, at most the interval from now, unless this one was slow.
func (w *work) next(err error) time.Time {
	now, m := w.Clock.Now(), w.memory
	wait := w.Settings.Interval - time.Duration(rand.Int64N(int64(w.Settings.Interval/5)+1)) //nolint:gosec // jitter
	if began := w.proxySince(); err == nil && !began.IsZero() && now.Sub(began) < startup {
		wait = min(wait, startup-now.Sub(began))
	}
	return now.Add(max(wait, slowFactor*(m.took-slow)))
}

// Statuses returns the status of every pod of the node.
func (a *Auditor) Statuses() []audit.Status {
	var all []audit.Status
	a.Pods.Each(func(p kube.Pod, m *Memory) {
		switch {
		case m.status.State != "":
			all = append(all, m.named(p))
		case !m.due.IsZero(): // omitting the pod would make it look captured
			s, state := m.named(p), audit.NotInspected
			s.State, s.Sentence, s.Remedy = state, state.Sentence(), a.Remedy(state)
			s.Problems = []audit.Problem{{State: state, Detail: "it waits for its first inspection"}}
			all = append(all, s)
		}
	})
	return all
}

// named returns the status with the pod's name. A pod that was not inspected has an empty state.
func (m *Memory) named(p kube.Pod) audit.Status {
	s := m.status
	s.Namespace, s.Pod, s.UID = p.Facts.Namespace, p.Facts.Name, p.Facts.UID
	return s
}

// toolsOf names the tools of a report. Both families usually use the same tool.
func toolsOf(r redirection.Report) string {
	return strings.Join(slices.Compact(slices.Clone(r.Tools)), ",")
}
