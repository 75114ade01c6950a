package hostfstest

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

const inotifyVar = "HOSTFSTEST_INOTIFY"

// InotifyLimits runs the test that calls it again in a process with a user namespace of its own, in which
// [LimitInotify] affects no other process, and reports whether this is that process.
func InotifyLimits(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inotifyVar) == t.Name() { //nolint:forbidigo // test support
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.v", "-test.run=^"+t.Name()+"$") //nolint:gosec // itself
	cmd.Env = append(os.Environ(), inotifyVar+"="+t.Name())                                          //nolint:forbidigo // test support
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{Size: 1, HostID: os.Getuid()}},
		GidMappings: []syscall.SysProcIDMap{{Size: 1, HostID: os.Getgid()}},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// LimitInotify sets how many instances and watches the user may have.
func LimitInotify(t *testing.T, instances, watches int) {
	t.Helper()
	for name, limit := range map[string]int{"instances": instances, "watches": watches} {
		file := "/proc/sys/user/max_inotify_" + name
		if err := os.WriteFile(file, fmt.Append(nil, limit), 0o600); err != nil { //nolint:forbidigo // no file of a disk
			t.Fatal(err)
		}
	}
}
