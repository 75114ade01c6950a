package installation_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestRun_DirectoryRemovedUnderItsMount: a new container mounts the directory of now, also if the removal was earlier than
// the agent's start, as it may have waited for another agent.
func TestRun_DirectoryRemovedUnderItsMount(t *testing.T) {
	for _, name := range []string{"net.d", "bin"} {
		n := newFixture(t)
		host := n.path("host")
		check.OK(t, os.Mkdir(host, 0o755))
		check.OK(t, unix.Mount(host, n.path(name), "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(n.path(name), unix.MNT_DETACH) })
		check.OK(t, os.Remove(host))
		if err := n.agent().Run(t.Context()); !errors.Is(err, installation.ErrGone) || !strings.Contains(err.Error(), n.path(name)) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
