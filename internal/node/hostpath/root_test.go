package hostpath_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestRoot(t *testing.T) {
	t.Parallel()
	for path, want := range map[string][2]string{
		"/host/proc/1/root/etc/cni": {"/host/proc/1/root", "/etc/cni"},
		"/proc/12/root":             {"/proc/12/root", "/"},
		"/proc/12/root/":            {"/proc/12/root", "/"},
		"/a//proc/1/root/b/../c":    {"/a/proc/1/root", "/c"},
		"/proc/1/root/proc/2/root":  {"/proc/1/root", "/proc/2/root"},
		"/proc/1/rootx/etc":         {"/", "/proc/1/rootx/etc"},
		"/proc/self/root/etc":       {"/", "/proc/self/root/etc"},
		"/proc/root/etc":            {"/", "/proc/root/etc"},
		"/etc/cni/net.d":            {"/", "/etc/cni/net.d"},
		"":                          {"/", ""},
	} {
		if root, rest := hostpath.Root(path); root != want[0] || rest != want[1] {
			t.Errorf("%q: got %q and %q, want %q", path, root, rest, want)
		}
	}
}

// TestFollow_AnotherRoot: an absolute link stays below the root, unlike in the kernel.
func TestFollow_AnotherRoot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	check.OK(t, os.WriteFile(file, nil, 0o600))
	check.OK(t, os.Symlink(file, filepath.Join(dir, "link")))
	root := fmt.Sprintf("/proc/%d/root", os.Getpid())
	if got, err := hostpath.Follow(root + dir + "/link"); err != nil || got != root+file {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := hostpath.Follow(root + dir + "/none"); !os.IsNotExist(err) {
		t.Errorf("got %q, %v for a file that does not exist", got, err)
	}
	if got, err := hostpath.Follow(dir + "/link"); err != nil || got != file {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestWhole(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check.OK(t, os.MkdirAll(filepath.Join(dir, "part/etc/cni"), 0o700))
	check.Equal(t, hostpath.Whole(filepath.Join(dir, "part"), filepath.Join(dir, "none")), "", "is a whole file system")
	check.Equal(t, hostpath.Whole(filepath.Join(dir, "part"), "/"), "/")
}
