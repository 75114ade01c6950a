package netns_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const thread = "/proc/thread-self/ns/net"

// inode identifies the namespace behind path.
func inode(tb testing.TB, path string) string {
	tb.Helper()
	id, err := netns.InodeOf(path)
	if err != nil {
		tb.Error(err)
	}
	return fmt.Sprint(id.Dev, id)
}

// in checks that the calling thread is in a namespace.
func in(t *testing.T, path string) {
	t.Helper()
	check.Equal(t, inode(t, thread), inode(t, path), "the thread is in")
}

// bindMount mounts the namespace at a new file and returns the file.
func bindMount(t *testing.T, path string) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "cni-0")
	netnstest.Mount(t, path, at)
	return at
}

func TestDo_EveryKindOfPath(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	fd := path[strings.LastIndex(path, "/")+1:]

	child := exec.CommandContext(t.Context(), "sleep", "1000")
	check.OK(t, netns.Do(path, child.Start))
	defer func() { _, _ = child.Process.Kill(), child.Wait() }()

	link := filepath.Join(t.TempDir(), "link")
	bind := bindMount(t, path)
	check.OK(t, os.Symlink(bind, link))
	err := netns.Do(path, func() error {
		for name, p := range map[string]string{
			"open file of a process":    path,
			"open file of this process": "/proc/self/fd/" + fd,
			"bind mount":                bind,
			"symbolic link":             link,
			"another process":           fmt.Sprintf("/proc/%d/ns/net", child.Process.Pid),
			"another thread":            fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid()),
		} {
			t.Run(name, func(t *testing.T) {
				unmoved(t, func() {
					check.OK(t, netns.Do(p, func() error { in(t, path); return nil }))
				})
			})
		}
		return nil
	})
	check.OK(t, err)
}

// An empty path and a path below /proc/thread-self are the namespace of the calling thread.
func TestDo_Nested(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	outer, inner, no := netnstest.New(t), netnstest.New(t), errors.New("no")
	for _, path := range []string{"/proc/self/ns/net", outer} {
		err := netns.Do(path, func() error {
			in(t, path)
			for _, own := range []string{"", thread} {
				caller := unix.Gettid()
				err := netns.Do(own, func() error {
					if unix.Gettid() == caller {
						t.Error("the function is on the caller's thread")
					}
					in(t, path)
					return nil
				})
				if err != nil {
					return err
				}
			}
			err := netns.Do(inner, func() error {
				in(t, inner)
				return no
			})
			in(t, path)
			return err
		})
		if err != no { //nolint:errorlint // the same error
			t.Errorf("got %v, want %v", err, no)
		}
	}
}

func TestDo_OtherFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	regular := filepath.Join(dir, "regular")
	check.OK(t, os.WriteFile(regular, []byte("x"), 0o600))
	fifo := filepath.Join(dir, "fifo")
	check.OK(t, unix.Mkfifo(fifo, 0o600))
	unmounted := bindMount(t, netnstest.New(t))
	check.OK(t, unix.Unmount(unmounted, unix.MNT_DETACH))
	dangling := filepath.Join(dir, "dangling")
	check.OK(t, os.Symlink(filepath.Join(dir, "absent"), dangling))
	tests := []struct {
		name, path, part string
		is               error
	}{
		{"a path that does not exist", filepath.Join(dir, "absent"), "no such file", fs.ErrNotExist},
		{"a link to nothing", dangling, "no such file", fs.ErrNotExist},
		{"a process that does not exist", "/proc/4194305/ns/net", "no such file", fs.ErrNotExist},
		{"a path through a file", filepath.Join(regular, "x"), "not a directory", unix.ENOTDIR},
		{"a regular file", regular, "regular file", nil},
		{"a file whose namespace was unmounted", unmounted, "mounted there is gone", nil},
		{"a directory", dir, "directory", nil},
		{"a pipe without a writer", fifo, "not a network namespace", nil},
		{"a device", "/dev/null", "not a network namespace", nil},
		{"a file of proc", "/proc/self/status", "regular file", nil},
		{"a user namespace", "/proc/self/ns/user", "a namespace of another kind (0x10000000), not a network namespace", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ran := false
			fn := func() error { ran = true; return nil }
			for what, err := range map[string]error{
				"Do":         netns.Do(tt.path, fn),
				"DoIsolated": second(netnstest.Isolated(tt.path, nil, fn)),
				"Open":       second(netns.Open(tt.path)),
			} {
				want := fmt.Sprintf("opening netns %q: ", tt.path)
				if !strings.HasPrefix(fmt.Sprint(err), want) || !strings.Contains(fmt.Sprint(err), tt.part) {
					t.Errorf("%s: error %v, want prefix %q and %q", what, err, want, tt.part)
				}
				if tt.is != nil && !errors.Is(err, tt.is) || tt.is == nil && errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: error %v is not %v", what, err, tt.is)
				}
			}
			if ran {
				t.Error("the function was run")
			}
		})
	}
}

