package cluster_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

func TestStart_MissingPrerequisites(t *testing.T) {
	_, err := cluster.Start(t.Context(), cluster.Options{Kube: "/nonexistent", Tier: "huge"})
	if err == nil || !strings.Contains(err.Error(), "hack/kube.sh") || !strings.Contains(err.Error(), `not "huge"`) {
		t.Errorf("got %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	found, _ := artifacts.Find()
	_, err = cluster.Start(t.Context(), cluster.Options{Kube: found.Kube, Tier: cluster.Node})
	for _, want := range []string{"install containerd", "install runc", "install iproute2", "Options.Images"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
}

func TestStart_ServerExits(t *testing.T) {
	script := filepath.Join(t.TempDir(), "kube")
	// Only etcd exits: of two servers that exit, either may be found first.
	text := "#!/bin/sh\n[ $1 = etcd ] || exec sleep 600\necho \"$1 has no licence\"\nexit 3\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	_, err := cluster.Start(t.Context(), cluster.Options{Kube: script, Tier: cluster.ControlPlane, Dir: parent})
	if err == nil || !strings.Contains(err.Error(), "etcd has ended (exit status 3): etcd has no licence") {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
