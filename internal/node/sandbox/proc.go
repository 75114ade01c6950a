package sandbox

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// hostNamespace returns the path of the node's own namespace: process 1's, or the kernel threads' if process 1 is not
// readable. The first kernel thread is process 2, but only in the node's PID namespace.
func (s *search) hostNamespace() (string, error) {
	if s.view.Proc == "" {
		return "", fmt.Errorf("there is no procfs of the node at %q", s.places.Proc)
	}
	first := filepath.Join(s.view.Proc, "1/ns/net")
	_, err := netns.InodeOf(first)
	if err == nil {
		return first, nil
	}
	stat, statErr := os.ReadFile(filepath.Join(s.view.Proc, "2/stat"))
	fields := strings.Fields(string(stat)) // PID (NAME) STATE PPID
	const name, parent = 1, 3
	if statErr != nil || len(fields) <= parent || fields[name] != "(kthreadd)" || fields[parent] != "0" {
		return "", err
	}
	return filepath.Join(s.view.Proc, "2/ns/net"), nil
}

// searchProcesses searches the namespaces of the node's processes. It skips processes of other pods, however many there
// are.
func (s *search) searchProcesses(ctx context.Context) error {
	s.walkProcesses(ctx)
	for _, path := range s.processes {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if inode, err := netns.InodeOf(path); err != nil || s.owned[inode] || s.foreign[inode] == "" {
			s.checkAny(path, FromProc, s.walked)
		}
	}
	s.searched = append(s.searched, *s.walked)
	return ctx.Err()
}

// walkProcesses finds the processes in a namespace that is unknown or may be the pod's, and their pods. It runs once per search.
func (s *search) walkProcesses(ctx context.Context) {
	if s.walked != nil {
		return
	}
	s.walked = &Searched{Source: FromProc, Place: s.view.Proc}
	names, err := readNames(s.view.Proc)
	s.walked.Err = err
	others, seen := 0, map[netns.Inode]bool{}
	for _, name := range names {
		if _, notOne := strconv.ParseUint(name, 10, 32); notOne != nil || ctx.Err() != nil {
			continue
		}
		s.walked.Entries++
		process := s.view.Proc + "/" + name
		inode, err := netns.InodeOf(process + "/ns/net")
		result, known := s.verdicts[inode]
		if err == nil && known && result != matching {
			continue
		}
		if err == nil && s.isForeign(process, inode) {
			others++
		} else if !known && !seen[inode] {
			seen[inode] = err == nil
			s.processes = append(s.processes, process+"/ns/net")
		}
	}
	if others > 0 {
		s.walked.Notes = append(s.walked.Notes, fmt.Sprintf("%d of other pods", others))
	}
}

// isForeign records the pod of a process in a namespace, and reports whether it is another pod.
func (s *search) isForeign(process string, inode netns.Inode) bool {
	switch uid := podOfProcess(process); uid {
	case "", s.self:
		return false
	case s.pod.UID:
		s.owned[inode] = true
		return false
	default:
		s.foreign[inode] = fmt.Sprintf("process %s in it is of the pod with UID %s", filepath.Base(process), uid)
		return true
	}
}
