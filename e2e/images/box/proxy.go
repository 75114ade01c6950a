package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ports of a sidecar.
const (
	outboundPort = 15001
	inboundPort  = 15006
	dnsPort      = 15053
)

// proxy stands in for a sidecar: it forwards HTTP to the original destination and adds a Via header to each response.
// If the destination does not answer, the status is 502. If transparent, the inbound listener accepts connections to
// other addresses than its own (IP_TRANSPARENT, for TPROXY).
func proxy(transparent bool) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	outbound := &side{name: "outbound " + host, port: outboundPort}
	inbound := &side{name: "inbound " + host, port: inboundPort, fromReserved: true, transparent: transparent}
	failed := make(chan error)
	for _, s := range []*side{outbound, inbound} {
		for _, network := range []string{"tcp4", "tcp6"} {
			listener, err := s.listen(network)
			if network == "tcp6" && (errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT)) {
				continue // a pod without IPv6
			}
			if err != nil {
				return err
			}
			go func() { failed <- s.server().Serve(listener) }()
		}
	}
	if err := serveDNS(failed); err != nil {
		return err
	}
	if err := serveStatus(failed); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { wait(); close(ended) }()
	fmt.Println("proxy of", host)
	select {
	case err := <-failed:
		return err
	case <-ended:
		return nil
	}
}

// supervise runs the proxy in a process of its own, like pilot-agent, and does not start it again.
func supervise() error {
	child := exec.CommandContext(context.Background(), "/proc/self/exe", "proxy", "sidecar")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := child.Start(); err != nil {
		return err
	}
	wait()
	return nil
}

// side is one direction of the proxy.
type side struct {
	name        string
	port        uint16
	transparent bool
	// fromReserved makes the proxy connect from 127.0.0.6 or ::6: the rules do not redirect connections from these
	// addresses again.
	fromReserved bool
}

func (s *side) listen(network string) (net.Listener, error) {
	config := net.ListenConfig{Control: func(network, _ string, raw syscall.RawConn) error {
		if !s.transparent {
			return nil
		}
		level, option := unix.SOL_IP, unix.IP_TRANSPARENT
		if network == "tcp6" {
			level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }), err)
	}}
	return config.Listen(context.Background(), network, fmt.Sprintf(":%d", s.port))
}

// destination is the context key of a connection's original destination.
type destination struct{}

func (s *side) server() *http.Server {
	return &http.Server{
		ReadHeaderTimeout: time.Minute,
		ConnContext: func(ctx context.Context, connection net.Conn) context.Context {
			return context.WithValue(ctx, destination{}, s.destination(connection))
		},
		Handler: &httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) {
				to, _ := r.In.Context().Value(destination{}).(netip.AddrPort)
				r.SetURL(&url.URL{Scheme: "http", Host: to.String()})
				r.Out.Host = r.In.Host
			},
			Transport:      &http.Transport{DialContext: s.dial, DisableKeepAlives: true},
			ModifyResponse: func(r *http.Response) error { s.sign(r.Header, r.Request); return nil },
			ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
				s.sign(w.Header(), r)
				w.WriteHeader(http.StatusBadGateway)
				_, _ = fmt.Fprintln(w, err)
			},
		},
	}
}

// sign prepends this proxy to the Via header.
func (s *side) sign(header http.Header, r *http.Request) {
	via := s.name
	if behind := header.Get("Via"); behind != "" {
		via += ", " + behind
	}
	header.Set("Via", via)
	fmt.Println(s.name, "for", r.RemoteAddr, "to", r.URL.Host)
}

// destination returns SO_ORIGINAL_DST of a redirected connection. Any other has its local address: it was accepted by
// TPROXY or made to the proxy itself.
func (s *side) destination(connection net.Conn) netip.AddrPort {
	local := connection.LocalAddr().(*net.TCPAddr).AddrPort()
	if tcp, ok := connection.(*net.TCPConn); ok {
		if to, err := original(tcp, local.Addr().Unmap().Is4()); err == nil {
			return to
		}
	}
	return local
}

// original reads SO_ORIGINAL_DST (linux/netfilter_ipv4.h) or IP6T_SO_ORIGINAL_DST
// (linux/netfilter_ipv6/ip6_tables.h).
func original(connection *net.TCPConn, four bool) (to netip.AddrPort, err error) {
	const soOriginalDst = 80
	raw, err := connection.SyscallConn()
	if err != nil {
		return to, err
	}
	inner := raw.Control(func(fd uintptr) {
		if four {
			var name *unix.IPv6Mreq // as large as a sockaddr_in
			if name, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); err == nil {
				b := name.Multiaddr
				to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3]))
			}
			return
		}
		var info *unix.IPv6MTUInfo // begins with a sockaddr_in6
		if info, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); err == nil {
			p := (*[2]byte)(unsafe.Pointer(&info.Addr.Port))
			to = netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr), uint16(p[0])<<8|uint16(p[1]))
		}
	})
	return to, errors.Join(inner, err)
}

// dial connects to a destination, except to the proxy's own port, which would be an endless loop.
func (s *side) dial(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	if to.Port() == s.port {
		return nil, errors.New("this is the proxy")
	}
	dialer := net.Dialer{Timeout: timeout / 2}
	if s.fromReserved {
		from := netip.MustParseAddr("127.0.0.6")
		if to.Addr().Is6() {
			from = netip.MustParseAddr("::6")
		}
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	return dialer.DialContext(ctx, network, address)
}
