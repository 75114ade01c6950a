package netns_test

import (
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

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
