package podcache

import (
	"strings"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Trim returns the transform of pods before they are kept: it drops the parts that no decision of the plugin or of race
// repair reads, as thousands of pods may have to be kept. Keep are keys of annotations and labels that are read besides;
// message is the termination message of an init container that race repair looks for, of which there may be 4 KiB.
func Trim(keep []string, message string) func(*kube.Pod) {
	message = strings.TrimSpace(message)
	return func(p *kube.Pod) {
		p.Facts = p.Facts.Trim(keep...)
		for i := range p.Init {
			for _, state := range []*repair.State{&p.Init[i].State, &p.Init[i].Last} {
				if strings.TrimSpace(state.Message) != message {
					state.Message = ""
				}
			}
		}
		for i, c := range p.Containers {
			p.Containers[i] = repair.Container{
				State: repair.State{Running: c.State.Running, Terminated: c.State.Terminated},
				Last:  repair.State{Running: c.Last.Running, Terminated: c.Last.Terminated},
			}
		}
	}
}
