package hostfs_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// A directory that is moved on the node is still there under its mount, and is another one than its name says.
func TestMountedFromTellsAMove(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	host, here := filepath.Join(dir, "host name"), filepath.Join(dir, "here")
	for _, name := range []string{host, here} {
		must(t, os.Mkdir(name, 0o700))
	}
	must(t, unix.Mount(host, here, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(here, unix.MNT_DETACH) })
	before := hostfs.MountedFrom(filepath.Join(here, "file"))
	if before == "" || before == hostfs.MountedFrom(dir) {
		t.Errorf("mounted from %q, the directory above from %q", before, hostfs.MountedFrom(dir))
	}
	if again := hostfs.MountedFrom(here); again != before {
		t.Errorf("%q and %q for the same mount", before, again)
	}
	must(t, os.Rename(host, filepath.Join(dir, "moved")))
	if after := hostfs.MountedFrom(here); after == before {
		t.Errorf("the move does not show: %q", after)
	}
}
