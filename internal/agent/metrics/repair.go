package metrics

import (
	"time"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/core/audit"
)

// RepairType is the action on a pod that started without redirection. The values are the reference's.
type RepairType string

// The actions, the most disruptive first.
const (
	RepairDelete RepairType = "delete"
	RepairLabel  RepairType = "label"
	RepairPod    RepairType = "repair"
)

// RepairResult is the result of a repair. The values are the reference's.
type RepairResult string

// A skipped repair was no longer necessary.
const (
	RepairSuccess RepairResult = "success"
	RepairSkip    RepairResult = "skip"
	RepairFail    RepairResult = "fail"
)

// PodState is the state of a pod of the mesh.
type PodState string

// The states. An empty state is not counted: the pod is outside the mesh, or has no network.
const (
	PodRedirected PodState = "redirected"
	PodBroken     PodState = "broken"  // the pod runs, or failed, without redirection
	PodDrifted    PodState = "drifted" // the pod runs with rules that differ from the current ones
	PodUnknown    PodState = "unknown" // the pod's namespace could not be inspected
)

// Repair has the metrics of race repair and the audit, in the agent or alone. Its methods are safe for concurrent use.
type Repair struct {
	*registry

	repairs, pods, events, failures, restored *family
	// These are computed on each scrape.
	auditPods, oldest, offenders *family
}

// NewRepair returns the metrics of a race repair that runs alone, all zero.
func NewRepair(version string) *Repair { return newRepair(newRegistry(version)) }

func newRepair(r *registry) *Repair {
	m := &Repair{
		registry: r,
		repairs: r.declare(counter, "istio_cni_repair_pods_repaired_total",
			"Actions on pods that started without redirection, by action and result.",
			pairs(each("type", RepairDelete, RepairLabel, RepairPod), each("result", RepairSuccess, RepairSkip, RepairFail))...),
		pods: r.declare(gauge, "istio_cni_mesh_pods", "Monitored pods of the mesh, by the state of their redirection.",
			each("state", PodRedirected, PodBroken, PodDrifted, PodUnknown)...),
		failures: r.declare(counter, "istio_cni_repair_watch_troubles_total", "Failures of the watch of the pods."),
		restored: r.declare(counter, "istio_cni_audit_repairs_total", "Pods whose lost or changed rules the audit restored, by result.",
			each("result", RepairSuccess, RepairFail)...),
		auditPods: r.declare(gauge, "istio_cni_audit_pods", "Pods of the mesh on this node, by the state of their redirection."),
		oldest: r.declare(gauge, "istio_cni_audit_oldest_seconds",
			"Time since the least recent inspection of a pod of the mesh."),
		offenders: r.declare(gauge, "istio_cni_audit_offender", "Pods of the mesh that are not captured, 100 at most."),
		events:    declareEvents(r, "istio_cni_events_total"),
	}
	m.ReadAudit(func() []audit.Status { return nil }, func() time.Time { return time.Time{} })
	return m
}

func declareEvents(r *registry, name string) *family {
	return r.declare(counter, name, "Kubernetes Events by result: sent, suppressed by the rate limit, or failed.",
		each("result", eventrecorder.Sent, eventrecorder.Suppressed, eventrecorder.Failed)...)
}

// Repaired counts an action on a pod by its result.
func (r *Repair) Repaired(t RepairType, result RepairResult) {
	r.repairs.add(1, join(label("type", t), label("result", result)))
}

// SetPodState moves a pod from one state to another; an empty state is not counted.
func (r *Repair) SetPodState(before, now PodState) {
	r.pods.move(label("state", before), label("state", now))
}

// AuditRepaired counts a pod whose rules the audit restored, or failed to restore.
func (r *Repair) AuditRepaired(result RepairResult) { r.restored.add(1, label("result", result)) }

// PodWatchFailed counts the start of a failure of the pod watch.
func (r *Repair) PodWatchFailed() { r.failures.add(1, "") }

// EventReported counts an Event by its result.
func (r *Repair) EventReported(result eventrecorder.Result) { r.events.add(1, label("result", result)) }
