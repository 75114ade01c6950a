package podcache

import (
	"strings"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// maxCondition bounds the texts of the audit's condition in bytes, which the audit itself does not exceed: another client may have
// written it. A condition that is dropped here is written again.
const maxCondition = 2 << 10

// Trim returns a transform of pods for the cache: it drops the fields that no decision of the plugin or of race repair reads,
// as the cache may hold thousands of pods. Keep are the keys of further annotations and labels to keep; message is the
// termination message of an init container that race repair matches: other messages, of up to 4 KiB, are dropped.
func Trim(keep []string, message string) func(*kube.Pod) {
	message = strings.TrimSpace(message)
	return func(p *kube.Pod) {
		p.Facts = p.Facts.Trim(keep...)
		if len(p.Verified.Reason)+len(p.Verified.Message) > maxCondition {
			p.Verified = kube.Condition{}
		}
		for i := range p.Init {
			trimMessage(&p.Init[i].State, message)
			trimMessage(&p.Init[i].Last, message)
		}
		for i, c := range p.Containers {
			p.Containers[i] = trimContainer(c)
		}
		for i, c := range p.Ephemeral {
			p.Ephemeral[i] = repair.Container{Name: c.Name, ID: c.ID, State: repair.State{Running: c.State.Running}}
		}
	}
}

// trimMessage drops the message of a state unless it is the one to keep.
func trimMessage(state *repair.State, message string) {
	if strings.TrimSpace(state.Message) != message {
		state.Message = ""
	}
}

// trimContainer returns what is kept of a container that is neither an init container nor ephemeral.
func trimContainer(c repair.Container) repair.Container {
	kept := repair.Container{
		Name: c.Name, ID: c.ID,
		State: repair.State{Running: c.State.Running, Terminated: c.State.Terminated, Began: c.State.Began, Finished: c.State.Finished},
		Last:  repair.State{Running: c.Last.Running, Terminated: c.Last.Terminated, Finished: c.Last.Finished},
	}
	if c.Name == sidecar.ProxyContainer { // by which the audit knows that a proxy is just starting
		kept.State.Reason = c.State.Reason
	}
	return kept
}
