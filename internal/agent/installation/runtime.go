package installation

import (
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// LoadsDropIns reports whether a runtime loads drop-in files, by its name and version as a node reports them
// (status.nodeInfo.containerRuntimeVersion), such as "containerd://2.2.0". containerd does so since 2.1, its first release with
// libcni 1.3.0; other runtimes are Unknown. docs/agent.md has the evidence.
func LoadsDropIns(runtime string) cniconf.Support {
	name, text, _ := strings.Cut(runtime, "://")
	release, err := version.ParseGeneric(text)
	switch {
	case name != "containerd" || err != nil:
		return cniconf.Unknown
	case release.AtLeast(version.MajorMinor(2, 1)):
		return cniconf.Loaded
	}
	return cniconf.NotLoaded
}
