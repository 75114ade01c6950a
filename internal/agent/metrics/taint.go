package metrics

import (
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// TaintChange is a change of a node by the taint controller.
type TaintChange string

// ConditionSet publishes the node condition for other controllers.
const (
	TaintAdded   TaintChange = "add"
	TaintRemoved TaintChange = "remove"
	ConditionSet TaintChange = "condition"
)

// ChangeResult is the result of a change of a node.
type ChangeResult string

// After a conflict with another writer the controller repeats the change on the new state.
const (
	ChangeDone     ChangeResult = "success"
	ChangeConflict ChangeResult = "conflict"
	ChangeFailed   ChangeResult = "failed"
)

// Watched is a resource that the taint controller watches.
type Watched string

// The resources.
const (
	WatchedNodes     Watched = "nodes"
	WatchedPods      Watched = "pods"
	WatchedConfigMap Watched = "configmap"
)

// Taint has the metrics of one taint controller. Its methods are safe for concurrent use.
type Taint struct {
	*registry

	leader, nodes, queue                           *family
	changes, decisions, problems, troubles, events *family
}

// NewTaint returns the metrics of a taint controller of the given version, all zero.
func NewTaint(version string) *Taint {
	r, reasons := newRegistry(version), each("reason", readiness.Reasons()...)
	return &Taint{
		registry: r,
		leader:   r.declare(gauge, "istio_cni_taint_leader", "1 while this replica is the leader, which changes nodes."),
		nodes: r.declare(gauge, "istio_cni_taint_nodes", "Nodes by the reason why they are ready or not.",
			reasons...),
		changes: r.declare(counter, "istio_cni_taint_changes_total", "Changes of nodes, by result; a conflict is followed by another attempt.",
			pairs(each("change", TaintAdded, TaintRemoved, ConditionSet), each("result", ChangeDone, ChangeConflict, ChangeFailed))...),
		decisions: r.declare(counter, "istio_cni_taint_decisions_total", "Decisions about nodes, by reason.", reasons...),
		problems: r.declare(counter, "istio_cni_taint_config_problems_total",
			"Requirements in the ConfigMap refused for bad content; the last good ones stayed in force."),
		troubles: r.declare(counter, "istio_cni_taint_watch_troubles_total", "Failures of the watches of nodes, pods and the ConfigMap, by resource.",
			each("resource", WatchedNodes, WatchedPods, WatchedConfigMap)...),
		events: declareEvents(r, "istio_cni_taint_events_total"),
		queue:  r.declare(gauge, "istio_cni_taint_queue_depth", "Nodes that wait for a decision."),
	}
}

// SetLeader sets whether this replica changes nodes. Without the lease it resets its gauges: the leader exports them.
func (m *Taint) SetLeader(leader bool) {
	m.leader.setBool(leader)
	if !leader {
		m.queue.listBy(nil)
		m.nodes.reset()
	}
}

// SetNodeReason moves a node from one reason to another; an empty reason is not counted.
func (m *Taint) SetNodeReason(before, now readiness.Reason) {
	m.nodes.move(label("reason", before), label("reason", now))
}

// Decided counts a decision.
func (m *Taint) Decided(reason readiness.Reason) { m.decisions.add(1, label("reason", reason)) }

// Changed counts an attempted change.
func (m *Taint) Changed(c TaintChange, r ChangeResult) {
	m.changes.add(1, join(label("change", c), label("result", r)))
}

// ConfigRefused counts invalid requirements.
func (m *Taint) ConfigRefused() { m.problems.add(1, "") }

// WatchFailed counts the start of a watch's failure.
func (m *Taint) WatchFailed(f Watched) { m.troubles.add(1, label("resource", f)) }

// EventReported counts an Event by its result.
func (m *Taint) EventReported(r eventrecorder.Result) { m.events.add(1, label("result", r)) }

// ReadQueue sets the function that counts the nodes in the queue.
func (m *Taint) ReadQueue(count func() int) {
	m.queue.listBy(func() []point { return []point{{"", float64(count())}} })
}
