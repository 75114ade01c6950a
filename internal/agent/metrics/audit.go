package metrics

import (
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
)

// maxOffenders bounds the series with names of pods.
const maxOffenders = 100

// ReadAudit sets the source of the audit's metrics: the status of the node's pods, and the time of day.
func (r *Repair) ReadAudit(pods func() []audit.Status, now func() time.Time) {
	r.auditPods.listBy(func() []point {
		counts := map[audit.State]int{}
		for _, s := range pods() {
			counts[s.State]++
		}
		var all []point
		for _, state := range audit.States() {
			all = append(all, point{label("state", state), float64(counts[state])})
		}
		return all
	})
	r.oldest.listBy(func() []point {
		oldest := 0.0
		for _, s := range pods() {
			if !s.Checked.IsZero() {
				oldest = max(oldest, now().Sub(s.Checked).Seconds())
			}
		}
		return []point{{"", oldest}}
	})
	r.offenders.listBy(func() []point {
		all := pods()
		audit.Sort(all)
		var points []point
		for _, s := range all {
			if s.Faulty() && len(points) < maxOffenders {
				labels := join(join(label("namespace", s.Namespace), label("pod", s.Pod)), label("state", s.State))
				points = append(points, point{labels, 1})
			}
		}
		return points
	})
}
