package hostfs_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
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
		{"access", failing(syscall.EACCES), []string{"SELinux", "lsattr"}},
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

// onAThreadToEnd does something on a thread that nobody has after it, for its mounts are its own. It is not the first
// thread: /proc/self shows the mounts of that one, to all tests.
func onAThreadToEnd(do func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			do()
			return
		}
		defer runtime.UnlockOSThread()
		began := make(chan struct{})
		onAThreadToEnd(func() { close(began); do() })
		<-began // this thread is kept until the other has one
	}()
}

// The kernel's own answers, from a file system that is read-only and one that is full.
func TestErrorsOfRealFileSystems(t *testing.T) {
	dir := t.TempDir()
	done := make(chan struct{})
	onAThreadToEnd(func() {
		defer close(done)
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			t.Errorf("a mount namespace: %v", err)
			return
		}
		for _, err := range []error{
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"),
		} {
			if err != nil {
				t.Errorf("mounting: %v", err)
				return
			}
		}
		path := filepath.Join(dir, "f")
		if err := (hostfs.Disk{}).WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Error(err)
		}
		check := func(want syscall.Errno) {
			err := hostfs.Disk{}.WriteFile(path, make([]byte, 100<<10), 0o600)
			entries, _ := os.ReadDir(dir)
			if !errors.Is(err, want) || hostfs.Hint(err) == "" || len(entries) != 1 || content(path) != "old" {
				t.Errorf("error %v, want %v; %d files, content %q", err, want, len(entries), content(path))
			}
		}
		check(syscall.ENOSPC)
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Errorf("remounting: %v", err)
		}
		check(syscall.EROFS)
	})
	<-done
}
