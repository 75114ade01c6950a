// Package netnstest makes network namespaces for tests on the real kernel.
//
// It promises an empty namespace that ends with its test, also if the test process is killed: nothing is
// mounted, the namespace lives in an open file. It never touches the namespace the tests run in. Start
// reading at [New].
package netnstest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// New makes a network namespace with nothing but a loopback interface that is down, and returns a path that
// names it for this process and its children. It skips a test that does not run as root.
func New(tb testing.TB) string {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("making a network namespace needs root")
	}
	var fd int
	err := netns.Do("", func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unsharing the network namespace: %w", err)
		}
		fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		tb.Fatalf("making a network namespace: %v", err)
	}
	tb.Cleanup(func() { _ = unix.Close(fd) })
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
}

// Run runs a command in the namespace at path and returns what it printed. The test fails if the command does.
func Run(tb testing.TB, path, name string, args ...string) string {
	tb.Helper()
	var out []byte
	err := netns.Do(path, func() (err error) {
		//nolint:gosec // a test says what it runs
		out, err = exec.CommandContext(tb.Context(), name, args...).CombinedOutput()
		return err
	})
	if err != nil {
		tb.Fatalf("running %s %s in %s: %v\n%s", name, strings.Join(args, " "), path, err, out)
	}
	return string(out)
}

// Set writes a sysctl of the namespace at path, by its name below /proc/sys. It needs no program for that: a minimal machine
// has none.
func Set(tb testing.TB, path, name, value string) {
	tb.Helper()
	err := netns.Do(path, func() error {
		return os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	})
	if err != nil {
		tb.Fatalf("setting %s in %s: %v", name, path, err)
	}
}
