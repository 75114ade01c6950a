package metrics

import (
	"net/http"

	"github.com/VictoriaMetrics/metrics"

	"github.com/meshcni/istio-cni/internal/kube"
)

// RepairType is what was done about a pod that started without redirection. The values are the reference's.
type RepairType string

// The repairs, from the hardest to the mildest.
const (
	RepairDelete RepairType = "delete"
	RepairLabel  RepairType = "label"
	RepairPod    RepairType = "repair"
)

// RepairResult is how a repair ended. The values are the reference's.
type RepairResult string

// A skipped repair was not needed any more.
const (
	RepairSuccess RepairResult = "success"
	RepairSkip    RepairResult = "skip"
	RepairFail    RepairResult = "fail"
)

// PodState is how a pod of the mesh stands with its redirection.
type PodState string

// The states. Empty is none: the pod is not of the mesh, or has no network.
const (
	PodRedirected PodState = "redirected"
	PodBroken     PodState = "broken"  // it runs, or failed, without redirection
	PodDrifted    PodState = "drifted" // it runs with other rules than those of now
	PodUnknown    PodState = "unknown" // its namespace could not be looked at
)

const (
	repairsTotal  = "istio_cni_repair_pods_repaired_total"
	meshPods      = "istio_cni_mesh_pods"
	repairTrouble = "istio_cni_repair_watch_troubles_total"
)

// Repair counts for race repair, in the agent or alone. Its methods may be called from several goroutines.
type Repair struct {
	set                       *metrics.Set
	repairs, events, troubles vector
	pods                      map[PodState]*metrics.Gauge
}

// NewRepair returns the metrics of a race repair that runs alone, all zero.
func NewRepair(version string) *Repair {
	set := metrics.NewSet()
	set.NewGauge(buildInfo+labels("version", version), nil).Set(1)
	return newRepair(set)
}

func newRepair(set *metrics.Set) *Repair {
	r := &Repair{
		set: set,
		repairs: newVector(set, repairsTotal, pairs("type", []RepairType{RepairDelete, RepairLabel, RepairPod},
			"result", []RepairResult{RepairSuccess, RepairSkip, RepairFail})),
		events:   newVector(set, eventsTotal, one("result", kube.EventSent, kube.EventSuppressed, kube.EventFailed)),
		troubles: newVector(set, repairTrouble, []string{""}),
		pods:     map[PodState]*metrics.Gauge{},
	}
	for _, state := range []PodState{PodRedirected, PodBroken, PodDrifted, PodUnknown} {
		r.pods[state] = set.NewGauge(meshPods+labels("state", string(state)), nil)
	}
	return r
}

func repairFamilies() []family {
	return []family{
		{repairsTotal, counter, "Pods that had started without redirection, by what was done about them and how it ended."},
		{meshPods, gauge, "Pods of the mesh that are looked after, by how they stand with their redirection."},
		{repairTrouble, counter, "Times that the pods could not be followed."},
		{eventsTotal, counter, "Kubernetes Events there was reason for: sent, suppressed for being too many, or failed."},
	}
}

// Repaired counts a pod that was looked after.
func (r *Repair) Repaired(t RepairType, result RepairResult) {
	r.repairs.add(labels("type", string(t), "result", string(result)), 1)
}

// Stands says that a pod is counted in another state than before; empty is none.
func (r *Repair) Stands(before, now PodState) {
	if before == now {
		return
	}
	if g := r.pods[before]; g != nil {
		g.Add(-1)
	}
	if g := r.pods[now]; g != nil {
		g.Add(1)
	}
}

// PodsTroubled counts the beginning of a trouble with following the pods.
func (r *Repair) PodsTroubled() { r.troubles.add("", 1) }

// EventReported counts an Event by what became of it.
func (r *Repair) EventReported(result kube.EventResult) {
	r.events.add(labels("result", string(result)), 1)
}

// Text returns the metrics in the Prometheus text format, those of the process included.
func (r *Repair) Text() []byte {
	return text(r.set, append(repairFamilies(), family{buildInfo, gauge, "Always 1; the label is the version of this program."}))
}

// Handler serves the metrics, whatever the path.
func (r *Repair) Handler() http.Handler { return handler(r.Text) }
