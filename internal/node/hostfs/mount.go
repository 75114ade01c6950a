package hostfs

import (
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// MountedFrom returns the source of the mount that contains a path: the device and the directory within it, as in
// proc_pid_mountinfo(5), or "" if unknown. The result changes when the node moves or removes that directory, although the
// mount still shows the same files. A new directory of the same name is then invisible until the container restarts.
//
// The kernel returns the table in pieces, and a table that changes between them can lack a line. MountedFrom reads until two
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
		if inside && len(m.Point) >= best { // the later mount at a point is on top
			best, from = len(m.Point), m.Device+" "+m.Root
		}
		return nil
	})
	if err != nil {
		return ""
	}
	return from
}
