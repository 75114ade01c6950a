package sidecar

import (
	"path"
	"slices"
	"strings"
)

// Sandbox is the kind of a container runtime whose pods have their own network stack, "" for the node's kernel. The name of the pod's
// RuntimeClass decides: its handler would need another right and a request, and CNI plugins do not get it.
type Sandbox string

// The kinds. Other is any other runtime that the configuration names.
const (
	GVisor Sandbox = "gVisor"
	Kata   Sandbox = "Kata Containers"
	Other  Sandbox = "the sandbox"
)

// kinds has the prefixes of the names of each kind's RuntimeClasses and handlers.
var kinds = map[string]Sandbox{"gvisor": GVisor, "runsc": GVisor, "kata": Kata} //nolint:gochecknoglobals // a constant table

// sandboxOf returns the kind of a pod whose RuntimeClass matches one of the patterns of the policy.
func sandboxOf(class string, p Policy) Sandbox {
	matches := func(pattern string) bool {
		matched, _ := path.Match(pattern, class) // a bad pattern is a problem of the configuration
		return matched
	}
	if class == "" || !slices.ContainsFunc(p.SandboxedRuntimes, matches) {
		return ""
	}
	for name, kind := range kinds {
		if strings.HasPrefix(class, name) {
			return kind
		}
	}
	return Other
}

// Sentence is a sentence, without a full stop, about the effect of the rules in the network namespace.
func (s Sandbox) Sentence() string {
	switch s {
	case GVisor:
		return "gVisor has a network stack of its own: with reproduce-nftables, runsc copies the namespace's nat rules for IPv4 into it " +
			"when the sandbox starts, otherwise no rules; rules written later have no effect"
	case Kata:
		return "Kata Containers passes packets to a virtual machine's kernel, past the rules of the network namespace"
	case Other:
	}
	return "it has a network stack of its own, to which the rules in the network namespace may not apply"
}

// Remedy is an instruction for a pod whose traffic is not redirected.
func (s Sandbox) Remedy() string {
	const otherwise = "run the pod without this RuntimeClass"
	switch s {
	case GVisor:
		return `unless its istio-validation has found the redirection: set reproduce-nftables = "true" in [runsc_config] ` +
			"of the node's runsc.toml, which needs iptables-legacy and iptables-nft on the node, and delete the pod"
	case Kata:
		return "no setting helps: " + otherwise
	case Other:
	}
	return "check whether its runtime can take over the rules; otherwise " + otherwise
}

// Copies reports whether the sandbox may copy the namespace's rules when it starts, so that another start can help.
func (s Sandbox) Copies() bool { return s != Kata }
