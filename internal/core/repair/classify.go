package repair

import (
	"cmp"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Reason explains a finding. It is a closed set: it is logged and asserted.
type Reason string

// The reasons, in the order in which they are tried. The first five leave the pod alone, Unproven needs an inspection of
// the pod's namespace, and the others mean that the pod is broken.
const (
	NotLookedAt Reason = "not-looked-at" // without the annotation, being deleted, or in a sandbox
	Passed      Reason = "passed"        // the plugin leaves it alone
	Proven      Reason = "proven"        // its validation has found the redirection
	NoSandbox   Reason = "no-sandbox"    // it has no network yet, or not any more
	Redirected  Reason = "redirected"    // its rules are in place

	Unproven Reason = "unproven"

	ValidationFailed Reason = "validation-failed" // and is restarted
	FailedForGood    Reason = "failed-for-good"   // and is not restarted
	RulesMissing     Reason = "rules-missing"
	RulesDiffer      Reason = "rules-differ"
)

// Sentence explains why a pod is broken, and continues "the pod …". It is "" for other reasons.
func (r Reason) Sentence() string {
	return map[Reason]string{
		ValidationFailed: "found that its traffic is not redirected",
		FailedForGood:    "found that its traffic is not redirected, and is not restarted",
		RulesMissing:     "has no rules that redirect its traffic",
		RulesDiffer:      "has rules that differ from those that redirect its traffic",
	}[r]
}

// Finding is the assessment of a pod.
type Finding struct {
	Reason Reason
	// Broken is set if an action is needed.
	Broken bool
	// NeedsInspection is set if the rules in the pod's namespace decide.
	NeedsInspection bool
	// Repairable is set if rules written now would help.
	Repairable bool
	// Started is set if containers of the pod have run: rules written now do not redirect the connections they opened.
	Started bool
	// Decision is the plugin's decision about the pod.
	Decision sidecar.Decision
	// Failed is the state of the failed validation, zero if none failed.
	Failed State
}

// SawRules reports whether the failed validation began after since, when the rules were in place: then its result is
// about these rules. If its beginning is unknown its end decides.
func (f Finding) SawRules(since time.Time) bool {
	return cmp.Or(f.Failed.Began, f.Failed.Finished).After(since)
}

// Classify assesses a pod from the pod object alone.
func Classify(pod Pod, predicate Predicate, policy sidecar.Policy) Finding {
	f := Finding{Reason: NotLookedAt}
	if _, has := pod.Facts.Annotations[predicate.Annotation]; predicate.Annotation != "" && !has || pod.Deleting {
		return f
	}
	f.Decision = sidecar.Decide(pod.Facts, policy)
	f.Started = started(pod)
	failed, broken := predicate.failed(pod.Init)
	switch {
	case !f.Decision.Outcome.OfSidecar() && (!broken || !mayBeUninjected(f.Decision.Reason)):
		f.Reason = Passed
	case broken && (pod.Ended || pod.NeverRestarts):
		f.Reason, f.Broken, f.Failed = FailedForGood, true, failed
	case broken:
		f.Reason, f.Broken, f.Failed = ValidationFailed, true, failed
		f.Repairable = f.repairable()
	case Validated(pod):
		f.Reason = Proven
	case pod.Ended || !pod.Addressed:
		f.Reason = NoSandbox
	case f.Decision.Sandbox != "": // its rules cannot be read
	default:
		f.Reason, f.NeedsInspection = Unproven, true
	}
	return f
}

// mayBeUninjected reports whether a pod with a failed validation is broken although the plugin would pass it. These reasons
// only mean that the pod does not look injected, which a failed validation contradicts. All others are a user's choice.
func mayBeUninjected(r sidecar.Reason) bool { return r == sidecar.NoProxy || r == sidecar.NotInjected }

// Validated reports whether the validation has succeeded since the pod's last start.
func Validated(pod Pod) bool {
	return slices.ContainsFunc(pod.Init, func(c Container) bool { return c.Name == sidecar.ValidationContainer && c.State.succeeded() })
}

// started reports whether a container other than the validation runs or has run.
func started(pod Pod) bool {
	ran := func(c Container) bool { return c.State.Running || c.State.Terminated || c.Last.Terminated }
	return slices.ContainsFunc(pod.Containers, ran) ||
		slices.ContainsFunc(pod.Init, func(c Container) bool { return c.Name != sidecar.ValidationContainer && ran(c) })
}

// Rules is the result of an inspection of a pod's namespace.
type Rules uint8

// The namespace has the wanted rules of the mesh, other rules of the mesh, or none.
const (
	InPlaceRules Rules = iota
	OtherRules
	NoRules
)

// ApplyObservation completes the finding of an unproven pod from the rules in its namespace. Rules that differ make the pod
// broken only before its validation: a pod that works with an earlier configuration's rules is not changed while it runs.
func ApplyObservation(f Finding, pod Pod, found Rules) Finding {
	f.NeedsInspection = false
	switch found {
	case InPlaceRules:
		f.Reason = Redirected
	case OtherRules:
		f.Reason = RulesDiffer
		f.Broken = !f.Started && slices.ContainsFunc(pod.Facts.Containers, func(c sidecar.Container) bool {
			return c.Init && c.Name == sidecar.ValidationContainer
		})
	case NoRules:
		f.Reason, f.Broken = RulesMissing, true
	}
	f.Repairable = f.Broken && f.repairable()
	return f
}

// repairable reports whether rules written now can redirect the pod.
func (f Finding) repairable() bool {
	return f.Decision.Outcome == sidecar.Capture && f.Decision.Sandbox == ""
}
