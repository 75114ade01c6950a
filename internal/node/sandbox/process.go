package sandbox

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// Process is the identity of some threads of a process of a pod: most processes have one.
type Process struct {
	PID int
	// Thread is the id of the first of these threads, 0 for the main one.
	Thread int
	// Pod is the pod's UID, Container the container's ID as in status.containerStatuses without the runtime's prefix, "" if
	// the cgroup has none.
	Pod, Container string
	// UID and GID are the file system ids, by which the kernel's owner match compares the sockets that a thread opens
	// (xt_owner), as the user namespace of this process has them. See [IDs].
	UID, GID uint32

	dir string
}

// Processes calls each for every identity of every process of a pod on the node. A process that ends meanwhile is left out.
func (p Places) Processes(ctx context.Context, each func(Process)) error {
	view := hostpath.Detect(p.Roots, p.Proc)
	if view.Proc == "" {
		return fmt.Errorf("%w: there is no procfs of the node at %q", ErrNoHost, p.Proc)
	}
	names, err := readNames(view.Proc)
	for _, name := range names {
		pid, notOne := strconv.Atoi(name)
		if notOne != nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		readProcess(ctx, Process{PID: pid, dir: filepath.Join(view.Proc, name)}, each)
	}
	return err
}

// readProcess reads the identities of a process if it is a pod's.
func readProcess(ctx context.Context, p Process, each func(Process)) {
	text, err := os.ReadFile(p.dir + "/cgroup")
	if err != nil {
		return
	}
	if p.Pod = podOfCgroups(string(text)); p.Pod == "" {
		return
	}
	p.Container = containerOfCgroups(string(text))
	threads, ok := p.readStatus(p.dir)
	if !ok {
		return
	}
	each(p)
	if threads < 2 {
		return
	}
	names, _ := readNames(p.dir + "/task") // the process may have ended
	for seen := map[[2]uint32]bool{{p.UID, p.GID}: true}; len(names) > 0 && ctx.Err() == nil; names = names[1:] {
		thread := p
		thread.Thread, _ = strconv.Atoi(names[0])
		if _, ok = thread.readStatus(filepath.Join(p.dir, "task", names[0])); ok && !seen[[2]uint32{thread.UID, thread.GID}] {
			seen[[2]uint32{thread.UID, thread.GID}] = true
			each(thread)
		}
	}
}

func readNames(path string) ([]string, error) {
	dir, err := os.Open(path) //nolint:gosec // below the procfs
	if err != nil {
		return nil, err
	}
	defer dir.Close() //nolint:errcheck // only read
	return dir.Readdirnames(-1)
}

// containerOfCgroups returns the ID in the part of a path that follows the pod's: "cri-containerd-<ID>.scope", "crio-<ID>.scope"
// or, with cgroupfs, "<ID>".
func containerOfCgroups(text string) string {
	const length = 64
	for line := range strings.Lines(text) {
		below := false
		for part := range strings.SplitSeq(strings.TrimSpace(line), "/") {
			if podOfCgroup(part) != "" {
				below = true
				continue
			}
			id := strings.TrimSuffix(part, ".scope")
			if len(id) < length || !below {
				continue
			}
			if id = id[len(id)-length:]; strings.Trim(id, "0123456789abcdef") == "" {
				return id
			}
		}
	}
	return ""
}

// readStatus reads the file system ids, the last values of Uid and Gid in proc_pid_status(5), and the number of threads.
func (p *Process) readStatus(dir string) (threads uint32, ok bool) {
	status, err := os.ReadFile(dir + "/status") //nolint:gosec // below the procfs
	if err != nil {
		return 0, false
	}
	values := map[string]*uint32{"Uid": &p.UID, "Gid": &p.GID, "Threads": &threads}
	for line := range strings.Lines(string(status)) {
		name, text, _ := strings.Cut(line, ":")
		value := values[name]
		if value == nil {
			continue
		}
		text = strings.TrimSpace(text)
		n, err := strconv.ParseUint(text[strings.LastIndexByte(text, '\t')+1:], 10, 32)
		if err != nil {
			return 0, false
		}
		*value = uint32(n)
		delete(values, name)
	}
	return threads, len(values) == 0
}

// IDs converts user and group ids of this process's user namespace to those of another one. The zero value converts none.
type IDs struct{ uids, gids []extent }

// extent is a line of a map of user_namespaces(7).
type extent struct{ inside, outside, count uint64 }

// Overflow is the id of a user or group that a user namespace does not have (/proc/sys/kernel/overflowuid).
const Overflow = 65534

// UID converts the id of a user.
func (i IDs) UID(id uint32) uint32 { return inside(i.uids, id) }

// GID converts the id of a group.
func (i IDs) GID(id uint32) uint32 { return inside(i.gids, id) }

// IDsOf finds the ids of a user namespace by the processes of a pod, one of which has to be in it.
func IDsOf(users netns.Inode, processes []Process) (IDs, bool) {
	for _, p := range processes {
		in := func() bool {
			inode, err := netns.InodeOf(p.dir + "/ns/user")
			return err == nil && inode == users
		}
		if !in() {
			continue
		}
		ids := IDs{readMap(p.dir + "/uid_map"), readMap(p.dir + "/gid_map")}
		if len(ids.uids) > 0 && len(ids.gids) > 0 && in() { // else it has ended, and may be another process by now
			return ids, true
		}
	}
	return IDs{}, false
}

// readMap reads a map of user_namespaces(7), nil if it cannot be read.
func readMap(path string) (all []extent) {
	text, err := os.ReadFile(path) //nolint:gosec // below the procfs
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		var e extent
		if _, err = fmt.Sscan(line, &e.inside, &e.outside, &e.count); err != nil {
			return nil
		}
		all = append(all, e)
	}
	return all
}

func inside(ids []extent, id uint32) uint32 {
	if ids == nil {
		return id
	}
	for _, e := range ids {
		if n := uint64(id); n >= e.outside && n-e.outside < e.count {
			return uint32(e.inside + n - e.outside) //nolint:gosec // the kernel's ids have 32 bits
		}
	}
	return Overflow
}
