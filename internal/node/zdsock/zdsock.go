// Package zdsock carries packets with at most one descriptor over a unix socket (SOCK_SEQPACKET), as ztunnel and the agent do.
//
// It promises that a packet arrives whole or is an error; that a sender never waits for the other side; that each received descriptor
// is the caller's or closed; and that only root's processes are accepted, whatever the socket's mode. It knows nothing of the packets'
// content.
//
// Start reading at Listen and Conn.
package zdsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/socketfile"
)

// MaxPacket is the size of the largest packet.
const MaxPacket = zds.MaxSize

const network = "unixpacket"

var (
	// ErrPeer means that a process of another user than root has connected. Its connection is closed.
	ErrPeer = errors.New("the peer is not root")
	// ErrFull means that the other side has too many packets that it has not read.
	ErrFull = errors.New("the other side does not read")
	// ErrWaiting means that a packet of the other side waits to be read, which would be taken for an answer.
	ErrWaiting = errors.New("the other side has sent a packet without a request")
)

// Listener is a listening socket with its file.
type Listener struct{ *socketfile.Socket }

// Listen binds the socket for root alone, in place of a stale one, and makes its directory. The error is socketfile.ErrServed for
// a socket that another process serves.
func Listen(ctx context.Context, path string) (Listener, error) {
	s, err := socketfile.Bind(ctx, socketfile.Options{Network: network, Path: path, DirMode: 0o755, Mode: 0o600})
	return Listener{s}, err
}

// Accept waits for a connection. After ErrPeer, the next one can be accepted.
func (l Listener) Accept() (*Conn, error) {
	conn, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	peer, err := agentapi.Peer(conn)
	if err == nil && peer.Uid != 0 {
		err = fmt.Errorf("%w, but user %d", ErrPeer, peer.Uid)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return newConn(conn)
}

// Dial connects to the socket at path.
func Dial(path string) (*Conn, error) {
	conn, err := net.DialUnix(network, nil, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, err
	}
	return newConn(conn)
}

// Conn is a connection. One goroutine may receive while another one sends. After Close both return net.ErrClosed.
type Conn struct {
	*net.UnixConn

	raw syscall.RawConn
}

func newConn(conn *net.UnixConn) (*Conn, error) {
	raw, err := conn.SyscallConn()
	return &Conn{conn, raw}, err
}

// NoDescriptor is the descriptor of a packet without one.
const NoDescriptor = -1

// Send sends a packet with a descriptor or NoDescriptor. It never waits: it returns ErrFull if the packet would have to wait, and
// neither it nor the kernel uses the number of the descriptor once it has returned. The error is ErrWaiting or io.EOF, and nothing is
// sent, if a packet or the end of the other side was there before: then the answer to come could not be told from that packet.
func (c *Conn) Send(packet []byte, descriptor int) error {
	var rights []byte
	if descriptor != NoDescriptor {
		rights = unix.UnixRights(descriptor)
	}
	var inner error
	err := c.raw.Write(func(fd uintptr) bool {
		if inner = unexpected(int(fd)); inner == nil {
			inner = unix.Sendmsg(int(fd), packet, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		}
		return true
	})
	if errors.Is(inner, unix.EAGAIN) {
		inner = ErrFull
	}
	return errors.Join(err, inner)
}

// unexpected looks whether there is something to receive. A call that does not wait is not interrupted (EINTR).
func unexpected(fd int) error {
	n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil
	case err != nil:
		return err
	case n == 0:
		return io.EOF
	}
	return ErrWaiting
}

// Receive waits for a packet, until the read deadline. The descriptor is NoDescriptor or the caller's. The error is io.EOF at the end.
// Any other error may have taken a packet, whose descriptors are closed.
func (c *Conn) Receive(buffer *[MaxPacket]byte) (packet []byte, descriptor int, err error) {
	control := make([]byte, unix.CmsgSpace(4)) // has room for one descriptor, and on some machines for two
	n, controlled, flags, _, err := c.ReadMsgUnix(buffer[:], control)
	descriptors, broken := received(control[:max(controlled, 0)])
	switch {
	case err != nil:
	case broken != nil:
		err = broken
	case flags&unix.MSG_TRUNC != 0:
		err = fmt.Errorf("the packet has more than %d bytes", MaxPacket)
	case flags&unix.MSG_CTRUNC != 0 || len(descriptors) > 1:
		err = errors.New("the packet has more than one descriptor, or the process has too many open files")
	}
	if err != nil {
		for _, fd := range descriptors {
			_ = unix.Close(fd)
		}
		return nil, NoDescriptor, err
	}
	if len(descriptors) == 0 {
		return buffer[:n], NoDescriptor, nil
	}
	return buffer[:n], descriptors[0], nil
}

// received returns the descriptors of a packet's control messages.
func received(control []byte) (descriptors []int, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	for i := range messages {
		some, failed := unix.ParseUnixRights(&messages[i])
		descriptors, err = append(descriptors, some...), errors.Join(err, failed)
	}
	return descriptors, err
}

// CloseDescriptor closes a received descriptor that the caller does not want.
func CloseDescriptor(descriptor int) {
	if descriptor != NoDescriptor {
		_ = unix.Close(descriptor)
	}
}

// Closed reports whether an error only says that the connection or its listener was closed on this side.
func Closed(err error) bool { return errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) }
