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
	// Node is set by commands for several nodes.
	Node      string `json:"node,omitempty"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`

	State State `json:"state"`
	// Sentence explains the state and continues "the pod …". Remedy is an instruction.
	Sentence string `json:"sentence"`
	Remedy   string `json:"remedy,omitempty"`
	// Since is the start of the state, Checked the time of the last inspection.
	Since   time.Time `json:"since,omitzero"`
	Checked time.Time `json:"checked,omitzero"`
	// Backend is the mechanism that wrote the rules: one per family, separated by commas, if they differ.
	Backend    string      `json:"backend,omitempty"`
	Problems   []Problem   `json:"problems,omitempty"`
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
