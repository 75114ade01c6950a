package sidecar

// Facts are the inputs of a decision: a pod of the API server, reduced to the fields that the rules of this
// package read. Facts are never changed.
type Facts struct {
	Namespace, Name, UID string
	// HostNetwork is set if the pod shares the node's network namespace.
	HostNetwork bool
	// Selected is set if the enablement selectors of ambient mode select the pod. It is known only where [Policy.AmbientEnabled] is
	// set, and only for an [Facts.Eligible] pod.
	Selected bool
	// RuntimeClass is the name of the pod's RuntimeClass, "" for the node's default runtime.
	RuntimeClass        string
	Labels, Annotations map[string]string
	// RunAsUser and RunAsGroup are the pod-level securityContext; nil means not set.
	RunAsUser, RunAsGroup *int64
	// Containers holds init containers first, then containers, each in the pod's order.
	Containers []Container
}

// injected reports whether the injector has marked the pod.
func (f Facts) injected() bool {
	_, has := f.Annotations[StatusKey]
	return has
}

// Eligible reports whether ambient mode can serve the pod if the selectors select it: a sidecar comes first.
func (f Facts) Eligible() bool { return !f.HostNetwork && !f.injected() }

// Container is one container of a pod.
type Container struct {
	Name string
	// Init is set if the container is in spec.initContainers, like a native sidecar.
	Init bool
	Args []string
	// Env holds the literal values in order; a variable with valueFrom has an empty Value.
	Env []EnvVar
	// RunAsUser and RunAsGroup are the container-level securityContext; nil means not set.
	RunAsUser, RunAsGroup *int64
}

// EnvVar is one environment variable of a container.
type EnvVar struct{ Name, Value string }
