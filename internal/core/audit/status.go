package audit

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Outside is the state of a pod that the plugin leaves alone by its own decision. It is listed only on request.
const Outside State = "outside"

// Status is the node agent's result about a pod's redirection.
type Status struct {
	// Node is the pod's node. In a list only kubectl istio-cni sets it.
	Node string `json:"node,omitempty"`
	// Namespace is the pod's namespace.
	Namespace string `json:"namespace"`
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// UID is the pod's UID.
	UID string `json:"uid"`

	// State is the most serious state of the pod: docs/errors.md has the states.
	State State `json:"state"`
	// Sentence explains the state and continues "the pod …".
	Sentence string `json:"sentence"`
	// Remedy is an instruction that ends the state. A captured pod has none.
	Remedy string `json:"remedy,omitempty"`
	// Since is the start of the state.
	Since time.Time `json:"since,omitzero"`
	// Checked is the time of the last inspection.
	Checked time.Time `json:"checked,omitzero"`
	// Backend is what wrote the rules: one per family, separated by commas, if they differ.
	Backend string `json:"backend,omitempty"`
	// Problems are the faults of the redirection, each with its own state.
	Problems []Problem `json:"problems,omitempty"`
	// Exceptions are settings of the pod by which traffic bypasses the proxy.
	Exceptions []Exception `json:"exceptions,omitempty"`
	// LeftOut is set if a check of all pods did not reach the pod in its time: the result is an older one.
	LeftOut bool `json:"leftOut,omitempty"`
}

// Why returns one line about the state: its first problem and the number of further ones, or the sentence.
func (s Status) Why() string {
	switch len(s.Problems) {
	case 0:
		if s.State == Captured && len(s.Exceptions) > 0 {
			return fmt.Sprintf("exceptions by its own settings: %d", len(s.Exceptions))
		}
		return s.Sentence
	case 1:
		return s.Problems[0].Detail
	}
	return fmt.Sprintf("%s (and %d more)", s.Problems[0].Detail, len(s.Problems)-1)
}

// Faulty reports whether the pod is not redirected as wanted.
func (s Status) Faulty() bool { return s.State != Captured && s.State != Outside }

// Sort orders the pods by Compare.
func Sort(all []Status) { slices.SortFunc(all, Compare) }

// Compare orders pods: the most serious state first, then by name.
func Compare(a, b Status) int {
	rank := func(s State) int {
		if at := severity(s); at >= 0 {
			return at
		}
		return len(rows)
	}
	return cmp.Or(rank(a.State)-rank(b.State), strings.Compare(a.Node, b.Node), strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Pod, b.Pod))
}
