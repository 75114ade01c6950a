package hostfs_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// A directory that is moved or removed on the node is still there under its mount, and no longer the one of its name.
func TestMountedFrom_ChangesWithDirectory(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(dir string) error{
		"moved": func(dir string) error { return os.Rename(dir, dir+" moved") }, "removed": os.Remove,
	} {
		dir := t.TempDir()
		host, here := filepath.Join(dir, "host name"), filepath.Join(dir, "here")
		for _, name := range []string{host, here} {
			check.OK(t, os.Mkdir(name, 0o700))
		}
		check.OK(t, unix.Mount(host, here, "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(here, unix.MNT_DETACH) })
		before := hostfs.MountedFrom(filepath.Join(here, "file"))
		if before == "" || before == hostfs.MountedFrom(dir) || before != hostfs.MountedFrom(here) {
			t.Errorf("%s: mounted from %q, the directory above from %q", name, before, hostfs.MountedFrom(dir))
		}
		check.OK(t, change(host))
		if after := hostfs.MountedFrom(here); after == before {
			t.Errorf("%s: still mounted from %q", name, after)
		}
	}
}
