package hostfs_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
)

// helperVar makes the test binary another program: one that waits, or one that locks a file and waits, until its input
// ends.
const helperVar = "HOSTFS_TEST_HELPER"

func TestMain(m *testing.M) {
	switch what, path, _ := strings.Cut(os.Getenv(helperVar), " "); what {
	case "":
		os.Exit(m.Run())
	case "lock":
		if _, err := hostfs.Lock(path); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fallthrough
	case "wait":
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		fmt.Println("done")
	}
}

// ownMounts runs the test that calls it again in a process with a mount namespace of its own, as a container has it, and
// reports whether this is that process.
func ownMounts(t *testing.T) bool {
	t.Helper()
	return netnstest.Inside(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} })
}

// onEachFS runs the test in a directory of a disk and in one of memory.
func onEachFS(t *testing.T, test func(t *testing.T, dir string)) {
	t.Helper()
	t.Run("disk", func(t *testing.T) { test(t, unlinked(t, t.TempDir())) })
	t.Run("tmpfs", func(t *testing.T) { test(t, memory(t)) })
}

// memory returns an empty directory in memory.
func memory(tb testing.TB) string {
	tb.Helper()
	var fs syscall.Statfs_t
	const tmpfsMagic = 0x01021994
	if err := syscall.Statfs("/dev/shm", &fs); err != nil || fs.Type != tmpfsMagic {
		tb.Fatal("/dev/shm is no tmpfs: this test needs one")
	}
	dir, err := os.MkdirTemp("/dev/shm", "hostfs") //nolint:usetesting // another file system than the test's
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// unlinked returns the path without links.
func unlinked(tb testing.TB, path string) string {
	tb.Helper()
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

// umask changes the umask of the process until the end of the test.
func umask(t *testing.T, mask int) {
	t.Helper()
	old := syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(old) })
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// put writes a file in the simplest way.
func put(tb testing.TB, path, content string) {
	tb.Helper()
	must(tb, os.WriteFile(path, []byte(content), 0o644))
}

// content returns what is in the file, or why it cannot be read.
func content(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// names returns what is in the directory.
func names(tb testing.TB, dir string) []string {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	must(tb, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func modeOf(tb testing.TB, path string) os.FileMode {
	tb.Helper()
	info, err := os.Lstat(path)
	must(tb, err)
	return info.Mode() &^ os.ModeType
}

// inode tells whether a file was replaced.
func inode(tb testing.TB, path string) uint64 {
	tb.Helper()
	var stat syscall.Stat_t
	must(tb, syscall.Lstat(path, &stat))
	return stat.Ino
}
