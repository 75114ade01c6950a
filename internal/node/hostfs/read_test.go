package hostfs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	put(t, at("f"), "12345")
	put(t, at("empty"), "")
	check.OK(t, errors.Join(os.Chmod(at("f"), 0o640), os.Chmod(at("empty"), 0o640), os.Symlink("f", at("link"))))
	for name, want := range map[string]string{"f": "12345", "link": "12345", "empty": ""} {
		if data, mode, err := hostfs.ReadFile(at(name), int64(len(want))); string(data) != want || mode != 0o640 || err != nil {
			t.Errorf("%s: %q, mode %v, error %v", name, data, mode, err)
		}
	}
	check.OK(t, errors.Join(syscall.Mkfifo(at("pipe"), 0o600), os.Symlink("pipe", at("pipelink"))))
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", at("socket"))
	check.OK(t, err)
	defer func() { _ = listener.Close() }()
	for name, want := range map[string]error{
		at("f"):             hostfs.ErrTooLarge,
		at("missing"):       fs.ErrNotExist,
		at("pipe"):          hostfs.ErrNotRegular,
		at("pipelink"):      hostfs.ErrNotRegular,
		at("socket"):        hostfs.ErrNotRegular,
		dir:                 hostfs.ErrNotRegular,
		"/dev/zero":         hostfs.ErrNotRegular,
		at("f/below"):       syscall.ENOTDIR,
		"/proc/self/maps":   hostfs.ErrTooLarge, // reports size 0
		"/proc/self/mounts": hostfs.ErrTooLarge,
	} {
		data, _, err := hostfs.ReadFile(name, 4)
		if !errors.Is(err, want) || data != nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %q, error %v, want %v", name, data, err, want)
		}
	}
	if data, _, err := hostfs.ReadFile("/proc/version", 1000); len(data) == 0 || err != nil {
		t.Errorf("a file that reports size 0: %q, error %v", data, err)
	}
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.conf", "a.conflist", "B.conf", "10.json", "9.conf", "b.txt", ".conf"} {
		put(t, filepath.Join(dir, name), "")
	}
	check.OK(t, os.Mkdir(filepath.Join(dir, "d.conf"), 0o755))
	check.OK(t, os.Symlink("missing", filepath.Join(dir, "l.conf")))
	got, err := hostfs.List(dir, func(name string) bool { return !strings.HasSuffix(name, ".txt") })
	check.OK(t, err)
	want := []string{".conf", "10.json", "9.conf", "B.conf", "a.conflist", "b.conf", "l.conf"}
	check.Diff(t, "result", want, got)
	if got, err := hostfs.List(dir, nil); len(got) != len(want)+1 || err != nil {
		t.Errorf("all: %q, error %v", got, err)
	}
	missing := filepath.Join(dir, "missing")
	if _, err := hostfs.List(missing, nil); !errors.Is(err, fs.ErrNotExist) || hostfs.Hint(err) == "" {
		t.Errorf("error %v, hint %q", err, hostfs.Hint(err))
	}
}

// A directory that the node moves or removes stays visible under its mount, although its name now means another directory.
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
	// A program that starts while the lock is held does not inherit it.
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

func TestHint(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "f"), "")
	failing := func(errno syscall.Errno) error {
		return hostfs.Disk{Before: hostfstest.FailAt(0, errno).Before}.WriteFile(filepath.Join(dir, "f"), nil, 0o600)
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
		{"missing directory for a link", hostfs.Disk{}.Symlink("x", filepath.Join(dir, "no", "f")), []string{"does not exist", "global.platform"}},
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
