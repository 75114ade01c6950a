package installation

import (
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// LoadsDropIns reports whether a runtime loads drop-in files, by its name and version as a node reports them
// (status.nodeInfo.containerRuntimeVersion), such as "containerd://2.2.0". containerd does so since 2.1, its first release with
// libcni 1.3.0; other runtimes are Unknown. docs/operations.md has the evidence.
func LoadsDropIns(runtime string) cniconf.Support {
	version, ok := strings.CutPrefix(runtime, "containerd://")
	if !ok {
		return cniconf.Unknown
	}
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) < 2 {
		return cniconf.Unknown
	}
	major, errMajor := strconv.Atoi(parts[0])
	minor, errMinor := strconv.Atoi(strings.TrimRight(parts[1], "abcdefghijklmnopqrstuvwxyz-+~"))
	switch {
	case errMajor != nil || errMinor != nil:
		return cniconf.Unknown
	case major > 2 || major == 2 && minor >= 1:
		return cniconf.Loaded
	}
	return cniconf.NotLoaded
}