// TestOpenNamed: a name is one of ip netns, then a file of the working directory, and a path stays a path.
func TestOpenNamed(t *testing.T) {
	name, dir := "open-named-"+strconv.Itoa(os.Getpid()), t.TempDir()
	t.Chdir(dir)
	_, err := netns.OpenNamed(name)
	check.Equal(t, fmt.Sprint(err), fmt.Sprintf("opening netns %q: neither /var/run/netns/%s nor a file of that name exists "+
		`("ip netns list" lists names; a process has /proc/PID/ns/net)`, name, name))

	here, named := netnstest.New(t), netnstest.New(t)
	check.OK(t, os.Symlink(here, name))
	opens := func(text, want string) {
		t.Helper()
		n, err := netns.OpenNamed(text)
		check.OK(t, err)
		defer n.Close()
		check.Equal(t, inode(t, n.Path()), inode(t, want), text)
	}
	opens(name, here)
	check.OK(t, os.MkdirAll(netns.NamedDir, 0o755))
	check.OK(t, os.Symlink(named, filepath.Join(netns.NamedDir, name)))
	t.Cleanup(func() { _ = os.Remove(filepath.Join(netns.NamedDir, name)) })
	opens(name, named)
	opens("./"+name, here)
	opens(filepath.Join(dir, name), here)
	opens("", thread)
}

func second[T any](_ T, err error) error { return err }

// unmoved fails if fn leaves the calling thread in another namespace.
func unmoved(t *testing.T, fn func()) {
	t.Helper()
	before := inode(t, thread)
	fn()
	check.Equal(t, inode(t, thread), before, "the caller was moved from")
}

func TestDo_Panic(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	cause := errors.New("cause")
	tests := []struct {
		name string
		fn   func() error
		part []string
		is   error
	}{
		{"a value", func() error { panic("boom") }, []string{"boom", "netns_test.go"}, nil},
		{"an error", func() error { panic(cause) }, []string{"cause", "netns_test.go"}, cause},
		{"nil", func() error { panic(nil) }, []string{"panic called with nil"}, nil}, //nolint:govet // on purpose
		{"a fault", func() error { return any(1).(error) }, []string{"interface conversion", "netns_test.go"}, nil},
		{"the end of the goroutine", func() error { runtime.Goexit(); return nil }, []string{"runtime.Goexit"}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			unmoved(t, func() {
				for what, err := range map[string]error{
					"Do":         netns.Do(path, tt.fn),
					"DoIsolated": second(netnstest.Isolated(path, nil, tt.fn)),
				} {
					check.Contains(t, fmt.Sprint(err), tt.part...)
					if err == nil || tt.is != nil && !errors.Is(err, tt.is) {
						t.Errorf("%s: error is not %q: %v", what, tt.is, err)
					}
				}
			})
		})
	}
}

// The Go runtime makes threads while a function is in its namespace. None of them may be in that namespace.
func TestDo_NoOtherThread(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	var blocked sync.WaitGroup
	defer blocked.Wait()
	host := inode(t, "/proc/self/ns/net")
	err := netns.Do(path, func() error {
		check.Equal(t, unix.Gettid() == unix.Getpid(), false, "on the process's first thread")
		check.Equal(t, inode(t, "/proc/self/ns/net"), host, "the process appears to be in")
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			return err
		}
		defer unix.Close(fds[1]) //nolint:errcheck // ends the readers
		for range 20 {
			blocked.Go(func() { _, _ = unix.Read(fds[0], make([]byte, 1)) })
		}
		want := inode(t, path)
		for range 50 {
			runtime.Gosched()
			tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
			if err != nil {
				return err
			}
			for _, task := range tasks {
				id, err := netns.InodeOf(task)
				if err != nil || strings.Contains(task, fmt.Sprintf("/%d/ns", unix.Gettid())) {
					continue
				}
				if fmt.Sprint(id.Dev, id) == want {
					t.Errorf("%s is in the namespace as well", task)
				}
			}
		}
		return nil
	})
	check.OK(t, err)
}

