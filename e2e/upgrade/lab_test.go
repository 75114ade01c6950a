package upgrade

import (
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// pods creates injected pods and waits until they are ready.
func (s *scenario) pods(names ...string) {
	s.Helper()
	for _, name := range names {
		s.Pod(name, lab.Injected())
	}
	s.UntilReady(names...)
}

// files returns the file names in a directory of the node.
func (s *scenario) files(dir string) []string {
	s.Helper()
	return strings.Fields(s.OnNode("ls", "-A", dir))
}

// rules returns iptables-save of a pod, without counters.
func (s *scenario) rules(name string) (all string) {
	s.Helper()
	id := strings.TrimPrefix(s.Get(lab.App, name).Status.ContainerStatuses[0].ContainerID, "containerd://")
	for line := range strings.Lines(s.OnNode("ctr", "--namespace", "k8s.io", "task", "ls")) {
		task := strings.Fields(line)
		if task[0] != id {
			continue
		}
		for line := range strings.Lines(s.OnNode("nsenter", "--net=/proc/"+task[1]+"/ns/net", "--", "iptables-save")) {
			if line[0] != '#' {
				all += strings.TrimSpace(strings.Split(line, " [")[0]) + "\n"
			}
		}
	}
	return all
}

// remove deletes pods, waits until they are gone, and checks that their addresses are released.
func (s *scenario) remove(names ...string) {
	s.Helper()
	began := time.Now()
	var addresses []string
	for _, name := range names {
		addresses = append(addresses, s.Get(lab.App, name).Status.PodIP)
	}
	s.Remove(names...)
	s.Until("their addresses to be free", func() bool {
		taken := s.files("/run/cni-ipam/e2e")
		return !slices.ContainsFunc(addresses, func(a string) bool { return slices.Contains(taken, a) })
	})
	s.Step("%q are gone after %s", names, time.Since(began).Round(100*time.Millisecond))
}

// restarts returns the restart count of a pod's first init container, the validation.
func (s *scenario) restarts(name string) int32 {
	s.Helper()
	return s.Get(lab.App, name).Status.InitContainerStatuses[0].RestartCount
}
