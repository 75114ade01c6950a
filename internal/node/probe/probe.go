// Package probe tests with a real connection whether a network namespace redirects traffic to the sidecar.
//
// It promises to change nothing, to open every socket in the given namespace, and to end with its context. It
// needs no privileges, but must run as the proxy's user: only the proxy's connections are redirected over
// loopback.
//
// Start at Redirection.
package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// Redirection is one probe: a connection from this process, which runs as the proxy, to a foreign address on lo must arrive
// at the proxy's inbound port. The probe listens in place of the proxy and checks the connection's original destination.
//
//	127.0.0.1:0 → 127.0.0.6:15002   OUTPUT → ISTIO_OUTPUT → (uid of the proxy, over lo) → ISTIO_IN_REDIRECT → 127.0.0.1:15006
type Redirection struct {
	// Namespace is the namespace. The caller keeps it open.
	Namespace *netns.Namespace
	// Listeners are the ports of the proxy. One of them may be in use.
	Listeners []uint16
	// Port is the dialled port. No process may listen on it.
	Port uint16
}

// dialEvery is the pause between two attempts.
const dialEvery = time.Second

// loopback is the address at which the probe listens and from which it dials.
func loopback(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// Run returns nil when the probe has seen a redirected connection of the family. Otherwise it retries until the context
// ends, and returns the context's cause with the last failure to connect.
func (r Redirection) Run(ctx context.Context, f ruleset.Family) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	seen := make(chan struct{}, 1)
	// All sockets are opened on the thread that is in the namespace.
	return r.Namespace.Do(func() error {
		if err := r.listen(ctx, f, seen); err != nil {
			return err
		}
		return r.dial(ctx, f, seen)
	})
}

// listen opens the proxy's two ports until the context ends. One port may be in use because the connection may arrive at the other.
func (r Redirection) listen(ctx context.Context, f ruleset.Family, seen chan<- struct{}) error {
	config := ListenConfig([2]int{unix.SOL_SOCKET, unix.SO_REUSEADDR}, [2]int{unix.SOL_SOCKET, unix.SO_REUSEPORT})
	var errs []error
	for _, port := range r.Listeners {
		l, err := config.Listen(ctx, "tcp", netip.AddrPortFrom(loopback(f), port).String())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		context.AfterFunc(ctx, func() { _ = l.Close() })
		go r.accept(l, seen)
	}
	if len(errs) == len(r.Listeners) {
		return fmt.Errorf("listening in the proxy's place: %w", errors.Join(errs...))
	}
	return nil
}

// ListenConfig enables options of a listener, each a level and a name of setsockopt(2). Multipath TCP is off: the kernel returns
// no original destination for its connections, and Linux 5.6 to 5.16 refuse transparent sockets with it.
func ListenConfig(options ...[2]int) *net.ListenConfig {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		failed := c.Control(func(fd uintptr) {
			for _, o := range options {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), o[0], o[1], 1))
			}
		})
		return errors.Join(failed, err)
	}}
	config.SetMultipathTCP(false)
	return &config
}

// accept answers every connection with its original destination port as decimal text, like the reference's listener. It
// ignores connections to other ports than the probe's.
func (r Redirection) accept(l net.Listener, seen chan<- struct{}) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		original, err := OriginalDestination(conn.(*net.TCPConn)) //nolint:forcetypeassert // the listener is a TCP listener
		if err == nil {
			_, _ = fmt.Fprint(conn, original.Port())
		}
		_ = conn.Close()
		if original.Port() == r.Port {
			select {
			case seen <- struct{}{}:
			default: // already reported
			}
		}
	}
}

// dial connects once a second until the probe is seen or the context ends.
func (r Redirection) dial(ctx context.Context, f ruleset.Family, seen <-chan struct{}) error {
	target := netip.AddrPortFrom(redirect.PassthroughAddress(f), r.Port).String()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(loopback(f), 0)), Timeout: dialEvery}
	ticker := time.NewTicker(dialEvery)
	defer ticker.Stop()
	var last error
	for {
		conn, err := dialer.DialContext(ctx, "tcp", target)
		if err == nil {
			_ = conn.Close()
		} else if !expired(ctx) {
			last = err
		}
		select {
		case <-seen:
			return nil
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), last)
		}
	}
}

// expired reports whether the context has ended or its deadline has passed. A dial can fail at the deadline before ctx.Err is
// set, and that failure must not replace the last one.
func expired(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline) //nolint:forbidigo // the context's own clock
}

// OriginalDestination returns the address that a client connected to, before any redirection (SO_ORIGINAL_DST of
// linux/netfilter_ipv4.h, IP6T_SO_ORIGINAL_DST of linux/netfilter_ipv6/ip6_tables.h). Without an entry of connection tracking
// no rule changed the address, so it is the connection's local address. This is always the case under TPROXY.
func OriginalDestination(conn *net.TCPConn) (netip.AddrPort, error) {
	const soOriginalDst = 80
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	at, _ := conn.LocalAddr().(*net.TCPAddr) // the zero address for nil
	local := netip.AddrPortFrom(at.AddrPort().Addr().Unmap(), at.AddrPort().Port())
	var original netip.AddrPort
	failed := raw.Control(func(fd uintptr) {
		// Only the size of the x/sys types matters here.
		if local.Addr().Is4() { // struct sockaddr_in: family, port in network order, address
			var in *unix.IPv6Mreq
			if in, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); err == nil {
				m := in.Multiaddr
				original = netip.AddrPortFrom(netip.AddrFrom4([4]byte(m[4:8])), binary.BigEndian.Uint16(m[2:]))
			}
			return
		}
		var in6 *unix.IPv6MTUInfo // it starts with struct sockaddr_in6
		if in6, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); err == nil {
			port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, in6.Addr.Port))
			original = netip.AddrPortFrom(netip.AddrFrom16(in6.Addr.Addr), port)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return local, failed
	}
	return original, errors.Join(failed, err)
}
