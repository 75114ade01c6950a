package hostfs

import (
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// MountedFrom tells what is mounted where a path lies: device and directory within it, as proc_pid_mountinfo(5) has them.
// It changes when that directory is moved or removed, although the mount shows the same files. Empty is not known.
//
// The kernel gives the table piece by piece, and one that changes meanwhile may lack a line: what is told was read twice.
func MountedFrom(path string) string {
	const attempts = 10
	last := readMount(path)
	for range attempts {
		again := readMount(path)
		if again == last {
			break
		}
		last = again
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
