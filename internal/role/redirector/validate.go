package redirector

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// The validation: a connection from this container, which runs as the proxy, to an address on lo that is not the pod's
// own must be redirected to the proxy's inbound listener. We stand in for the proxy and look at the destination that
// the connection was made for.
//
//	127.0.0.1:0 → 127.0.0.6:15002   OUTPUT → ISTIO_OUTPUT → (uid of the proxy, over lo) → ISTIO_IN_REDIRECT → 127.0.0.1:15006

// dialEvery is the pause between two tries of the probe.
const dialEvery = time.Second

// probeAddresses are, by family, where we listen and dial from, and what we dial.
func probeAddresses(f ruleset.Family) (local, target netip.Addr) {
	if f == ruleset.IPv6 {
		return netip.IPv6Loopback(), netip.MustParseAddr("::6")
	}
	return netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.6")
}

// probe checks every family that is captured.
func (r run) probe(ctx context.Context) error {
	families, err := r.namespace().Families(r.spec)
	if err != nil {
		return r.notRedirected(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.probeTimeout, fmt.Errorf("no redirected connection within %s", r.probeTimeout))
	defer cancel()
	var errs []error
	for _, f := range probed(families) {
		if err := r.probeFamily(ctx, f); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f, err))
			continue
		}
		say(r.stderr, "validation: %s traffic is redirected\n", f)
	}
	if err := errors.Join(errs...); err != nil {
		return r.notRedirected(err)
	}
	return nil
}

// probed lists the families that the pod has and that are captured.
func probed(f redirect.Families) []ruleset.Family {
	var out []ruleset.Family
	if f.HasIPv4 {
		out = append(out, ruleset.IPv4)
	}
	if f.IPv6 == redirect.Captured {
		out = append(out, ruleset.IPv6)
	}
	return out
}

// notRedirected explains to whoever reads the pod's events what this failure means and what to do.
func (r run) notRedirected(cause error) error {
	return fmt.Errorf(`error: traffic of this pod is not redirected to the sidecar: %w

If redirection is set up by the istio-cni plugin, the pod most likely started before the plugin was in this node's
CNI configuration (a new node, or a restart of the node agent). The pod must be created again, or repaired:
  - the node agent does either by itself when cni.repair is enabled (cni.repair.repairPods or cni.repair.deletePods);
  - by hand: kubectl delete pod.
The probe only works as the proxy's user: it ran as uid %d gid %d, the rules exempt uids %v gids %v`,
		cause, os.Getuid(), os.Getgid(), r.spec.UIDs, r.spec.GIDs)
}

// probeFamily listens as the proxy would and dials until a redirected connection comes in.
func (r run) probeFamily(ctx context.Context, f ruleset.Family) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	seen := make(chan uint16)
	// All sockets are made on the thread that is in the namespace.
	return netns.Do(r.netns, func() error {
		closeAll, err := r.listen(ctx, f, seen)
		if err != nil {
			return err
		}
		defer closeAll()
		return r.dial(ctx, f, seen)
	})
}

// listen opens the proxy's two ports. One that is taken is tolerated: the probe may come in at the other.
func (r run) listen(ctx context.Context, f ruleset.Family, seen chan<- uint16) (closeAll func(), err error) {
	local, _ := probeAddresses(f)
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return reuse(c) }}
	var open []net.Listener
	var errs []error
	for _, port := range []uint16{r.spec.OutboundPort, r.spec.InboundPort} {
		l, err := config.Listen(ctx, "tcp", netip.AddrPortFrom(local, port).String())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		open = append(open, l)
		go accept(ctx, l, f, seen)
	}
	closeAll = func() {
		for _, l := range open {
			_ = l.Close()
		}
	}
	if len(open) == 0 {
		return closeAll, fmt.Errorf("listening in the proxy's place: %w", errors.Join(errs...))
	}
	return closeAll, nil
}

func reuse(c syscall.RawConn) error {
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	})
	return errors.Join(ctlErr, err)
}

// accept tells the original destination port of every connection, on the channel and, as decimal text, to the client.
func accept(ctx context.Context, l net.Listener, f ruleset.Family, seen chan<- uint16) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		port, err := originalPort(conn, f)
		if err == nil {
			_, _ = fmt.Fprint(conn, port)
		}
		_ = conn.Close()
		select {
		case seen <- port:
		case <-ctx.Done():
			return
		}
	}
}

// originalPort asks the kernel where the connection was going before it was redirected (SO_ORIGINAL_DST,
// include/uapi/linux/netfilter_ipv4.h, and IP6T_SO_ORIGINAL_DST, include/uapi/linux/netfilter_ipv6/ip6_tables.h).
func originalPort(conn net.Conn, f ruleset.Family) (port uint16, err error) {
	const soOriginalDst = 80
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return 0, errors.New("not a TCP connection")
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		if f == ruleset.IPv6 {
			// A struct sockaddr_in6 comes back, which has the port where the first fields of this type are.
			var info *unix.IPv6MTUInfo
			if info, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, soOriginalDst); err == nil {
				port = binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, info.Addr.Port))
			}
			return
		}
		// A struct sockaddr_in: family, port in network order, address.
		var addr *unix.IPv6Mreq
		if addr, err = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, soOriginalDst); err == nil {
			port = uint16(addr.Multiaddr[2])<<8 | uint16(addr.Multiaddr[3])
		}
	})
	return port, errors.Join(ctlErr, err)
}

// dial probes once a second until the answer is there or the time is up.
func (r run) dial(ctx context.Context, f ruleset.Family, seen <-chan uint16) error {
	local, target := probeAddresses(f)
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0)), Timeout: dialEvery}
	ticker := time.NewTicker(dialEvery)
	defer ticker.Stop()
	var last error
	for {
		conn, err := dialer.DialContext(ctx, "tcp", netip.AddrPortFrom(target, r.probePort).String())
		if err == nil {
			_ = conn.Close()
		} else if ctx.Err() == nil {
			last = err
		}
		if done := r.await(ctx, seen, ticker.C); done {
			return nil
		}
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), last)
		}
	}
}

// await reports whether the probe came in before the next try is due. Connections for other ports are somebody else's.
func (r run) await(ctx context.Context, seen <-chan uint16, next <-chan time.Time) bool {
	for {
		select {
		case port := <-seen:
			if port == r.probePort {
				return true
			}
		case <-next:
			return false
		case <-ctx.Done():
			return false
		}
	}
}
