package netns_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const nsswitch = "/etc/nsswitch.conf"

func read(tb testing.TB, path string) string {
	tb.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		tb.Error(err)
	}
	return string(text)
}

func tempFile(tb testing.TB, text string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "file")
	check.OK(tb, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestDoIsolated_HidesFilesFromChildrenOnly(t *testing.T) {
	path := netnstest.New(t)
	host := read(t, nsswitch)
	if host == "" {
		t.Fatalf("%s is empty on this machine: nothing could be hidden", nsswitch)
	}
	mounts := mountsOf(t, path)

	isolation, err := netnstest.Isolated(path, []netns.Bind{{Source: os.DevNull, Target: nsswitch}}, func() error {
		out, err := exec.CommandContext(t.Context(), "/bin/cat", nsswitch).CombinedOutput()
		if err != nil || len(out) != 0 {
			t.Errorf("the child reads %q, %v", out, err)
		}
		out, err = exec.CommandContext(t.Context(), "readlink", "/proc/self/ns/net").CombinedOutput()
		if want := netnstest.At(path).Inode().String(); err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("the child is in %s, %v, want %s", out, err, want)
		}
		other := make(chan string)
		go func() { other <- read(t, nsswitch) }()
		check.Equal(t, <-other, host, "another thread reads")
		check.Equal(t, mountsOf(t, path), mounts, "the node's mounts changed")
		return nil
	})
	if isolation != nil || err != nil {
		t.Fatalf("isolation: %v, error: %v", isolation, err)
	}
	check.Equal(t, mountsOf(t, path), mounts, "the node's mounts changed")
	check.Equal(t, read(t, nsswitch), host, "the node reads")
}

// A lock file with the namespace mounted over it is a lock per pod: a lock held on the node is free in
// the sandbox, and a lock held in one pod is free in the next.
func TestDoIsolated_OwnLock(t *testing.T) {
	t.Parallel()
	lock := tempFile(t, "")
	node, err := tryLock(lock)
	check.OK(t, err)
	defer node.Close() //nolint:errcheck // a test

	pod, other := bindMount(t, netnstest.New(t)), bindMount(t, netnstest.New(t))
	in := func(path string, fn func() error) {
		isolation, err := netnstest.Isolated(path, []netns.Bind{{Source: path, Target: lock}}, fn)
		if isolation != nil || err != nil {
			t.Errorf("isolation: %v, error: %v", isolation, err)
		}
	}
	childLocks := func(want bool) func() error {
		return func() error {
			out, err := exec.CommandContext(t.Context(), "flock", "--nonblock", lock, "true").CombinedOutput()
			if (err == nil) != want {
				t.Errorf("locking in a child: %v %s, want success %v", err, out, want)
			}
			return nil
		}
	}
	_ = childLocks(false)()
	in(pod, childLocks(true))
	in(pod, func() error {
		held, err := tryLock(lock)
		if err != nil {
			return err
		}
		defer held.Close() //nolint:errcheck // a test
		in(pod, childLocks(false))
		in(other, childLocks(true))
		return nil
	})
}

func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}

