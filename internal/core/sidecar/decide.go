// Package sidecar decides whether a pod is captured, why, and with which Spec.
//
// It promises one ordered list of rules of which the first that matches wins, a Reason for every outcome, and that all
// names of annotations, labels and containers are here and nowhere else. It never touches the system: the facts are
// given.
//
// Start at Early, which needs nothing but the pod's name, and Decide, which needs the pod.
package sidecar

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// Outcome is what happens to the pod.
type Outcome uint8

// Pass leaves the pod alone; Capture programs it; Refuse must keep it from starting.
const (
	Pass Outcome = iota
	Capture
	Refuse
)

// Reason says why. It is a closed set: it is logged, counted and asserted.
type Reason string

// All reasons, in the order in which the rules are tried.
const (
	NotKubernetes     Reason = "not-kubernetes"
	ExcludedNamespace Reason = "excluded-namespace"
	OwnAgent          Reason = "own-agent"
	HostNetwork       Reason = "host-network"
	Ambient           Reason = "ambient"
	IstioInit         Reason = "istio-init"
	EnvoyDisabled     Reason = "envoy-disabled"
	NoProxy           Reason = "no-proxy"
	NotSidecar        Reason = "not-sidecar"
	InjectDisabled    Reason = "inject-disabled"
	NotInjected       Reason = "not-injected"
	ModeNone          Reason = "mode-none"
	InvalidSettings   Reason = "invalid-settings"
	Captured          Reason = "captured"
)

// sentences explain the reasons to a person.
var sentences = map[Reason]string{ //nolint:gochecknoglobals // a constant table
	NotKubernetes:     "the runtime named no Kubernetes pod",
	ExcludedNamespace: "its namespace is excluded in the plugin's configuration",
	OwnAgent:          "it is the mesh's own node agent, which must start before anything else can",
	HostNetwork:       "it uses the node's network namespace, which is never touched",
	IstioInit:         "its init container istio-init sets up the redirection itself",
	EnvoyDisabled:     "its proxy has DISABLE_ENVOY set",
	NoProxy:           "it has no container istio-proxy",
	NotSidecar:        "its istio-proxy is not a sidecar",
	InjectDisabled:    "sidecar.istio.io/inject says no",
	Ambient:           "it has no sidecar; ambient mode is enabled in the configuration and is not served by this plugin",
	NotInjected:       "it has no annotation sidecar.istio.io/status, so no sidecar was injected",
	ModeNone:          "its interception mode is NONE",
	InvalidSettings:   "its settings are invalid, and starting it without them would bypass the mesh",
	Captured:          "it has a sidecar",
}

// Sentence explains the reason to a person, as the end of "the pod is (not) captured because …".
func (r Reason) Sentence() string { return sentences[r] }

// Reasons lists all reasons in the order in which the rules are tried.
func Reasons() []Reason {
	return []Reason{
		NotKubernetes, ExcludedNamespace, OwnAgent, HostNetwork, Ambient, IstioInit, EnvoyDisabled, NoProxy, NotSidecar,
		InjectDisabled, NotInjected, ModeNone, InvalidSettings, Captured,
	}
}

// Policy is what the node's configuration says about all pods.
type Policy struct {
	ExcludeNamespaces []string
	// AgentNamespace is where the node agent runs; "" if it is not known.
	AgentNamespace string
	// AmbientEnabled only changes what is said of pods without a sidecar.
	AmbientEnabled bool
	SecondFamily   redirect.SecondFamily
}

// Decision is what happens to a pod and why.
type Decision struct {
	Outcome Outcome
	Reason  Reason
	// Detail is the value that decided, if there is one.
	Detail string
	// Spec is valid if the Outcome is Capture.
	Spec redirect.Spec
	// Warnings name settings that are ignored, as the reference ignores them.
	Warnings []string
	// Err holds every invalid setting if the Outcome is Refuse.
	Err error
}

