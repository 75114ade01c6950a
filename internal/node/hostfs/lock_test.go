package hostfs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func wantHeld(t *testing.T, path string, pid int) {
	t.Helper()
	_, err := hostfs.Lock(path)
	held, ok := errors.AsType[*hostfs.HeldError](err)
	want := fmt.Sprintf("locking %q: held by process %d", path, pid)
	if !ok || held.PID != pid || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestLock(t *testing.T) {
	umask(t, 0)
	path := filepath.Join(t.TempDir(), "lock")
	put(t, path, "1234567 left by a holder with a long number\n")
	check.OK(t, os.Chmod(path, 0o666))
	held, err := hostfs.Lock(path)
	check.OK(t, err)
	if got := content(path); got != fmt.Sprintln(os.Getpid()) || modeOf(t, path) != 0o600 {
		t.Errorf("content %q, mode %v", got, modeOf(t, path))
	}
	wantHeld(t, path, os.Getpid())
	// A program that is started while the lock is held does not hold it.
	child := exec.CommandContext(t.Context(), "/bin/sleep", "1000")
	check.OK(t, child.Start())
	check.OK(t, held.Close())
	held, err = hostfs.Lock(path)
	check.OK(t, err)
	check.OK(t, child.Process.Kill())
	_ = child.Wait()
	check.OK(t, held.Close())
}

func TestLock_EndsWithItsHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	other := agenttest.Child(t, lockVar+"="+path)
	_, err := other.StdinPipe()
	check.OK(t, err)
	check.OK(t, other.Start())
	agenttest.Eventually(t, "the other process holds it", func() bool { return content(path) == fmt.Sprintln(other.Process.Pid) })
	wantHeld(t, path, other.Process.Pid)
	check.OK(t, other.Process.Kill())
	_ = other.Wait()
	held, err := hostfs.Lock(path)
	check.OK(t, err)
	check.OK(t, held.Close())
}

func TestLock_OtherKindsOfFile(t *testing.T) {
	dir := t.TempDir()
	check.OK(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	check.OK(t, os.Symlink("elsewhere", filepath.Join(dir, "link")))
	for name, want := range map[string]error{"pipe": hostfs.ErrNotRegular, "link": syscall.ELOOP, "": syscall.EISDIR} {
		if _, err := hostfs.Lock(filepath.Join(dir, name)); !errors.Is(err, want) {
			t.Errorf("%q: error %v, want %v", name, err, want)
		}
	}
	_, err := hostfs.Lock(filepath.Join(dir, "missing", "lock"))
	if !errors.Is(err, fs.ErrNotExist) || hostfs.Hint(err) == "" {
		t.Errorf("missing directory: error %v, hint %q", err, hostfs.Hint(err))
	}
	if got := names(t, dir); len(got) != 2 {
		t.Errorf("left %q", got)
	}
}
