package podrepair

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/node/podns"
)

func mkdir(t *testing.T, parts ...string) string {
	t.Helper()
	dir := filepath.Join(parts...)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPlacesOfAContainer(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	p := Paths{
		Cache: root + "/lib/cni", Proc: root + "/proc", Netns: []string{root + "/netns", root + "/docker"}, Roots: []string{root + "/absent", root + "/host"},
	}
	host := root + "/host"
	if p.Places() != nil {
		t.Fatal("the node's processes are not to be seen")
	}
	proc := mkdir(t, host, root, "proc/1/ns")
	places := p.Places()
	want := &podns.Places{Proc: filepath.Dir(filepath.Dir(proc)), Cache: p.Cache, HostRoots: []string{host}}
	if diff := cmp.Diff(want, places); diff != "" {
		t.Errorf("before the first pod (-want +got):\n%s", diff)
	}
	// The runtime makes its directories with the first pod, long after the agent has started.
	want.Cache = mkdir(t, host, root, "lib/cni")
	want.Mounts = []string{mkdir(t, host, root, "netns")}
	if diff := cmp.Diff(want, p.Places()); diff != "" {
		t.Errorf("after the first pod (-want +got):\n%s", diff)
	}
}

func TestPlacesOfTheNodeItself(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	p := Paths{Cache: mkdir(t, root, "cni"), Proc: root + "/proc", Netns: []string{mkdir(t, root, "netns")}, Roots: []string{root + "/host"}}
	mkdir(t, root, "proc/1/ns")
	places := p.Places()
	if places == nil || places.Proc != p.Proc || places.Cache != p.Cache || !slices.Equal(places.Mounts, p.Netns) || len(places.HostRoots) > 0 {
		t.Errorf("places %+v", places)
	}
}
