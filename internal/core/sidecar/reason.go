package sidecar

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Reason is why a pod is captured or not. It is a closed set: it is logged, counted and asserted.
type Reason string

// The reasons. rules has their order.
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

// knowledge is how much of a pod is known, or needed.
type knowledge uint8

const (
	byName knowledge = iota
	byAnnotations
	byPod
)

// rule is a reason with its text and its condition.
type rule struct {
	reason Reason
	// sentence is the end of "the pod is (not) captured because …".
	sentence string
	// remedy is an instruction that gets such a pod captured, "" if none can.
	remedy string
	needs  knowledge
	// applies reports whether the pod is left alone (or enrolled) for this reason, with the value that decides. It is nil for the reasons
	// that the settings decide.
	applies func(subject) (detail string, applies bool)
}

const (
	// agentPrefix is the prefix of the names of the node agent's pods: its DaemonSet's name is protocol.
	agentPrefix = "istio-cni-node-"
	// modeNone is the mode that the injector accepts and writes for a pod without redirection.
	modeNone = "NONE"
)

// rules are tried in order, and the first that applies wins. The metrics, the reports of plugins and the table in
// docs/errors.md take the reasons from here.
var rules = []rule{ //nolint:gochecknoglobals // a constant table
	{NotKubernetes, "the runtime did not name a Kubernetes pod", "", byName, func(s subject) (string, bool) {
		return "", s.Namespace == "" || s.Name == ""
	}},
	{
		ExcludedNamespace, "its namespace is excluded in the plugin's configuration", "remove the namespace from exclude_namespaces", byName,
		func(s subject) (string, bool) {
			return s.Namespace, slices.Contains(s.policy.ExcludeNamespaces, s.Namespace)
		},
	},
	{OwnAgent, "it is the mesh's own node agent, which must start before anything else can", "", byName, func(s subject) (string, bool) {
		return "", s.policy.AgentNamespace != "" && s.Namespace == s.policy.AgentNamespace && strings.HasPrefix(s.Name, agentPrefix)
	}},
	{
		HostNetwork, "it uses the node's network namespace, which is never touched", "set hostNetwork to false", byPod,
		func(s subject) (string, bool) { return "", s.HostNetwork },
	},
	// Of the rules with a condition, this one alone does not leave the pod alone: see Decide.
	{
		Ambient, "it is in ambient mode: the enablement selectors select it, and it has no sidecar", "", byPod,
		func(s subject) (string, bool) { return "", s.policy.AmbientEnabled && s.Selected && s.Eligible() },
	},
	{
		IstioInit, "its init container istio-init sets up the redirection itself", "inject it again with the CNI plugin enabled in istiod", byPod,
		func(s subject) (string, bool) {
			return "", slices.ContainsFunc(s.Containers, func(c Container) bool { return c.Name == initContainer })
		},
	},
	{
		EnvoyDisabled, "its proxy has DISABLE_ENVOY set", "remove DISABLE_ENVOY from the proxy's environment", byPod,
		func(s subject) (string, bool) {
			disabled, err := strconv.ParseBool(s.proxy.env[disableEnvoy])
			return "", err == nil && disabled
		},
	},
	{
		NoProxy, "it has no container istio-proxy", "inject a sidecar", byPod,
		func(s subject) (string, bool) { return "", !s.proxy.present },
	},
	{NotSidecar, "its istio-proxy is not a sidecar", "", byPod, func(s subject) (string, bool) {
		return "proxy " + s.proxy.role, s.proxy.role != "" && s.proxy.role != "sidecar"
	}},
	{InjectDisabled, "sidecar.istio.io/inject is false", "set the label or annotation sidecar.istio.io/inject to true", byPod, injectDisabled},
	{
		NotInjected, "it has no annotation sidecar.istio.io/status, so no sidecar was injected", "inject a sidecar", byAnnotations,
		func(s subject) (string, bool) { return "", !s.injected() },
	},
	{
		ModeNone, "its interception mode is NONE", "set sidecar.istio.io/interceptionMode to REDIRECT or TPROXY", byAnnotations,
		func(s subject) (string, bool) { return "", s.Annotations[ModeKey] == modeNone },
	},
	{
		InvalidSettings, "its settings are invalid, and starting it without them would bypass the mesh",
		"correct the annotations that the error names", byPod, nil,
	},
	{Captured, "it has a sidecar", "", byPod, nil},
}

// injectDisabled reads the label or, without one, the annotation. Like in the reference, empty and unreadable values
// mean true.
func injectDisabled(s subject) (string, bool) {
	text, source := s.Labels[InjectKey], "label"
	if _, labelled := s.Labels[InjectKey]; !labelled {
		text, source = s.Annotations[InjectKey], "annotation"
	}
	if inject, err := strconv.ParseBool(text); err != nil || inject {
		return "", false
	}
	return fmt.Sprintf("%s %q", source, text), true
}

// rule returns the row of the reason, or an empty one for an unknown reason.
func (r Reason) rule() rule {
	if i := slices.IndexFunc(rules, func(row rule) bool { return row.reason == r }); i >= 0 {
		return rules[i]
	}
	return rule{}
}

// Sentence explains the reason, and continues "the pod is (not) captured because …".
func (r Reason) Sentence() string { return r.rule().sentence }

// Remedy is an instruction that gets a pod captured that is left alone or refused for this reason; "" if none can.
func (r Reason) Remedy() string { return r.rule().remedy }

// Reasons lists all reasons in the order in which the rules are tried.
func Reasons() []Reason {
	all := make([]Reason, len(rules))
	for i, r := range rules {
		all[i] = r.reason
	}
	return all
}
