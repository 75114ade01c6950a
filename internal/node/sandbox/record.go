package sandbox

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// dropForeign drops the candidates that a record assigns to other pods. Records are libcni's cache and the cgroups of the
// processes in a candidate. A candidate that the cache assigns to a pod's UID needs no other record.
func (w *sweep) dropForeign(ctx context.Context) {
	doubtful := func(c candidate) bool { return c.source != FromCache }
	if !slices.ContainsFunc(w.searches, func(s *search) bool { return slices.ContainsFunc(s.candidates, doubtful) }) {
		return
	}
	w.walkProcesses(ctx)
	if w.places.Cache != "" { // a missing cache has no record
		_, _ = cnicache.Walk(w.view.Existing(w.places.Cache)[0], nil, func(_ string, data []byte, err error) error {
			if err == nil {
				w.readOwner(data)
			}
			return ctx.Err()
		})
	}
	for _, s := range w.searches {
		s.drop(func(c candidate) bool {
			record := s.record(c.space)
			if record == "" || s.owns(c) {
				return false
			}
			s.claim = record
			s.searched = append(s.searched, Searched{Source: c.source, Place: c.path, Entries: 1, Notes: []string{"left out: " + record}})
			return true
		})
	}
}

// readOwner records the candidates that an entry of the cache assigns to another pod. If the entry's path is below /proc/PID,
// another process may have the number by now, so the entry's result must also have one of the searched pod's addresses.
func (w *sweep) readOwner(data []byte) {
	entry, ok := cnicache.Parse(data)
	if !ok || entry.UID == "" || entry.NetNS == "" {
		return
	}
	for _, path := range w.view.Candidates(entry.NetNS) {
		inode, err := netns.InodeOf(path)
		if err != nil || w.spaces[inode] == nil || w.spaces[inode].refs == 0 {
			continue
		}
		for _, s := range w.searches {
			if sp := w.spaces[inode]; entry.UID != s.pod.UID && s.candidate(sp) &&
				(!strings.HasPrefix(entry.NetNS, "/proc/") || s.mentioned(data)) {
				s.foreign[sp] = fmt.Sprintf("libcni's cache assigns it to pod %s/%s", entry.Namespace, entry.Name)
			}
		}
	}
}

// mentioned reports whether a cache's entry has one of the pod's addresses.
func (s *search) mentioned(data []byte) bool {
	return slices.ContainsFunc(s.pod.Addresses, func(a netip.Addr) bool { return bytes.Contains(data, []byte(`"`+a.String()+`/`)) })
}

// record returns the record that assigns a namespace to another pod, or "".
func (s *search) record(sp *space) string {
	if s.foreign[sp] != "" {
		return s.foreign[sp]
	}
	for _, o := range s.owners[sp.Inode()] {
		if o.uid != s.pod.UID {
			return fmt.Sprintf("process %s in it is of the pod with UID %s", o.process, o.uid)
		}
	}
	return ""
}

// owns reports whether a record assigns a candidate to the pod.
func (s *search) owns(c candidate) bool {
	return c.source == FromCache || slices.ContainsFunc(s.owners[c.Inode()], func(o owner) bool { return o.uid == s.pod.UID })
}

// podOfProcess returns the UID of the pod whose cgroup contains a process (proc_pid_cgroup(5)), or "". The kernel bounds the text
// to one path for each hierarchy.
func podOfProcess(process string) string {
	text, err := os.ReadFile(filepath.Join(process, "cgroup")) //nolint:gosec // below the procfs
	if err != nil {
		return ""
	}
	return podOfCgroups(string(text))
}

// podOfCgroups reads lines like "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID>.slice/…" (systemd
// driver) or "0::/kubepods/burstable/pod<UID>/…" (cgroupfs driver). The topmost element with a pod decides because a
// container can name the cgroups below its own. If lines name different pods, the result is "".
func podOfCgroups(text string) string {
	found := ""
	for line := range strings.Lines(text) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), "/")
		for part := range strings.SplitSeq(path, "/") {
			uid := podOfCgroup(part)
			if uid == "" {
				continue
			}
			if found != "" && uid != found {
				return ""
			}
			found = uid
			break
		}
	}
	return found
}

// podOfCgroup returns the pod of one path element. A static pod has a hash there, which is not the API object's UID.
func podOfCgroup(part string) string {
	uid, isPod := strings.CutPrefix(part, "pod")
	if slice, bySystemd := strings.CutSuffix(part, ".slice"); bySystemd {
		_, uid, isPod = strings.Cut(slice, "-pod")
		uid = strings.ReplaceAll(uid, "_", "-")
	}
	const length = len("00000000-0000-0000-0000-000000000000")
	if !isPod || len(uid) != length || strings.Trim(uid, "0123456789abcdef-") != "" {
		return ""
	}
	return uid
}
