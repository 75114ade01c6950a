package installation

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/podns"
)

// inContainer reports whether the directories of the node are seen through mounts, so that a path of the host means
// something else here.
func (c Config) inContainer() bool {
	return slices.ContainsFunc(append(slices.Clone(c.BinDirs), c.NetDir), func(dir string) bool {
		return slices.ContainsFunc(c.HostRoots, func(root string) bool { return within(dir, root) })
	})
}

// onHost finds a path of the host as this process sees it, and reports whether it can be seen at all: its parent is there,
// or the host's whole file system is. Outside of a container every path can be seen.
func (c Config) onHost(file string) (string, bool) {
	if !c.inContainer() {
		return file, true
	}
	for _, root := range c.HostRoots {
		for _, spelled := range []string{file, strings.TrimPrefix(file, "/var")} {
			// /var/run is a link to /run, which leads nowhere from inside of a container.
			if spelled != file && !strings.HasPrefix(spelled, "/run/") {
				continue
			}
			seen := filepath.Join(root, spelled)
			if there(filepath.Dir(seen)) || spelled == file && there(filepath.Join(root, "usr")) {
				return seen, true
			}
		}
	}
	return "", false
}

func there(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// alive reports whether a sandbox is still there, for all that can be told: its namespace is a file that goes with it.
func (c Config) alive(s podns.Sandbox) bool {
	if s.NetNS == "" || strings.HasPrefix(s.NetNS, "/proc/") {
		return true
	}
	file, seen := c.onHost(s.NetNS)
	if !seen {
		return true
	}
	_, err := os.Stat(file)
	return !os.IsNotExist(err)
}
