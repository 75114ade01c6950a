package hostpath

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestView_LinksStayBelowRoot: as the node's own kernel would follow them.
func TestView_LinksStayBelowRoot(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	mkdir(t, root, "run")
	mkdir(t, root, "data/rancher/k3s")
	mkdir(t, root, "var/lib")
	for link, target := range map[string]string{
		"var/run": "/run", "var/lib/rancher": "../../data/rancher", "out": "../../../../../../run", "var/lib/twice": "/var/lib/rancher", "loop": "loop",
	} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/": "/", "/run/a": "/run/a", "/var/run/x.sock": "/run/x.sock", "/var/lib/rancher/k3s/config.toml": "/data/rancher/k3s/config.toml",
		"/var/lib/twice/k3s": "/data/rancher/k3s", "/out": "/run", "/../../etc": "/etc", "relative/./path": "/relative/path", "/absent/a": "/absent/a",
	} {
		if got, err := Resolve(root, path); err != nil || got != filepath.Join(root, want) {
			t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
		}
	}
	if _, err := Resolve(root, "/loop/a"); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a loop: %v", err)
	}
}
