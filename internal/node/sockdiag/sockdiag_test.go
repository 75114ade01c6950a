package sockdiag_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// listen opens a listening socket. If v6only is 1, it accepts only IPv6.
func listen(t *testing.T, network, address string, v6only int) {
	t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if failed := c.Control(func(fd uintptr) {
			if network == "tcp6" {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, v6only)
			}
		}); failed != nil {
			return failed
		}
		return err
	}}
	l, err := config.Listen(context.WithoutCancel(t.Context()), network, address)
	check.OK(t, err)
	t.Cleanup(func() { _ = l.Close() })
}

// listenMapped opens an IPv6 socket of an IPv4 address, as programs in Java do.
func listenMapped(t *testing.T, port int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.OK(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	check.OK(t, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0))
	check.OK(t, unix.Bind(fd, &unix.SockaddrInet6{Port: port, Addr: netip.MustParseAddr("::ffff:127.0.0.1").As16()}))
	check.OK(t, unix.Listen(fd, 1))
}

// TestListeners_Found: a connection is no listener.
func TestListeners_Found(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
	space := netnstest.Open(t, path)
	var all []sockdiag.Listener
	check.OK(t, space.Do(func() (err error) {
		listen(t, "tcp4", "127.0.0.1:15001", 0)
		listen(t, "tcp4", "0.0.0.0:15006", 0)
		listen(t, "tcp6", "[::]:15021", 0)
		listen(t, "tcp6", "[::]:15090", 1)
		listenMapped(t, 15091)
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp4", "127.0.0.1:15001")
		if err != nil {
			return err
		}
		defer c.Close() //nolint:errcheck // the end of the test
		all, err = sockdiag.Listening()
		return err
	}))
	if len(all) != 5 || slices.ContainsFunc(all, func(l sockdiag.Listener) bool { return l.UID != uint32(os.Getuid()) }) {
		t.Errorf("got %+v", all)
	}
	for to, want := range map[string]bool{
		"127.0.0.1:15001": true, "127.0.0.2:15001": false, "[::1]:15001": false,
		"127.0.0.1:15006": true, "10.0.0.1:15006": true, "[::1]:15006": false,
		"127.0.0.1:15021": true, "[::1]:15021": true,
		"127.0.0.1:15090": false, "[::1]:15090": true,
		"127.0.0.1:15091": true, "127.0.0.2:15091": false, "[::1]:15091": false,
		"127.0.0.1:1": false,
	} {
		address := netip.MustParseAddrPort(to)
		check.Equal(t, slices.ContainsFunc(all, func(l sockdiag.Listener) bool { return l.Accepts(address) }), want, to, "accepted")
	}
}
