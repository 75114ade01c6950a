package sandbox

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// hostNamespace returns the path of the node's own namespace: process 1's, or the kernel threads' if process 1 is not
// readable. The first kernel thread is process 2, but only in the node's PID namespace.
func (w *sweep) hostNamespace() (string, error) {
	if w.view.Proc == "" {
		return "", fmt.Errorf("there is no procfs of the node at %q", w.places.Proc)
	}
	first := filepath.Join(w.view.Proc, "1/ns/net")
	_, err := netns.InodeOf(first)
	if err == nil {
		return first, nil
	}
	stat, statErr := os.ReadFile(filepath.Join(w.view.Proc, "2/stat"))
	fields := strings.Fields(string(stat)) // PID (NAME) STATE PPID
	const name, parent = 1, 3
	if statErr != nil || len(fields) <= parent || fields[name] != "(kthreadd)" || fields[parent] != "0" {
		return "", err
	}
	return filepath.Join(w.view.Proc, "2/ns/net"), nil
}

// inhabited is the path of the first process in a namespace that may be a searched pod's.
type inhabited struct {
	inode netns.Inode
	path  string
}

// searchProcesses searches the namespaces of the node's processes. It skips those of other pods, however many there are.
func (w *sweep) searchProcesses(ctx context.Context) {
	w.walkProcesses(ctx)
	for _, in := range w.inhabited {
		if ctx.Err() != nil {
			return
		}
		owners := w.owners[in.inode]
		if len(owners) == 0 || slices.ContainsFunc(owners, func(o owner) bool { return w.searchesFor(o.uid) }) {
			w.offerAny(in.path, FromProc, w.walked)
		}
	}
	w.searchedBy(*w.walked)
}

// walkProcesses finds the processes in namespaces that are unknown or may be a pod's, and their pods. It runs once per sweep.
func (w *sweep) walkProcesses(ctx context.Context) {
	if w.walked != nil {
		return
	}
	w.walked, w.owners = &Searched{Source: FromProc, Place: w.view.Proc}, map[netns.Inode][]owner{}
	names, err := readNames(w.view.Proc)
	w.walked.Err = err
	others, seen := 0, map[netns.Inode]bool{}
	for _, name := range names {
		if _, notOne := strconv.ParseUint(name, 10, 32); notOne != nil || ctx.Err() != nil {
			continue
		}
		w.walked.Entries++
		path := w.view.Proc + "/" + name + "/ns/net"
		inode, err := netns.InodeOf(path)
		known := w.spaces[inode]
		switch {
		case err != nil && !gone(err):
			w.walked.fail(err)
		case err != nil, known != nil && !known.isOpen():
		case w.isForeign(name, inode):
			others++
		case !seen[inode]:
			seen[inode] = true
			w.inhabited = append(w.inhabited, inhabited{inode, path})
		}
	}
	if others > 0 {
		w.walked.Notes = append(w.walked.Notes, fmt.Sprintf("%d of other pods", others))
	}
}

// isForeign records the pod of a process in a namespace, and reports whether the pod is not searched.
func (w *sweep) isForeign(process string, inode netns.Inode) bool {
	uid := podOfProcess(filepath.Join(w.view.Proc, process))
	if uid == "" || uid == w.self {
		return false
	}
	if !slices.ContainsFunc(w.owners[inode], func(o owner) bool { return o.uid == uid }) {
		w.owners[inode] = append(w.owners[inode], owner{uid, process})
	}
	return !w.searchesFor(uid)
}

// began returns when a process began, in ticks since the node's start: field 22 of proc_pid_stat(5).
func (w *sweep) began(process string) (ticks uint64, known bool) {
	text, err := os.ReadFile(filepath.Join(w.view.Proc, process, "stat"))     //nolint:gosec // below the procfs
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // the name can have spaces and parentheses
	const start = 22 - 3
	if err != nil || len(fields) <= start {
		return 0, false
	}
	ticks, err = strconv.ParseUint(fields[start], 10, 64)
	return ticks, err == nil
}

// searchesFor reports whether a pod is searched and not found yet.
func (w *sweep) searchesFor(uid string) bool {
	return slices.ContainsFunc(w.searches, func(s *search) bool { return s.pod.UID == uid })
}