func TestInode_IdentifiesNamespaces(t *testing.T) {
	t.Parallel()
	path, other := netnstest.New(t), netnstest.New(t)
	bind, host := bindMount(t, path), bindMount(t, "/proc/self/ns/net")
	compare := func(a, b string, same, host bool) {
		n := netnstest.Open(t, b)
		check.Equal(t, netnstest.Open(t, a).Inode() == n.Inode(), same, a, "is", b)
		if got, err := n.IsHost(); err != nil || got != host {
			t.Errorf("%q is the host's: %v, %v, want %v", b, got, err, host)
		}
	}
	compare(path, path, true, false)
	compare(path, bind, true, false)
	compare(path, other, false, false)
	compare(path, "", false, true)
	compare("", "/proc/self/ns/net", true, true)
	compare("", host, true, true)
	if _, err := os.Stat("/proc/1/ns/net"); err == nil { // only if it is readable
		n := netnstest.Open(t, "/proc/1/ns/net")
		if got, err := n.IsHost(); err != nil || !got {
			t.Errorf("process 1 is the host: %v, %v", got, err)
		}
	}
	err := netns.Do(path, func() error {
		compare(path, "", true, false)
		compare(path, "/proc/self/ns/net", false, true)
		return nil
	})
	check.OK(t, err)
}

// A process without privileges can work in its own namespace, cannot enter another, and gets the possible isolation.
// The process is this test binary, run by another user.
func TestDo_WithoutPrivileges(t *testing.T) {
	if !netnstest.Inside(t, func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}) {
		return
	}
	ran := 0
	fn := func() error { ran++; return nil }
	if err := netns.Do("", fn); err != nil || ran != 1 {
		t.Errorf("Do: %v, run %d times", err, ran)
	}
	isolation, err := netnstest.Isolated("", []netns.Bind{{Source: "/dev/null", Target: "/etc/nsswitch.conf"}}, fn)
	if err != nil || ran != 2 {
		t.Errorf("DoIsolated: %v, run %d times", err, ran)
	}
	if !errors.Is(isolation, unix.EPERM) || !strings.Contains(fmt.Sprint(isolation), "making a mount namespace") {
		t.Errorf("isolation: %v", isolation)
	}
	if host, err := netnstest.Open(t, "").IsHost(); err != nil || !host {
		t.Errorf("IsHost: %v, %v", host, err)
	}
}

// TestLacking drops one capability after the other from a thread that ends with the test.
func TestLacking(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		var want []string
		for _, drop := range []struct {
			number int
			name   string
		}{{-1, ""}, {unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"}} {
			if drop.number >= 0 {
				header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				var data [2]unix.CapUserData
				if err := unix.Capget(&header, &data[0]); err != nil {
					t.Error(err)
				}
				data[drop.number/32].Effective &^= 1 << (drop.number % 32)
				if err := unix.Capset(&header, &data[0]); err != nil {
					t.Error(err)
				}
				want = append(want, drop.name)
			}
			if got, err := netns.Lacking(); err != nil || !slices.Equal(got, want) {
				t.Errorf("lacking %q, %v, want %q", got, err, want)
			}
		}
	}()
	<-done
}

// TestDo_Again: all steps share one entry and one thread. A function that has left the namespace, and any other thread, enter again.
func TestDo_Again(t *testing.T) { //nolint:paralleltest // it counts the entries of the process
	path, other := netnstest.New(t), netnstest.New(t)
	space := netnstest.Open(t, path)
	before := netns.Entries()
	step := func() error { in(t, path); return nil } //nolint:unparam // the type that Do takes
	err := space.Do(func() error {
		thread := unix.Gettid()
		for range 3 {
			err := space.Do(func() error {
				check.Equal(t, unix.Gettid(), thread, "the function is on thread")
				return step()
			})
			if err != nil {
				return err
			}
		}
		if err := space.Do(func() error { panic("no") }); err == nil || !strings.Contains(err.Error(), "panic in a network namespace: no") {
			t.Errorf("got %v", err)
		}
		check.Equal(t, netns.Entries()-before, 1, "entries")
		elsewhere := make(chan error)
		go func() { elsewhere <- space.Do(step) }()
		if err := <-elsewhere; err != nil {
			return err
		}
		if err := unix.Setns(netnstest.Open(t, other).FD(), unix.CLONE_NEWNET); err != nil {
			return err
		}
		err := space.Do(step)
		in(t, other)
		return err
	})
	if got := netns.Entries() - before; err != nil || got != 3 {
		t.Errorf("%d entries, %v", got, err)
	}
	unmoved(t, func() {
		if err := space.Do(step); err != nil || netns.Entries()-before != 4 {
			t.Errorf("%d entries, %v", netns.Entries()-before, err)
		}
	})
}

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
			check.Equal(t, err == nil, want, "locking in a child:", err, string(out))
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
	check.Is(t, isolation, fs.ErrNotExist)
	check.Is(t, isolation, unix.ENOTDIR)
	check.Contains(t, fmt.Sprint(isolation),
		fmt.Sprintf("mounting %q over %q: no such file", absent, target),
		fmt.Sprintf("mounting %q over %q: no such file", source, absent),
		fmt.Sprintf("mounting %q over %q: not a directory", source, binds[2].Target),
	)
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
