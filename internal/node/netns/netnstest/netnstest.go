// Package netnstest makes network namespaces for tests on the real kernel.
//
// It promises an empty namespace that ends with its test, also if the test process is killed: only an open
// file holds the namespace, and no mount. It never touches the namespace that the tests run in. Start
// reading at [New].
package netnstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// New makes a network namespace with only a loopback interface that is down, and returns its path for this
// process and its children. It skips a test that does not run as root.
func New(tb testing.TB) string {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("making a network namespace needs root")
	}
	n, err := netns.New()
	check.OK(tb, err)
	keep(tb, n.Path(), n)
	return n.Path()
}

// held has the namespaces of New and Open, by path.
var held sync.Map //nolint:gochecknoglobals // paths are global too

// keep holds a namespace until the test ends.
func keep(tb testing.TB, path string, n *netns.Namespace) {
	tb.Helper()
	held.Store(path, n)
	tb.Cleanup(func() {
		held.CompareAndDelete(path, n)
		n.Close()
	})
}

// At returns the open namespace of New or Open for a path.
func At(path string) *netns.Namespace {
	n, ok := held.Load(path)
	if !ok {
		panic("no namespace of netnstest: " + path)
	}
	return n.(*netns.Namespace) //nolint:forcetypeassert // nothing else is stored
}

// Open holds the namespace at path open until the test ends.
func Open(tb testing.TB, path string) *netns.Namespace {
	tb.Helper()
	n, err := netns.Open(path)
	check.OK(tb, err)
	keep(tb, path, n)
	return n
}

// Isolated is netns.Namespace.DoIsolated for the namespace at path.
func Isolated(path string, binds []netns.Bind, fn func() error) (isolation, err error) {
	n, err := netns.Open(path)
	if err != nil {
		return nil, err
	}
	defer n.Close()
	return n.DoIsolated(binds, fn)
}

// Run runs a command in the namespace at path and returns its standard output. The test fails if the command does.
func Run(tb testing.TB, path, name string, args ...string) string {
	tb.Helper()
	return Feed(tb, path, "", name, args...)
}

// Feed is Run with a standard input.
func Feed(tb testing.TB, path, stdin, name string, args ...string) string {
	tb.Helper()
	var stdout, stderr strings.Builder
	err := netns.Do(path, func() error {
		cmd := exec.CommandContext(tb.Context(), name, args...) //nolint:gosec // the test's own
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
		return cmd.Run()
	})
	if err != nil {
		tb.Fatalf("running %s %s in %s: %v\n%s%s\n%s", name, strings.Join(args, " "), path, err, &stdout, &stderr, stdin)
	}
	return stdout.String()
}

// Inside runs the calling test again in another process, which prepare configures, and reports whether this is that
// process.
func Inside(t *testing.T, prepare func(*exec.Cmd)) bool {
	t.Helper()
	const variable = "NETNSTEST_INSIDE"
	if os.Getenv(variable) == t.Name() { //nolint:forbidigo // set below
		return true
	}
	New(t)                                                                                           // needs root
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v") //nolint:gosec // the test itself
	cmd.Dir, cmd.Env = "/", append(os.Environ(), variable+"="+t.Name(), "GOCOVERDIR="+t.TempDir())   //nolint:forbidigo // for the test
	prepare(cmd)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// Unshared starts a process in a new user namespace and its own network namespace, as a runtime does for a pod with hostUsers: false.
// The process has size user IDs, which begin at host in this user namespace. It ends with the test.
func Unshared(tb testing.TB, host, size int) (process *exec.Cmd, path string) {
	tb.Helper()
	process = exec.CommandContext(tb.Context(), "sleep", "1000")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: host, Size: size}}
	process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: ids, GidMappings: ids}
	check.OK(tb, process.Start())
	tb.Cleanup(func() { _ = process.Wait() })
	return process, fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid)
}

// Mount mounts the namespace at path at a new file, like a container runtime, until the test ends.
func Mount(tb testing.TB, path, file string) {
	tb.Helper()
	err := os.WriteFile(file, nil, 0o600) //nolint:forbidigo // a file of the test
	if err = errors.Join(err, unix.Mount(path, file, "", unix.MS_BIND, "")); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Unmount(file, unix.MNT_DETACH) })
}

// Set writes a sysctl of the namespace at path. name is relative to /proc/sys. Set runs no program because a minimal machine
// lacks sysctl(8).
func Set(tb testing.TB, path, name, value string) {
	tb.Helper()
	err := netns.Do(path, func() error {
		return os.WriteFile("/proc/sys/"+name, []byte(value), 0) //nolint:forbidigo // no file of a disk
	})
	check.OK(tb, err, "setting", name, "in", path)
}

// WriteProgram writes a program that the test executes. No process may start during the write: it would have the file open for
// writing until its exec, and the kernel executes no such file (ETXTBSY).
func WriteProgram(tb testing.TB, file string, content []byte) {
	tb.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(file, content, 0o755); err != nil { //nolint:gosec,forbidigo // a program of the test
		tb.Fatal(err)
	}
}

// OpenFiles returns the number of open files of this process.
func OpenFiles(tb testing.TB) int {
	tb.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	check.OK(tb, err)
	return len(files)
}
