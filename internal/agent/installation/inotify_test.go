package installation_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestRun_WithoutInotify installs and heals while the user has no inotify instance, or no watch, left, and goes back when it
// has. The limits are those of a user namespace of its own.
func TestRun_WithoutInotify(t *testing.T) {
	namespace := func(cmd *exec.Cmd) {
		root := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: root, GidMappings: root}
	}
	limit := func(name string, n int) {
		check.OK(t, os.WriteFile("/proc/sys/user/max_inotify_"+name, fmt.Append(nil, n), 0o600))
	}
	if !netnstest.Inside(t, namespace) {
		return
	}
	for _, exhausted := range []string{"instances", "watches"} {
		t.Run(exhausted, func(t *testing.T) {
			limit(exhausted, 0)
			n := newFixture(t, "10-bridge.conflist", conflist)
			n.running(n.agent())
			n.until(n.asWanted)
			for range 3 {
				check.OK(t, os.Remove(n.path("bin/istio-cni")))
				n.put("net.d/10-bridge.conflist", conflist, 0o644)
				n.until(n.asWanted)
			}
			check.Equal(t, n.count("istio_cni_files_polled"), "1", "istio_cni_files_polled is")
			if got := strings.Count(n.log.String(), "sysctl fs.inotify"); got != 1 {
				t.Errorf("%d hints, want one:\n%s", got, n.log.String())
			}
			limit(exhausted, 1000)
			n.until(func() bool { return n.count("istio_cni_files_polled") == "0" })
			check.OK(t, os.Remove(n.path("bin/istio-cni")))
			n.until(n.asWanted)
		})
	}
}
