package ztunneltest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// The ports that ztunnel binds in a pod.
const (
	PortOutbound  = 15001
	PortPlaintext = 15006
	PortHBONE     = 15008
	PortDNS       = 15053
)

// mark is on ztunnel's sockets.
const mark = 1337

// Handler gets a connection that the pod's socket with the port has accepted.
type Handler func(uid string, port int, conn net.Conn)

// proxy is what serves a pod.
type proxy struct {
	inode   netns.Inode
	sockets []interface{ Close() error }
}

// add serves a pod, and returns the text of the error, as ztunnel's. It needs the lock.
func (z *Ztunnel) add(r Request) string {
	if before := z.pods[r.UID]; before != nil && before.inode == r.Inode {
		return ""
	}
	z.stop(r.UID)
	p := &proxy{inode: r.Inode}
	if z.o.Bind {
		if r.ns == nil {
			return "failure to process message : no namespace"
		}
		if err := r.ns.Do(func() error { return p.bind(r.UID, z.o.Handle) }); err != nil {
			p.close()
			return fmt.Sprintf("failure to start proxy : %v", err)
		}
	}
	z.pods[r.UID] = p
	return ""
}

// stop ends a pod's proxy. It needs the lock.
func (z *Ztunnel) stop(uid string) {
	if p := z.pods[uid]; p != nil {
		p.close()
		delete(z.pods, uid)
	}
}

func (p *proxy) close() {
	for _, s := range p.sockets {
		_ = s.Close()
	}
}

// bind opens the sockets in the calling thread's namespace: on all addresses but DNS, which is on loopback, of IPv6 only if it has that.
func (p *proxy) bind(uid string, handle Handler) error {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var inner error
		err := raw.Control(func(fd uintptr) { inner = setOptions(int(fd)) })
		return errors.Join(err, inner)
	}}
	listen := func(address string, port int) error {
		l, err := config.Listen(context.Background(), "tcp", fmt.Sprintf("%s:%d", address, port))
		if err == nil {
			p.sockets = append(p.sockets, l)
			go accept(l, func(conn net.Conn) { handle.call(uid, port, conn) })
		}
		return err
	}
	dns := func(address string) error {
		packets, err := config.ListenPacket(context.Background(), "udp", fmt.Sprintf("%s:%d", address, PortDNS))
		if err == nil {
			p.sockets = append(p.sockets, packets)
			err = listen(address, PortDNS)
		}
		return err
	}
	_ = dns("[::1]")
	return errors.Join(listen("", PortHBONE), listen("", PortPlaintext), listen("", PortOutbound), dns("127.0.0.1"))
}

func setOptions(fd int) error {
	_ = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1) // where it is allowed
	return errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark),
	)
}

func accept(l net.Listener, handle func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go handle(conn)
	}
}

func (h Handler) call(uid string, port int, conn net.Conn) {
	defer conn.Close() //nolint:errcheck // nothing to lose
	if h != nil {
		h(uid, port, conn)
	}
}