// If the node's mounts are shared, as under systemd, a mount in a copy of the mount namespace appears on the
// node unless propagation is off. This test binary runs again with such mounts.
func TestDoIsolated_SharedMounts(t *testing.T) {
	netnstest.New(t) // needs root
	self, err := os.Executable()
	check.OK(t, err)
	again := `mount --make-rshared / && exec "$0" -test.v -test.failfast -test.run='^TestDoIsolated_HidesFiles|^TestDo_LeavesNothing$/^DoIsolated$'`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-c", again, self)
	cmd.Env = append(os.Environ(), "GOCOVERDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "--- PASS: Test") != 3 {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestDoIsolated_PartialIsolation(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	source, target := tempFile(t, "mounted"), tempFile(t, "hidden")
	absent := filepath.Join(t.TempDir(), "absent")
	binds := []netns.Bind{
		{Source: absent, Target: target},
		{Source: source, Target: absent},
		{Source: source, Target: t.TempDir()},
		{Source: source, Target: target},
	}
	no := errors.New("no")
	isolation, err := netnstest.Isolated(path, binds, func() error {
		check.Equal(t, read(t, target), "mounted", "the possible bind reads")
		return no
	})
	if err != no { //nolint:errorlint // the same error
		t.Errorf("error: %v, want %v", err, no)
	}
	if !errors.Is(isolation, fs.ErrNotExist) || !errors.Is(isolation, unix.ENOTDIR) {
		t.Errorf("isolation: %v", isolation)
	}
	for _, want := range []string{
		fmt.Sprintf("mounting %q over %q: no such file", absent, target),
		fmt.Sprintf("mounting %q over %q: no such file", source, absent),
		fmt.Sprintf("mounting %q over %q: not a directory", source, binds[2].Target),
	} {
		if !strings.Contains(fmt.Sprint(isolation), want) {
			t.Errorf("isolation lacks %q:\n%v", want, isolation)
		}
	}
	check.Equal(t, read(t, target), "hidden", "the node reads")
}

// mountsOf returns the mounts at one of the targets, which could be ours. Other mounts come and go.
func mountsOf(t *testing.T, lock string) string {
	t.Helper()
	var ours strings.Builder
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		if strings.Contains(line, lock) || strings.Contains(line, nsswitch) {
			ours.WriteString(line)
		}
	}
	return ours.String()
}

func TestDo_LeavesNothing(t *testing.T) {
	// Not parallel: it counts the files, mounts and threads of the process.
	path := netnstest.New(t)
	lock := tempFile(t, "")
	binds := []netns.Bind{{Source: path, Target: lock}, {Source: os.DevNull, Target: nsswitch}}
	do := func() error { return netns.Do(path, func() error { return nil }) }
	isolated := func() error {
		isolation, err := netnstest.Isolated(path, binds, func() error { return nil })
		return errors.Join(isolation, err)
	}
	failing := func() error {
		_ = netns.Do(path, func() error { panic("boom") })
		_, _ = netnstest.Isolated(path, []netns.Bind{{Source: "/absent", Target: lock}, {Source: lock, Target: "/absent"}},
			func() error { panic("boom") })
		_ = netns.Do("/proc/self/ns/user", nil)
		_ = netns.Do(lock, nil)
		return nil
	}
	moved := func() error { return netns.Do("", func() error { return unix.Unshare(unix.CLONE_NEWNET) }) }
	for name, fn := range map[string]func() error{"Do": do, "DoIsolated": isolated, "failing calls": failing, "threads left elsewhere": moved} {
		t.Run(name, func(t *testing.T) {
			const slack = 5 // threads that the Go runtime makes at any time
			var all sync.WaitGroup
			files, mounts := count(t, "/proc/self/fd"), mountsOf(t, lock)
			for range 50 {
				all.Go(func() {
					if err := fn(); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			threads := count(t, "/proc/self/task")
			for range 200 {
				check.OK(t, fn())
			}
			check.Equal(t, mountsOf(t, lock), mounts, "the node's mounts changed from")
			check.Equal(t, count(t, "/proc/self/fd"), files, "open files")
			agenttest.Until(t, func() string { return strays(t) }, func() bool { return strays(t) == "" })
			agenttest.Until(t, func() string { return fmt.Sprintf("threads: %d, before: %d", count(t, "/proc/self/task"), threads) },
				func() bool { return count(t, "/proc/self/task") <= threads+slack })
		})
	}
}

// strays names the threads that are in another namespace than the process.
func strays(tb testing.TB) string {
	tb.Helper()
	var found []string
	for _, kind := range []string{"net", "mnt"} {
		own := inode(tb, "/proc/self/ns/"+kind)
		tasks, err := filepath.Glob("/proc/self/task/*/ns/" + kind)
		check.OK(tb, err)
		for _, task := range tasks {
			if id, err := netns.InodeOf(task); err == nil && fmt.Sprint(id.Dev, id) != own {
				found = append(found, task)
			}
		}
	}
	return strings.Join(found, " ")
}

func count(tb testing.TB, dir string) int {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	check.OK(tb, err)
	return len(entries)
}
