package installation

import (
	"os"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// inContainer reports whether the directories of the node are seen through mounts, so that a path of the host means
// something else here.
func (c Config) inContainer() bool {
	return slices.ContainsFunc(append(slices.Clone(c.BinDirs), c.NetDir), func(dir string) bool {
		return slices.ContainsFunc(c.HostRoots, func(root string) bool { return within(dir, root) })
	})
}

// onHost finds a path of the host as this process sees it, and reports whether it can be seen at all. Outside of a container
// every path can be seen.
func (c Config) onHost(file string) (string, bool) {
	if !c.inContainer() {
		return file, true
	}
	return hostpath.View{Roots: c.HostRoots}.Find(file)
}

// alive reports whether a sandbox may still exist: its namespace is a file that is removed with it.
func (c Config) alive(s cnicache.Entry) bool {
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
