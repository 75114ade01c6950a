package hostfs

import (
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// MountedFrom returns the source of the mount that a path lies in: device and directory within it, as in
// proc_pid_mountinfo(5). The result changes when that directory is moved or removed on the node, although the mount shows the
// same files: then a new directory of that name is invisible here, and only a restart of the container helps. It is "" if
// unknown.
//
// The kernel returns the table in pieces, and a table that changes meanwhile may lack a line: MountedFrom reads until two
// reads agree.
func MountedFrom(path string) string {
	const attempts = 10
	last := readMount(path)
	for range attempts {
		before := last
		if last = readMount(path); last == before {
			break
		}
	}
	return last
}

func readMount(path string) string {
	path = filepath.Clean(path)
	best, from := -1, ""
	err := hostpath.EachMount("/proc/self/mountinfo", func(m hostpath.Mount) error {
		inside := m.Point == "/" || path == m.Point || strings.HasPrefix(path, m.Point+"/")
		if inside && len(m.Point) >= best { // of two at one place the later one is on top
			best, from = len(m.Point), m.Device+" "+m.Root
		}
		return nil
	})
	if err != nil {
		return ""
	}
	return from
}
