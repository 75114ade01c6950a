package hostfs_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestHint(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "f"), "")
	failing := func(errno syscall.Errno) error {
		return hostfs.Disk{Ops: hostfstest.FailAt(0, errno)}.WriteFile(filepath.Join(dir, "f"), nil, 0o600)
	}
	_, _, missingFile := hostfs.ReadFile(filepath.Join(dir, "missing"), 1)
	for _, c := range []struct {
		name string
		err  error
		want []string // nil for no hint
	}{
		{"none", nil, nil},
		{"read-only", failing(syscall.EROFS), []string{"read-only", "global.platform", "gke", "cniBinDir", "cniConfDir"}},
		{"missing directory", hostfs.Disk{}.WriteFile(filepath.Join(dir, "no", "f"), nil, 0o600), []string{
			"does not exist", "global.platform", "k3s", "openshift",
		}},
		{"missing directory for a link", func() error {
			_, err := hostfs.Disk{}.Symlink("x", filepath.Join(dir, "no", "f"))
			return err
		}(), []string{"does not exist", "global.platform"}},
		{"missing file", missingFile, nil},
		{"access", failing(syscall.EACCES), []string{"seLinuxOptions.type=spc_t", "AppArmor", "lsattr"}},
		{"not permitted", failing(syscall.EPERM), []string{"SELinux", "immutable"}},
		{"no space", failing(syscall.ENOSPC), []string{"full", "df"}},
		{"quota", failing(syscall.EDQUOT), []string{"quota"}},
		{"a file as a directory", hostfs.Disk{}.WriteFile(filepath.Join(dir, "f", "g"), nil, 0o600), []string{"is a file"}},
		{"wrapped and joined", errors.Join(errors.New("x"), fmt.Errorf("y: %w", failing(syscall.EROFS))), []string{"read-only"}},
		{"a broken disk", failing(syscall.EIO), []string{"dmesg"}},
		{"another", failing(syscall.EBUSY), nil},
	} {
		got := hostfs.Hint(c.err)
		if (got == "") != (c.want == nil) || strings.Contains(got, "\n") || strings.HasSuffix(got, ".") {
			t.Errorf("%s: hint %q for %v", c.name, got, c.err)
		}
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: hint %q lacks %q", c.name, got, want)
			}
		}
	}
}

// The kernel's own answers, from a file system that is full and one that is read-only.
func TestDisk_ErrorsOfRealFileSystems(t *testing.T) {
	t.Parallel()
	if !ownMounts(t) {
		return
	}
	dir := t.TempDir()
	check.OK(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { check.OK(t, unix.Unmount(dir, 0)) })
	path := filepath.Join(dir, "f")
	check.OK(t, hostfs.Disk{}.WriteFile(path, []byte("old"), 0o600))
	fails := func(want syscall.Errno) {
		err := hostfs.Disk{}.WriteFile(path, make([]byte, 100<<10), 0o600)
		if !errors.Is(err, want) || hostfs.Hint(err) == "" || len(names(t, dir)) != 1 || content(path) != "old" {
			t.Errorf("error %v, want %v; files %q, content %q", err, want, names(t, dir), content(path))
		}
	}
	fails(syscall.ENOSPC)
	check.OK(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	fails(syscall.EROFS)
}
