package podns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// disown drops the candidates that a record gives to other pods: libcni's cache, or the cgroups of the processes that are
// in them. What the cache gives to this pod by its UID needs no further record.
func (s *search) disown(ctx context.Context) error {
	byAddress := false
	for _, c := range s.found {
		if c.source == FromCache {
			s.own[c.Inode()] = true
		}
		byAddress = byAddress || c.source != FromCache
	}
	if !byAddress {
		return nil
	}
	if err := s.occupants(ctx); err != nil {
		return err
	}
	if err := s.owners(ctx); err != nil {
		return err
	}
	s.drop(func(c candidate) bool {
		other, isOthers := s.others[c.Inode()]
		if isOthers = isOthers && !s.own[c.Inode()]; isOthers {
			s.claimed = other
			s.looked = append(s.looked, Look{Source: c.source, Place: c.place, Entries: 1, Notes: []string{"left out: " + other}})
		}
		return isOthers
	})
	return nil
}

// occupants finds out of which pods the processes in the candidates are.
func (s *search) occupants(ctx context.Context) error {
	_ = s.eachProcess(ctx, func(process string) { // what cannot be read says nothing
		inode, err := netns.InodeOf(process + "/ns/net")
		if err == nil && s.seen[inode] == matching {
			s.occupied(process, inode)
		}
	})
	return ctx.Err()
}

// occupied notes of which pod a process in a namespace is. It reports whether it is of another one.
func (s *search) occupied(process string, inode netns.Inode) (other bool) {
	switch uid := podOfProcess(process); uid {
	case "", s.self:
		return false
	case s.pod.UID:
		s.own[inode] = true
		return false
	default:
		s.others[inode] = fmt.Sprintf("process %s in it is of the pod with UID %s", filepath.Base(process), uid)
		return true
	}
}

// owners finds out of which pods the candidates are by libcni's cache. Entries that cannot be read say nothing, nor does a
// cache that is not there.
func (s *search) owners(ctx context.Context) error {
	_, _ = cnicache.Walk(s.cacheDir(), func(_ string, data []byte, err error) error {
		if err == nil {
			s.owner(data)
		}
		return ctx.Err()
	})
	return ctx.Err()
}

// owner notes the candidate that an entry of the cache gives to another pod. One that names a namespace by the number of a
// process, which another has by now, counts only if it mentions an address.
func (s *search) owner(entry []byte) {
	box, ok := cnicache.Parse(entry)
	switch {
	case !ok, box.UID == "", box.UID == s.pod.UID, box.NetNS == "":
		return
	case strings.HasPrefix(box.NetNS, "/proc/") && !s.mentioned(entry):
		return
	}
	for _, path := range s.view.Candidates(box.NetNS) {
		if inode, err := netns.InodeOf(path); err == nil && s.seen[inode] == matching {
			s.others[inode] = fmt.Sprintf("libcni's cache has it as that of pod %s/%s", box.Namespace, box.Name)
		}
	}
}

// mentioned tells whether an entry's result has one of the pod's addresses.
func (s *search) mentioned(entry []byte) bool {
	for _, a := range s.pod.Addresses {
		if strings.Contains(string(entry), `"`+a.String()+`/`) {
			return true
		}
	}
	return false
}

// maxCgroup bounds the cgroups of a process, which are a path for each hierarchy.
const maxCgroup = 64 << 10

// podOfProcess is the UID of the pod that the kubelet has put a process into (proc_pid_cgroup(5)), "" for none.
func podOfProcess(process string) string {
	file, err := os.Open(filepath.Join(process, "cgroup")) //nolint:gosec // below the procfs
	if err != nil {
		return ""
	}
	defer file.Close() //nolint:errcheck // only read
	text, err := io.ReadAll(io.LimitReader(file, maxCgroup))
	if err != nil && !errors.Is(err, io.EOF) {
		return ""
	}
	return podOfCgroups(string(text))
}

// podOfCgroups reads lines like "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID>.slice/…", with
// systemd's driver, or "0::/kubepods/burstable/pod<UID>/…", with that of cgroupfs. The topmost part of a path decides: a
// container with a cgroup of its own can name those below as it likes. Lines that name different pods say nothing.
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

// podOfCgroup is the pod of one part of a path. Static pods have a hash there, by which nobody knows them.
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