// String is one sentence for a log or a person.
func (d Decision) String() string {
	verb := map[Outcome]string{Pass: "not captured", Capture: "captured", Refuse: "refused"}[d.Outcome]
	text := fmt.Sprintf("%s (%s): %s", verb, d.Reason, d.Reason.Sentence())
	if d.Detail != "" {
		text += fmt.Sprintf(" (%s)", d.Detail)
	}
	return text
}

func pass(r Reason, detail string) (Decision, bool) {
	return Decision{Outcome: Pass, Reason: r, Detail: detail}, true
}

// agentPrefix is how the node agent's pods are called: its DaemonSet's name is protocol.
const agentPrefix = "istio-cni-node-"

// Early decides what can be decided from the pod's name alone, before anything else is looked at. It reports false if
// the pod's facts are needed.
func Early(namespace, name string, p Policy) (Decision, bool) {
	switch {
	case namespace == "" || name == "":
		return pass(NotKubernetes, "")
	case slices.Contains(p.ExcludeNamespaces, namespace):
		return pass(ExcludedNamespace, namespace)
	case p.AgentNamespace != "" && namespace == p.AgentNamespace && strings.HasPrefix(name, agentPrefix):
		return pass(OwnAgent, "")
	}
	return Decision{}, false
}

// Decide decides about a pod whose facts are known.
func Decide(f Facts, p Policy) Decision {
	if d, done := Early(f.Namespace, f.Name, p); done {
		return d
	}
	for _, rule := range []func(Facts, proxy, Policy) (Decision, bool){workload, sidecarProxy, injection} {
		if d, done := rule(f, proxyOf(f), p); done {
			return d
		}
	}
	return capture(f, proxyOf(f), p)
}

// Names of containers that decide.
const (
	initContainer  = "istio-init"
	proxyContainer = "istio-proxy"
)

func workload(f Facts, _ proxy, p Policy) (Decision, bool) {
	_, injected := f.Annotations[StatusKey]
	switch {
	case f.HostNetwork:
		return pass(HostNetwork, "")
	// Without a sidecar no rule below captures it either, but it may be in the mesh all the same, which somebody who looks
	// for the reason should be told.
	case p.AmbientEnabled && !injected:
		return pass(Ambient, "")
	case slices.ContainsFunc(f.Containers, func(c Container) bool { return c.Name == initContainer }):
		return pass(IstioInit, "")
	}
	return Decision{}, false
}

func sidecarProxy(_ Facts, p proxy, _ Policy) (Decision, bool) {
	disabled, err := strconv.ParseBool(p.env["DISABLE_ENVOY"])
	switch {
	case err == nil && disabled:
		return pass(EnvoyDisabled, "")
	case !p.present:
		return pass(NoProxy, "")
	case p.role != "" && p.role != "sidecar":
		return pass(NotSidecar, "proxy "+p.role)
	}
	return Decision{}, false
}

func injection(f Facts, _ proxy, _ Policy) (Decision, bool) {
	text, source := f.Labels[InjectKey], "label"
	if _, labelled := f.Labels[InjectKey]; !labelled {
		text, source = f.Annotations[InjectKey], "annotation"
	}
	// Empty and unreadable values count as "yes", as in the reference.
	if inject, err := strconv.ParseBool(text); err == nil && !inject {
		return pass(InjectDisabled, fmt.Sprintf("%s %q", source, text))
	}
	_, injected := f.Annotations[StatusKey]
	switch {
	case !injected:
		return pass(NotInjected, "")
	case f.Annotations[ModeKey] == modeNone:
		return pass(ModeNone, "")
	}
	return Decision{}, false
}

func capture(f Facts, px proxy, p Policy) Decision {
	spec, warnings, err := settings(f, px)
	if err != nil {
		return Decision{Outcome: Refuse, Reason: InvalidSettings, Err: err, Warnings: warnings}
	}
	spec.SecondFamily = p.SecondFamily
	return Decision{Outcome: Capture, Reason: Captured, Spec: spec, Warnings: warnings}
}
