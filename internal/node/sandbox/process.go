package sandbox

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// Process is a process of a pod.
type Process struct {
	PID int
	// Pod is the pod's UID, Container the container's ID as in status.containerStatuses without the runtime's prefix, "" if
	// the cgroup has none.
	Pod, Container string
	// UID and GID are the file system ids, by which the kernel's owner match compares the sockets that a process opens
	// (xt_owner), in the user namespace of the process.
	UID, GID uint32
}

// Processes calls each for every process of a pod on the node. A process that ends meanwhile is left out.
func (p Places) Processes(ctx context.Context, each func(Process)) error {
	view := hostpath.Detect(p.Roots, p.Proc)
	if view.Proc == "" {
		return fmt.Errorf("%w: there is no procfs of the node at %q", ErrNoHost, p.Proc)
	}
	proc, err := os.Open(view.Proc)
	if err != nil {
		return err
	}
	defer proc.Close() //nolint:errcheck // only read
	names, err := proc.Readdirnames(-1)
	for _, name := range names {
		pid, notOne := strconv.Atoi(name)
		if notOne != nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if one, ok := readProcess(filepath.Join(view.Proc, name)); ok {
			one.PID = pid
			each(one)
		}
	}
	return err
}

// readProcess reads a process of a pod, and returns false for any other.
func readProcess(dir string) (p Process, ok bool) {
	text, err := os.ReadFile(dir + "/cgroup") //nolint:gosec // below the procfs
	if err != nil {
		return p, false
	}
	if p.Pod = podOfCgroups(string(text)); p.Pod == "" {
		return p, false
	}
	p.Container = containerOfCgroups(string(text))
	status, err := os.ReadFile(dir + "/status") //nolint:gosec // below the procfs
	if err != nil {
		return p, false
	}
	uid, gid, ok := fileSystemIDs(string(status))
	if !ok {
		return p, false
	}
	p.UID, p.GID = inside(dir+"/uid_map", uid), inside(dir+"/gid_map", gid)
	return p, true
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

// fileSystemIDs reads the last column of the lines Uid and Gid of proc_pid_status(5).
func fileSystemIDs(status string) (uid, gid uint32, ok bool) {
	found := 0
	for line := range strings.Lines(status) {
		fields := strings.Fields(line)
		if len(fields) != 5 || fields[0] != "Uid:" && fields[0] != "Gid:" {
			continue
		}
		id, err := strconv.ParseUint(fields[4], 10, 32)
		if err != nil {
			return 0, 0, false
		}
		found++
		if fields[0] == "Uid:" {
			uid = uint32(id)
		} else {
			gid = uint32(id)
		}
	}
	return uid, gid, found == 2
}

// inside converts an id of this process's user namespace to one of the namespace that a map of user_namespaces(7) describes:
// lines of the first id inside, the first id outside and a count. Without a fitting line the id is returned as it is.
func inside(idMap string, id uint32) uint32 {
	text, err := os.ReadFile(idMap) //nolint:gosec // below the procfs
	if err != nil {
		return id
	}
	for line := range strings.Lines(string(text)) {
		var within, outside, count uint64
		if _, err := fmt.Sscan(line, &within, &outside, &count); err != nil {
			return id
		}
		if n := uint64(id); n >= outside && n-outside < count {
			return uint32(within + n - outside) //nolint:gosec // the kernel's ids have 32 bits
		}
	}
	return id
}
