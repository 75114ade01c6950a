package metrics

import (
	"net/http"
	"sync/atomic"

	"github.com/VictoriaMetrics/metrics"

	"github.com/meshcni/istio-cni/internal/kube"
)

// TaintChange is what is done to a node by the taint controller.
type TaintChange string

// The condition is the one for other controllers.
const (
	TaintAdded   TaintChange = "add"
	TaintRemoved TaintChange = "remove"
	ConditionSet TaintChange = "condition"
)

const (
	taintLeader    = "istio_cni_taint_leader"
	taintNodes     = "istio_cni_taint_nodes"
	taintChanges   = "istio_cni_taint_changes_total"
	taintProblems  = "istio_cni_taint_config_problems_total"
	taintTroubles  = "istio_cni_taint_watch_troubles_total"
	taintEvents    = "istio_cni_taint_events_total"
	taintPending   = "istio_cni_taint_queue_depth"
	taintDecisions = "istio_cni_taint_decisions_total"
)

// ChangeResult is how a change of a node ended.
type ChangeResult string

// A conflict is a change that somebody else came before; it is made again from what there is then.
const (
	ChangeDone     ChangeResult = "success"
	ChangeConflict ChangeResult = "conflict"
	ChangeFailed   ChangeResult = "failed"
)

// Followed is a sort of object that the taint controller keeps in sight.
type Followed string

// What is followed.
const (
	FollowedNodes     Followed = "nodes"
	FollowedPods      Followed = "pods"
	FollowedConfigMap Followed = "configmap"
)

// Taint counts for one taint controller. Its methods may be called from several goroutines.
type Taint struct {
	set                                            *metrics.Set
	leader                                         *metrics.Gauge
	queue                                          atomic.Pointer[func() int] // its length
	nodes                                          map[string]*metrics.Gauge
	changes, decisions, problems, troubles, events vector
}

// NewTaint returns the metrics of a taint controller of the given version, all zero. The reasons are those for which a
// node is ready or not.
func NewTaint(version string, reasons []string) *Taint {
	set := metrics.NewSet()
	m := &Taint{
		set: set, leader: set.NewGauge(taintLeader, nil), nodes: map[string]*metrics.Gauge{},
		changes: newVector(set, taintChanges, pairs("change", []TaintChange{TaintAdded, TaintRemoved, ConditionSet},
			"result", []ChangeResult{ChangeDone, ChangeConflict, ChangeFailed})),
		decisions: newVector(set, taintDecisions, one("reason", reasons...)),
		problems:  newVector(set, taintProblems, []string{""}),
		troubles:  newVector(set, taintTroubles, one("resource", FollowedNodes, FollowedPods, FollowedConfigMap)),
		events:    newVector(set, taintEvents, one("result", kube.EventSent, kube.EventSuppressed, kube.EventFailed)),
	}
	set.NewGauge(taintPending, m.pending)
	for _, reason := range reasons {
		m.nodes[reason] = set.NewGauge(taintNodes+labels("reason", reason), nil)
	}
	set.NewGauge(buildInfo+labels("version", version), nil).Set(1)
	return m
}

func taintFamilies() []family {
	return []family{
		{taintLeader, gauge, "1 while this replica is the one that changes nodes."},
		{taintNodes, gauge, "Nodes by the reason for which they count as ready or not."},
		{taintChanges, counter, "Changes of nodes, by how they ended; after a conflict another one is made."},
		{taintDecisions, counter, "Decisions about nodes, by reason."},
		{taintProblems, counter, "Requirements in the ConfigMap refused for bad content; the last good ones stayed in force."},
		{taintTroubles, counter, "Times that nodes, pods or the ConfigMap could not be followed, by what it was."},
		{taintEvents, counter, "Kubernetes Events there was reason for: sent, suppressed for being too many, or failed."},
		{taintPending, gauge, "Nodes that wait for a decision."},
		{buildInfo, gauge, "Always 1; the label is the version of this program."},
	}
}

// Leads says that this replica changes nodes, Stands that it does not, or not any more.
func (m *Taint) Leads() { m.leader.Set(1) }

// Stands also forgets the nodes: they are another replica's.
func (m *Taint) Stands() {
	m.leader.Set(0)
	m.queue.Store(nil)
	for _, g := range m.nodes {
		g.Set(0)
	}
}

// Counted says that a node is counted for another reason than before; empty is none.
func (m *Taint) Counted(before, now string) {
	if before == now {
		return
	}
	if g := m.nodes[before]; g != nil {
		g.Add(-1)
	}
	if g := m.nodes[now]; g != nil {
		g.Add(1)
	}
}

// Decided counts a decision.
func (m *Taint) Decided(reason string) { m.decisions.add(labels("reason", reason), 1) }

// Changed counts a change that was tried.
func (m *Taint) Changed(c TaintChange, r ChangeResult) {
	m.changes.add(labels("change", string(c), "result", string(r)), 1)
}

// ConfigRefused counts requirements that could not be used.
func (m *Taint) ConfigRefused() { m.problems.add("", 1) }

// Troubled counts the beginning of a trouble with following.
func (m *Taint) Troubled(f Followed) { m.troubles.add(labels("resource", string(f)), 1) }

// EventReported counts an Event by what became of it.
func (m *Taint) EventReported(r kube.EventResult) { m.events.add(labels("result", string(r)), 1) }

// Pending takes what counts the nodes that wait for a decision.
func (m *Taint) Pending(count func() int) { m.queue.Store(&count) }

func (m *Taint) pending() float64 {
	if count := m.queue.Load(); count != nil {
		return float64((*count)())
	}
	return 0
}

// Text returns all metrics in the Prometheus text format, those of the process included.
func (m *Taint) Text() []byte { return text(m.set, taintFamilies()) }

// Handler serves the metrics, whatever the path.
func (m *Taint) Handler() http.Handler { return handler(m.Text) }
