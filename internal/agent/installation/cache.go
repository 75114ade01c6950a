package installation

import (
	"os"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// inContainer reports whether this process sees the node's directories through mounts, so that a path of the host names another
// file in this process.
func (c Config) inContainer() bool {
	return slices.ContainsFunc(append(slices.Clone(c.BinDirs), c.NetDir), func(dir string) bool {
		return slices.ContainsFunc(c.HostRoots, func(root string) bool { return within(dir, root) })
	})
}

// onHost maps a path of the host to the path in this process, and reports whether a mount shows the path at all. Outside of a
// container every path is visible.
func (c Config) onHost(file string) (string, bool) {
	if !c.inContainer() {
		return file, true
	}
	return hostpath.View{Roots: c.HostRoots}.Find(file)
}

// alive reports whether a sandbox may still exist: the runtime removes the file of the network namespace with the sandbox.
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
