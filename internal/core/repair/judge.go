package repair

import (
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Reason says why a pod counts as it does. It is a closed set: it is logged, counted and asserted.
type Reason string

// The reasons, in the order in which they are tried. The first five leave the pod alone, Unproven asks for a look at
// its namespace, the others say that it is broken.
const (
	NotLookedAt Reason = "not-looked-at" // without the annotation, or leaving
	Passed      Reason = "passed"        // the plugin leaves it alone
	Proven      Reason = "proven"        // its validation has found the redirection
	NoSandbox   Reason = "no-sandbox"    // it has no network yet, or not any more
	Redirected  Reason = "redirected"    // its rules are in place

	Unproven Reason = "unproven"

	ValidationFailed Reason = "validation-failed" // and will be tried again
	FailedForGood    Reason = "failed-for-good"   // and is not started again
	RulesMissing     Reason = "rules-missing"
	RulesDiffer      Reason = "rules-differ"
)

// Reasons lists all of them.
func Reasons() []Reason {
	return []Reason{
		NotLookedAt, Passed, Proven, NoSandbox, Redirected, Unproven, ValidationFailed, FailedForGood, RulesMissing, RulesDiffer,
	}
}

// Sentence explains the reason, as the end of "the pod …".
func (r Reason) Sentence() string {
	return map[Reason]string{
		NotLookedAt:      "is not looked at",
		Passed:           "is left alone by the plugin, too",
		Proven:           "has found its traffic redirected",
		NoSandbox:        "has no network just now",
		Redirected:       "has its rules in place",
		Unproven:         "has not yet found its traffic redirected",
		ValidationFailed: "found that its traffic is not redirected",
		FailedForGood:    "found that its traffic is not redirected, and is not started again",
		RulesMissing:     "has no rules that redirect its traffic",
		RulesDiffer:      "has other rules than those that redirect its traffic",
	}[r]
}

// Finding is what there is to know about a pod.
type Finding struct {
	Reason Reason
	// Broken says that something has to be done.
	Broken bool
	// Look says that the namespace decides.
	Look bool
	// Repairable says that rules written now would help.
	Repairable bool
	// Started says that containers of the pod run already: what they opened before is not redirected by rules that come now.
	Started bool
	// Decision is the plugin's about this pod.
	Decision sidecar.Decision
	// Failed is the state of the validation that shows the pod as broken, zero unless one does.
	Failed State
}

// FailedAt is when the validation that shows the pod as broken ended, zero if that is not known.
func (f Finding) FailedAt() time.Time { return f.Failed.Finished }

// SawRules tells whether that validation ran from beginning to end after a time at which the rules were in place, so that
// its verdict is about them. Where the beginning is not known the end decides.
func (f Finding) SawRules(since time.Time) bool {
	if f.Failed.Began.IsZero() {
		return f.Failed.Finished.After(since)
	}
	return f.Failed.Began.After(since)
}

// Judge says what can be told from the pod alone.
func Judge(pod Pod, predicate Predicate, policy sidecar.Policy) Finding {
	f := Finding{Reason: NotLookedAt}
	if _, has := pod.Facts.Annotations[predicate.Annotation]; predicate.Annotation != "" && !has || pod.Deleting {
		return f
	}
	f.Decision = sidecar.Decide(pod.Facts, policy)
	f.Started = started(pod)
	failed, broken := predicate.failed(pod.Init)
	if f.Decision.Outcome == sidecar.Pass && (!broken || !hopeful(f.Decision.Reason)) {
		f.Reason = Passed
		return f
	}
	if broken {
		f.Reason, f.Broken, f.Failed = ValidationFailed, true, failed
		if pod.Ended || pod.NeverRestarts {
			f.Reason = FailedForGood
		}
		f.Repairable = f.Reason == ValidationFailed && f.Decision.Outcome == sidecar.Capture
		return f
	}
	switch {
	case validated(pod):
		f.Reason = Proven
	case pod.Ended || !pod.Addressed:
		f.Reason = NoSandbox
	default:
		f.Reason, f.Look = Unproven, true
	}
	return f
}

// hopeful tells whether a pod whose validation failed counts as broken although the plugin would pass it. Those are the
// reasons that only say that the pod does not look injected, which a failed validation contradicts. All others are
// somebody's will.
func hopeful(r sidecar.Reason) bool { return r == sidecar.NoProxy || r == sidecar.NotInjected }

// validated tells whether the validation has succeeded in this life of the pod.
func validated(pod Pod) bool {
	return slices.ContainsFunc(pod.Init, func(c Container) bool { return c.Name == sidecar.ValidationContainer && c.State.succeeded() })
}

// hasValidation tells whether there is a validation whose verdict is still to come.
func hasValidation(f sidecar.Facts) bool {
	return slices.ContainsFunc(f.Containers, func(c sidecar.Container) bool { return c.Init && c.Name == sidecar.ValidationContainer })
}

// started tells whether anything but the validation runs or has run.
func started(pod Pod) bool {
	ran := func(c Container) bool { return c.State.Running || c.State.Terminated || c.Last.Terminated }
	return slices.ContainsFunc(pod.Containers, ran) ||
		slices.ContainsFunc(pod.Init, func(c Container) bool { return c.Name != sidecar.ValidationContainer && ran(c) })
}

// Rules is what was found in a pod's namespace.
type Rules uint8

// The rules of the mesh are as wanted, are others, or there are none.
const (
	InPlaceRules Rules = iota
	OtherRules
	NoRules
)

// Weigh takes in what the namespace of an unproven pod looks like. Rules that differ count only while the validation is
// still to come: a pod that works with rules of an earlier configuration is not changed under its feet.
func Weigh(f Finding, pod Pod, found Rules) Finding {
	f.Look = false
	switch found {
	case InPlaceRules:
		f.Reason = Redirected
		return f
	case OtherRules:
		f.Reason = RulesDiffer
		f.Broken = hasValidation(pod.Facts) && !f.Started
	case NoRules:
		f.Reason, f.Broken = RulesMissing, true
	}
	f.Repairable = f.Broken && f.Decision.Outcome == sidecar.Capture
	return f
}
