package metrics

// AmbientStep is a step of a pod's way into the ambient mesh or out of it.
type AmbientStep string

// The steps in the order of the way in.
const (
	StepNamespace  AmbientStep = "namespace"  // the pod's network namespace is not found
	StepRules      AmbientStep = "rules"      // its rules or routes cannot be written or removed
	StepZtunnel    AmbientStep = "ztunnel"    // ztunnel refuses the pod
	StepAnnotation AmbientStep = "annotation" // the API server does not take the pod's annotation
)

// AmbientCounts are the ztunnels that are connected, and the pods of this node that belong into the ambient mesh: enrolled ones,
// and pending ones that are not in it yet.
type AmbientCounts struct{ Ztunnels, Enrolled, Pending int }

// Ambient has the metrics of ambient mode. Gauges have no series on a node that does not serve it.
type Ambient struct{ ztunnels, ambientPods, ambientFailures *family }

func newAmbient(r *registry) *Ambient {
	a := &Ambient{
		// The first name is the reference's.
		ztunnels:    r.declare(gauge, "ztunnel_connected", "Connections of ztunnel to this agent."),
		ambientPods: r.declare(gauge, "istio_cni_ambient_pods", "Pods of this node that belong into the ambient mesh: in it, or not yet."),
		ambientFailures: r.declare(counter, "istio_cni_ambient_failures_total", "Failed tries to enrol or release a pod of the ambient mesh, by step.",
			each("step", StepNamespace, StepRules, StepZtunnel, StepAnnotation)...),
	}
	for _, f := range []*family{a.ztunnels, a.ambientPods} {
		f.listBy(func() []point { return nil })
	}
	return a
}

// ReadAmbient sets the source of the gauges.
func (a *Ambient) ReadAmbient(counts func() AmbientCounts) {
	a.ztunnels.listBy(func() []point { return []point{{"", float64(counts().Ztunnels)}} })
	a.ambientPods.listBy(func() []point {
		c := counts()
		return []point{{label("state", "enrolled"), float64(c.Enrolled)}, {label("state", "pending"), float64(c.Pending)}}
	})
}

// AmbientFailed counts a failed try.
func (a *Ambient) AmbientFailed(s AmbientStep) { a.ambientFailures.add(1, label("step", s)) }
