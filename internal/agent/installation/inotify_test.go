package installation_test

import (
	"os"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
)

// TestRunWithoutInotify installs and heals while the user has no inotify instance, or no watch, left, and goes back when it
// has. The limits are those of a user namespace of its own.
func TestRunWithoutInotify(t *testing.T) {
	if !hostfstest.InotifyLimits(t) {
		return
	}
	for name, limits := range map[string][2]int{"no instance": {0, 1000}, "no watch": {1000, 0}} {
		t.Run(name, func(t *testing.T) {
			hostfstest.LimitInotify(t, limits[0], limits[1])
			n := newNode(t, "10-bridge.conflist", conflist)
			n.running(n.agent())
			n.until(n.asWanted)
			for range 3 {
				must(t, os.Remove(n.path("bin/istio-cni")))
				n.put("net.d/10-bridge.conflist", conflist, 0o644)
				n.until(n.asWanted)
			}
			if got := n.count("istio_cni_files_polled"); got != "1" {
				t.Errorf("istio_cni_files_polled is %s, want 1", got)
			}
			if got := strings.Count(n.log.String(), "sysctl fs.inotify"); got != 1 {
				t.Errorf("%d hints, want one:\n%s", got, n.log.String())
			}
			hostfstest.LimitInotify(t, 1000, 1000)
			n.until(func() bool { return n.count("istio_cni_files_polled") == "0" })
			must(t, os.Remove(n.path("bin/istio-cni")))
			n.until(n.asWanted)
		})
	}
}
