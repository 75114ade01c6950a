// Package repair decides what to do about a pod that may run without redirection.
//
// It promises to find the pods of the reference's predicate (race repair of Istio's CNI node agent, 1.4 to today) and the
// pods that the reference misses (a first failure before a restart, a pod that is never restarted, a pod without rules before
// its validation), and to leave alone every pod that the plugin leaves alone. Each finding has a reason of a closed set.
//
// It enters no namespace and sends no request: the caller passes the result of an inspection.
//
// Start reading at Classify, which needs the pod object alone; ApplyObservation adds the rules of its namespace; Modes has
// the precedence of the actions.
package repair

import (
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Names that the reference uses (compat: race repair).
const (
	// NotRedirectedCode is the exit code of the validation when the traffic is not redirected.
	NotRedirectedCode = 126
	// BrokenLabel and BrokenLabelValue mark a broken pod in mode label.
	BrokenLabel      = "cni.istio.io/uninitialized"
	BrokenLabelValue = "true"
)

// Mode is an action on a broken pod.
type Mode string

// Modes. The values are the reference's metric labels; Report applies if no other mode is enabled.
const (
	InPlace Mode = "repair"
	Delete  Mode = "delete"
	Label   Mode = "label"
	Report  Mode = "report"
)

// Switches has the enabled modes.
type Switches struct{ InPlace, Delete, Label bool }

// Modes lists the enabled modes in the order of precedence, or Report without any.
func (s Switches) Modes() []Mode {
	var modes []Mode
	for _, m := range []struct {
		on   bool
		mode Mode
	}{{s.InPlace, InPlace}, {s.Delete, Delete}, {s.Label, Label}} {
		if m.on {
			modes = append(modes, m.mode)
		}
	}
	if len(modes) == 0 {
		return []Mode{Report}
	}
	return modes
}

// Mode returns the mode for a finding: the first enabled one that can help, or Report.
func (s Switches) Mode(f Finding) Mode {
	for _, m := range s.Modes() {
		if m == InPlace && !f.Repairable || m == Delete && !f.Decision.Sandbox.Copies() {
			continue
		}
		return m
	}
	return Report
}

// Predicate selects broken pods by the status of their init containers. Empty and zero fields match anything.
type Predicate struct {
	// Annotation is a key that a pod must have.
	Annotation string
	// Container is the init container's name, Message its termination message, ExitCode its exit code.
	Container, Message string
	ExitCode           int
}

// Pod is the input of the decision about a pod.
type Pod struct {
	Facts sidecar.Facts
	// Addressed is set if the kubelet knows an address of the pod: its sandbox exists, and every plugin of the chain has run.
	Addressed bool
	// Deleting is set if the pod has a deletion timestamp.
	Deleting bool
	// Ended is set if the pod has ended (phase Succeeded or Failed), NeverRestarts if the kubelet restarts none of its
	// containers (restartPolicy Never).
	Ended, NeverRestarts bool
	// Init has the init containers, including native sidecars, in order; Containers has the others.
	Init, Containers []Container
}

// Container is a container with its states.
type Container struct {
	// ID is the runtime's ID without its prefix, empty if the container has not been created.
	Name, ID string
	// State is the current state, Last the state before the last restart.
	State, Last State
}

// State is one state of a container. The zero value is an unknown state.
type State struct {
	// Running and Terminated distinguish the states; a container that waits has neither.
	Running, Terminated bool
	Reason, Message     string
	ExitCode            int
	Began, Finished     time.Time
}

// succeeded reports whether an init container has succeeded by the reference's definition.
func (s State) succeeded() bool {
	return s.Terminated && (s.Reason == "Completed" || s.ExitCode == 0)
}

// matches reports whether a container has terminated with the predicate's message and exit code.
func (p Predicate) matches(s State) bool {
	message := strings.TrimSpace(p.Message)
	return s.Terminated && (message == "" || message == strings.TrimSpace(s.Message)) && (p.ExitCode == 0 || p.ExitCode == s.ExitCode)
}

// failed finds the latest failure that the predicate describes. The reference looks only at the state before the last
// restart, so it misses a first failure, and every failure of a pod that is not restarted.
func (p Predicate) failed(init []Container) (State, bool) {
	for _, c := range init {
		if p.Container != "" && c.Name != p.Container || c.State.succeeded() {
			continue
		}
		for _, s := range []State{c.State, c.Last} {
			if p.matches(s) {
				return s, true
			}
		}
	}
	return State{}, false
}
