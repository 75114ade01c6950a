package sidecar

import (
	"path"
	"slices"
	"strings"
)

// Sandbox is the kind of a container runtime whose pods have a network stack of their own, "" for the node's kernel. It is told by the
// RuntimeClass: its name is in the pod, while its handler would cost a right and a request, and no CNI plugin gets it.
type Sandbox string

// The kinds. Other is a runtime of a name that the configuration has.
const (
	GVisor Sandbox = "gVisor"
	Kata   Sandbox = "Kata Containers"
	Other  Sandbox = "the sandbox"
)

// kinds are the names that RuntimeClasses and handlers of a kind begin with.
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

// Sentence says what becomes of the rules in the network namespace, as a whole sentence without its end.
func (s Sandbox) Sentence() string {
	switch s {
	case GVisor:
		return "gVisor has a network stack of its own, which gets a copy of the namespace's nat rules for IPv4 when the sandbox starts " +
			"if runsc has reproduce-nftables, and none otherwise; rules that are written later have no effect"
	case Kata:
		return "Kata Containers leads packets past the rules of the network namespace to the kernel of a virtual machine"
	case Other:
	}
	return "it has a network stack of its own, for which the rules in the network namespace may not count"
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
	return "see whether its runtime can take the rules over; otherwise " + otherwise
}

// Copies reports whether rules that are in the namespace when the sandbox starts can count in it, so that another start can help.
func (s Sandbox) Copies() bool { return s != Kata }
