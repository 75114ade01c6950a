// Package sidecar decides whether a pod is captured or enrolled in ambient mode, why, and with which Spec.
//
// It promises one ordered list of rules of which the first match wins, a Reason for every outcome, and that only this
// package has the names of annotations, labels and containers. It does not access the system: the caller passes the facts.
//
// Start reading at Early, which needs only the pod's name, and Decide, which needs the pod. A new reason to leave a
// pod alone is a row in reason.go, with a row in inputs.go for each key that it reads.
package sidecar

import (
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// Outcome is the action on the pod.
type Outcome uint8

// Pass leaves the pod alone; Capture programs it for its sidecar; Refuse must prevent its start; Enrol hands it to the node agent, for
// ambient mode.
const (
	Pass Outcome = iota
	Capture
	Refuse
	Enrol
)

// OfSidecar reports whether the pod needs the rules of a sidecar.
func (o Outcome) OfSidecar() bool { return o == Capture || o == Refuse }

// Policy is the part of the node's configuration that concerns all pods.
type Policy struct {
	ExcludeNamespaces []string
	// AgentNamespace is the node agent's namespace, "" if unknown.
	AgentNamespace string
	// AmbientEnabled makes the selected pods without a sidecar enrol. Then decisions need [Facts.Selected].
	AmbientEnabled bool
	// Ambient has the node's settings for enrolled pods.
	Ambient      ambient.Config
	SecondFamily redirect.SecondFamily
	// SandboxedRuntimes are patterns (path.Match) of the names of RuntimeClasses whose pods have a network stack of their own.
	SandboxedRuntimes []string
}

// Decision is the action on a pod with its reason.
type Decision struct {
	Outcome Outcome
	Reason  Reason
	// Detail is the value that decided, if any.
	Detail string
	// Spec is valid if the Outcome is Capture.
	Spec redirect.Spec
	// Ambient is valid if the Outcome is Enrol.
	Ambient ambient.Spec
	// Sandbox is the pod's sandbox if the Outcome is Capture, "" for a pod on the node's kernel.
	Sandbox Sandbox
	// Warnings name ignored settings. The reference ignores them, too.
	Warnings []string
	// Err joins all invalid settings if the Outcome is Refuse.
	Err error
}

// Wanted returns the redirection that the pod needs: Spec or Ambient, nil for any other Outcome.
func (d Decision) Wanted() redirect.Wanted {
	switch d.Outcome {
	case Capture:
		return d.Spec
	case Enrol:
		return d.Ambient
	case Pass, Refuse:
	}
	return nil
}

// Early decides by the pod's name alone. It returns false if the decision needs the pod's facts.
func Early(namespace, name string, p Policy) (Decision, bool) {
	return pass(subject{Facts: Facts{Namespace: namespace, Name: name}, policy: p}, byName)
}

// ByAnnotations decides by the pod's name and all of its annotations, which a container runtime may pass. It returns true if
// they show that the pod is left alone. Decide leaves such a pod alone, too, perhaps for an earlier reason. A decision to
// capture needs the containers, and one to enrol the labels.
func ByAnnotations(namespace, name string, annotations map[string]string, p Policy) (Decision, bool) {
	s := subject{Facts: Facts{Namespace: namespace, Name: name, Annotations: annotations}, policy: p}
	if p.AmbientEnabled && !s.injected() {
		return pass(s, byName)
	}
	return pass(s, byAnnotations)
}

// Decide decides about a pod whose facts are known.
func Decide(f Facts, p Policy) Decision {
	if d, done := Early(f.Namespace, f.Name, p); done {
		return d
	}
	s := subject{Facts: f, proxy: proxyOf(f), policy: p}
	if d, done := pass(s, byPod); done {
		if d.Reason == Ambient {
			d.Outcome = Enrol
			d.Ambient, d.Warnings = ambient.Of(p.Ambient, f.Annotations)
		}
		return d
	}
	spec, warnings, err := settings(f, s.proxy)
	if err != nil {
		return Decision{Outcome: Refuse, Reason: InvalidSettings, Err: err, Warnings: warnings}
	}
	spec.SecondFamily = p.SecondFamily
	return Decision{Outcome: Capture, Reason: Captured, Spec: spec, Sandbox: sandboxOf(f.RuntimeClass, p), Warnings: warnings}
}

// subject is the known part of a pod.
type subject struct {
	Facts

	proxy  proxy
	policy Policy
}

// pass applies the rules whose inputs are known.
func pass(s subject, known knowledge) (Decision, bool) {
	for _, r := range rules {
		if r.needs > known || r.applies == nil {
			continue
		}
		if detail, applies := r.applies(s); applies {
			return Decision{Outcome: Pass, Reason: r.reason, Detail: detail}, true
		}
	}
	return Decision{}, false
}
