package installation_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

func TestReconcile_DropIns(t *testing.T) {
	t.Parallel()
	const yes, no, unknown = cniconf.Loaded, cniconf.NotLoaded, cniconf.Unknown
	for runtime, want := range map[string]cniconf.Support{
		"containerd://1.6.20": no, "containerd://1.7.35": no, "containerd://2.0.14": no, "containerd://2.1.3": yes,
		"containerd://2.1.4-k3s2": yes, "containerd://2.4.2+unknown": yes, "containerd://2.10.0": yes, "containerd://3.0.0": yes,
		"containerd://v2.2.0": yes, "cri-o://1.34.0": unknown, "docker://28.0.0": unknown, "": unknown, "containerd://": unknown,
		"containerd://2": unknown, "containerd://x.y": unknown, "containerd://2.x": unknown,
	} {
		if got := installation.LoadsDropIns(runtime); got != want {
			t.Errorf("%q: %v, want %v", runtime, got, want)
		}
	}
}
