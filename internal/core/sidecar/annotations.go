package sidecar

// ByAnnotations decides from the pod's name and all of its annotations, as a container runtime may hand them over, if
// they are enough to know that the pod is left alone. Whatever else the pod is then, Decide would leave it alone, too,
// though it may know of a reason that comes before. It never decides that a pod is captured: that takes the containers.
func ByAnnotations(namespace, name string, annotations map[string]string, p Policy) (Decision, bool) {
	if d, done := Early(namespace, name, p); done {
		return d, true
	}
	if _, injected := annotations[StatusKey]; !injected {
		return pass(NotInjected, "")
	}
	if annotations[ModeKey] == modeNone {
		return pass(ModeNone, "")
	}
	return Decision{}, false
}
