// Package nodepods runs race repair and the audit on the node's pods, and answers questions about them.
//
// It promises that race repair runs before the audit in a pod's turn, so that the audit sees its result; and that a pod has one state in
// the metric: the audit's if the audit has inspected the pod, otherwise race repair's.
//
// Start reading at New and Controller.Run.
package nodepods

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/explain"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Part is the name of the watch of the pods in a health.State. docs/errors.md has the comment.
const (
	// The watch of the pods works. If not, no pod is repaired: the reason is the API server's answer.
	Part health.PartName = "pods"
)

const (
	// onceTries is the reference's number of attempts of Once per pod; onceTimeout bounds their time for all pods.
	onceTries   = 5
	onceTimeout = 2 * time.Minute
)

// Options are the dependencies and settings. API, Metrics and the required fields of Env are required.
type Options struct {
	podwork.Env

	API     *kube.Client
	Metrics *metrics.Repair
	// Health, if any, receives the state of the watch of the pods.
	Health *health.State
	// Follow notifies of the node's trimmed pods if the agent already watches them. Nil starts a watch of the pods that Repair
	// selects.
	Follow func(context.Context, kube.Listener[kube.Pod])

	// Repair has the settings of race repair, nil to disable it; Audit has the audit's.
	Repair *racerepair.Settings
	Audit  auditor.Settings
	// Processes lists the processes of the node's pods by pod UID, nil where they cannot be seen.
	Processes func(context.Context) (map[string][]sandbox.Process, error)

	// Enrolment and ProbeSet are passed to the audit.
	Enrolment func(uid string) (missing string, known bool)
	ProbeSet  func() (map[netip.Addr]string, error)

	// Workers and PodTimeout are passed to podwork.
	Workers    int
	PodTimeout time.Duration
}

// Controller repairs and audits the pods.
type Controller struct {
	*explain.Explainer

	options Options
	pods    *podwork.Controller[memory]
	repair  *racerepair.Reconciler
	auditor *auditor.Auditor
}

// memory is the state of a pod between two turns.
type memory struct {
	repair racerepair.Memory
	audit  auditor.Memory
	// state is the pod's state in the metric, "" for a pod that is not counted.
	state metrics.PodState
}

// New returns a controller that does nothing before Run.
func New(o Options) (*Controller, error) { return newController(o, false) }

func newController(o Options, once bool) (c *Controller, err error) {
	o.Health = cmp.Or(o.Health, health.NewState(health.Options{}))
	c = &Controller{options: o}
	if o.Follow == nil {
		o.Follow = c.watch
	}
	c.pods = podwork.New(podwork.Options[memory]{
		Env: o.Env, Follow: o.Follow, Reconcile: c.reconcile, Workers: o.Workers, PodTimeout: o.PodTimeout, Watch: c.watched,
		OtherSandbox: func(m *memory) {
			m.repair.OtherSandbox()
			m.audit.Reset()
		},
		Ended:   func(m *memory) { m.audit.Reset() },
		Changed: func(before, now *memory) { o.Metrics.SetPodState(before.state, now.state) },
		Gone: func(k types.NamespacedName, m *memory) {
			o.Metrics.SetPodState(m.state, "")
			c.auditor.Gone(k)
		},
	})
	c.auditor = auditor.New(auditor.Options{
		API: o.API, Metrics: o.Metrics, Settings: o.Audit, Processes: o.Processes, Env: &c.pods.Env, Pods: audited{c.pods}, Selects: c.selects,
		Enrolment: o.Enrolment, ProbeSet: o.ProbeSet,
	})
	c.Explainer = explain.New(explain.Options{
		API: o.API, Auditor: c.auditor, Env: &c.pods.Env, Look: c.pods.Look, Present: c.present,
	})
	if o.Repair != nil {
		c.repair, err = racerepair.New(racerepair.Options{
			API: o.API, Metrics: o.Metrics, Settings: *o.Repair, Audited: o.Audit.Interval > 0, Once: once,
		})
	}
	return c, err
}

