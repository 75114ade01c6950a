package hostfs_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// lockVar turns the test binary into a program that locks the file of this name until its input ends.
const lockVar = "HOSTFS_TEST_LOCK"

func TestMain(m *testing.M) {
	path := os.Getenv(lockVar)
	if path == "" {
		os.Exit(m.Run())
	}
	held, err := hostfs.Lock(path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = held.Close()
}

// ownMounts runs the calling test again in a process with a mount namespace of its own, like a container, and reports
// whether this is that process.
func ownMounts(t *testing.T) bool {
	t.Helper()
	return netnstest.Inside(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} })
}

// onEachFS runs the test in a directory on a disk and in a directory in memory.
func onEachFS(t *testing.T, test func(t *testing.T, dir string)) {
	t.Helper()
	t.Run("disk", func(t *testing.T) { test(t, unlinked(t, t.TempDir())) })
	t.Run("tmpfs", func(t *testing.T) { test(t, hostfstest.Memory(t)) })
}

// unlinked returns the path without symbolic links.
func unlinked(tb testing.TB, path string) string {
	tb.Helper()
	path, err := filepath.EvalSymlinks(path)
	check.OK(tb, err)
	return path
}

// umask changes the umask of the process until the end of the test.
func umask(t *testing.T, mask int) {
	t.Helper()
	old := syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(old) })
}

// An op changes the file system.
type op func() error

func write(path, text string) op {
	return func() error { return os.WriteFile(path, []byte(text), 0o600) }
}
func rename(from, to string) op { return func() error { return os.Rename(from, to) } }
func chmod(path string, mode os.FileMode) op {
	return func() error { return os.Chmod(path, mode) }
}
func mkdir(path string) op           { return func() error { return os.MkdirAll(path, 0o755) } }
func remove(path string) op          { return func() error { return os.RemoveAll(path) } }
func symlink(target, path string) op { return func() error { return os.Symlink(target, path) } }

// each returns an op that does several ops as fast as possible.
func each(ops ...op) op {
	return func() error {
		for _, do := range ops {
			if err := do(); err != nil {
				return err
			}
		}
		return nil
	}
}

// put writes a file in the simplest way.
func put(tb testing.TB, path, content string) {
	tb.Helper()
	check.OK(tb, os.WriteFile(path, []byte(content), 0o644))
}

// content returns the content of the file, or the text of the read error.
func content(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// names returns the names in the directory.
func names(tb testing.TB, dir string) []string {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	check.OK(tb, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func modeOf(tb testing.TB, path string) os.FileMode {
	tb.Helper()
	info, err := os.Lstat(path)
	check.OK(tb, err)
	return info.Mode() &^ os.ModeType
}
