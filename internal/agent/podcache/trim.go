package podcache

import (
	"strings"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// maxCondition bounds the texts of the audit's condition, in bytes. The audit's own texts are shorter, but another client may have
// written the condition. The audit writes a dropped condition again.
const maxCondition = 2 << 10

// Trim returns a transform of pods for the cache, which may hold thousands. It drops the fields that no decision of the
// plugin or of race repair reads. keep has the keys of further annotations and labels to keep; message is the init
// container's termination message that race repair matches. Other messages, of up to 4 KiB, are dropped.
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

// trimContainer returns the kept fields of a regular container.
func trimContainer(c repair.Container) repair.Container {
	kept := repair.Container{
		Name: c.Name, ID: c.ID,
		State: repair.State{Running: c.State.Running, Terminated: c.State.Terminated, Began: c.State.Began, Finished: c.State.Finished},
		Last:  repair.State{Running: c.Last.Running, Terminated: c.Last.Terminated, Finished: c.Last.Finished},
	}
	if c.Name == sidecar.ProxyContainer { // shows the audit that a proxy is just starting
		kept.State.Reason = c.State.Reason
	}
	return kept
}