// Run runs until ctx ends. It retries failures, and waits for an unreachable API server.
func (c *Controller) Run(ctx context.Context) {
	if c.options.Audit.Interval > 0 {
		c.pods.Run(ctx, c.auditor.Run)
		return
	}
	c.pods.Run(ctx)
}

// Once repairs each present pod, within two minutes. The error names each pod that could not be repaired.
func Once(ctx context.Context, o Options) error {
	c, err := newController(o, true)
	if err != nil {
		return err
	}
	return c.pods.Once(ctx, onceTries, onceTimeout)
}

// Pods returns the status of every pod of the node.
func (c *Controller) Pods() []audit.Status { return c.auditor.Statuses() }

// Notify gives a pod a turn, after a change of its enrolment.
func (c *Controller) Notify(k types.NamespacedName) { c.pods.Enqueue(k) }

// Synced reports whether the pods of the node are known.
func (c *Controller) Synced() bool {
	select {
	case <-c.pods.Synced():
		return true
	default:
		return false
	}
}

// reconcile repairs and audits a pod.
func (c *Controller) reconcile(ctx context.Context, t *podwork.Turn, m *memory) error {
	err := t.Err
	var done racerepair.Result
	if c.repair != nil && err == nil {
		if c.repair.Selects(t.Pod) {
			done, err = c.repair.Reconcile(ctx, t, &m.repair)
		} else {
			m.repair.State = ""
		}
	}
	auditErr := c.auditor.Reconcile(ctx, t, &m.audit, done)
	if state, inspected := m.audit.State(); inspected && m.repair.Audit(state) {
		t.Again(0)
	}
	m.state = stateOf(t.Pod, m)
	return errors.Join(err, auditErr)
}

// stateOf returns the pod's state for the metric. A failed validation takes precedence over an unknown state of the
// audit. A pod without a network is no longer redirected, whatever its validation has found.
func stateOf(p kube.Pod, m *memory) metrics.PodState {
	state, inspected := m.audit.State()
	if inspected && (state != metrics.PodUnknown || m.repair.State != metrics.PodBroken) {
		return state
	}
	if m.repair.State == metrics.PodRedirected && !podwork.Inspectable(p) {
		return ""
	}
	return m.repair.State
}

// selects reports whether the rules of a pod may be repaired.
func (c *Controller) selects(p kube.Pod) bool { return c.repair == nil || c.repair.Selects(p) }

// present reports whether a pod is known; with a UID, whether it has that UID and has not ended.
func (c *Controller) present(k types.NamespacedName, uid string) (is bool) {
	c.pods.Get(k, func(p kube.Pod, _ *memory) { is = uid == "" || p.Facts.UID == uid && !podwork.PodOf(p).Ended })
	return is
}

// watch follows the pods that race repair selects.
func (c *Controller) watch(ctx context.Context, l kube.Listener[kube.Pod]) {
	s := c.options.Repair
	c.options.API.WatchPods(ctx, kube.PodScope{
		Node: c.options.Node, LabelSelector: s.LabelSelectors, FieldSelector: s.FieldSelectors,
		Transform: podcache.Trim(s.Keeps(), s.Predicate.Message),
	}, l)
}

// watched passes the state of the watch to readiness and metrics.
func (c *Controller) watched(err error) {
	if err == nil {
		c.options.Health.Ready(Part)
		return
	}
	c.options.Metrics.PodWatchFailed()
	c.options.Health.NotReady(Part, err.Error())
}

// audited adapts the pods to the audit's memory.
type audited struct{ *podwork.Controller[memory] }

func (a audited) Each(fn func(kube.Pod, *auditor.Memory)) {
	a.Controller.Each(func(p kube.Pod, m *memory) { fn(p, &m.audit) })
}

func (a audited) Get(k types.NamespacedName, fn func(kube.Pod, *auditor.Memory)) bool {
	return a.Controller.Get(k, func(p kube.Pod, m *memory) { fn(p, &m.audit) })
}
