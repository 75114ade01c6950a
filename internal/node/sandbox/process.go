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

// Process is an identity of a pod's process: some threads with the same IDs. Most processes have one identity.
type Process struct {
	PID int
	// Thread is the ID of the first of these threads, or 0 for the main thread.
	Thread int
	// Pod is the pod's UID. Container is the container's ID in status.containerStatuses without the runtime's prefix, or "" if
	// the cgroup does not show it.
	Pod, Container string
	// UID and GID are the file system IDs in the user namespace of this process. The kernel's owner match (xt_owner) compares
	// them for the sockets that a thread opens. See [IDs].
	UID, GID uint32

	dir string
}

// Processes returns every identity of every pod's process on the node, by the pod's UID. It skips a process that ends during the call.
// After an error the list may be incomplete.
func (p Places) Processes(ctx context.Context) (byPod map[string][]Process, err error) {
	byPod = map[string][]Process{}
	view := hostpath.Detect(p.Roots, p.Proc)
	if view.Proc == "" {
		return byPod, fmt.Errorf("%w: there is no procfs of the node at %q", ErrNoHost, p.Proc)
	}
	names, err := readNames(view.Proc)
	for _, name := range names {
		pid, notOne := strconv.Atoi(name)
		if notOne != nil {
			continue
		}
		if ctx.Err() != nil {
			return byPod, ctx.Err()
		}
		readProcess(ctx, Process{PID: pid, dir: filepath.Join(view.Proc, name)}, func(p Process) { byPod[p.Pod] = append(byPod[p.Pod], p) })
	}
	return byPod, err
}

// readProcess reads the identities of a process if the process belongs to a pod.
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

// containerOfCgroups returns the ID in the path element after the pod's: "cri-containerd-<ID>.scope", "crio-<ID>.scope" or,
// with cgroupfs, "<ID>".
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

// readStatus reads the file system IDs, the last values of Uid and Gid in proc_pid_status(5), and the number of threads.
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

// IDs converts user and group IDs of this process's user namespace to IDs of another one. The zero value converts none.
type IDs struct{ uids, gids []extent }

// extent is a line of a map of user_namespaces(7).
type extent struct{ inside, outside, count uint64 }

// Overflow is the ID for a user or group without a mapping in a user namespace (/proc/sys/kernel/overflowuid).
const Overflow = 65534

// UID converts a user ID.
func (i IDs) UID(id uint32) uint32 { return inside(i.uids, id) }

// GID converts a group ID.
func (i IDs) GID(id uint32) uint32 { return inside(i.gids, id) }

// IDsOf returns the IDs of a user namespace. One of the pod's processes must be in the namespace.
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
		if len(ids.uids) > 0 && len(ids.gids) > 0 && in() { // else the process has ended, and another may have its number
			return ids, true
		}
	}
	return IDs{}, false
}

// readMap reads an ID map (user_namespaces(7)). It returns nil for an unreadable map.
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
			return uint32(e.inside + n - e.outside) //nolint:gosec // the kernel's IDs have 32 bits
		}
	}
	return Overflow
}
