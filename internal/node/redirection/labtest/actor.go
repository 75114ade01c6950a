package labtest

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// Actor opens sockets in a namespace, as a user and group.
type Actor struct {
	// Name is for messages.
	Name string
	// Namespace is the file of a network namespace; "" means the caller's.
	Namespace string
	UID, GID  int
	// Mark is the mark of its packets. Marked actors share their ports (SO_REUSEPORT), like ztunnel's.
	Mark uint32
}

// String names the actor.
func (a Actor) String() string { return fmt.Sprintf("%s (uid %d, gid %d)", a.Name, a.UID, a.GID) }

// do runs fn in the actor's namespace, on a thread whose new sockets belong to the actor.
//
// The owner matches (net/netfilter/xt_owner.c, nft_meta.c) compare f_cred->fsuid and f_cred->fsgid of a socket's file:
// the IDs of the thread in socket(2) or accept(2). Setting only these two keeps the thread's capabilities (except
// those for files), so that an actor other than root may still use IP_TRANSPARENT and SO_MARK, like a container with
// NET_ADMIN, and the thread can return afterwards.
func (a Actor) do(fn func() error) error {
	return netns.Do(a.Namespace, func() error {
		defer func() { _, _ = unix.Setfsuid(0), unix.Setfsgid(0) }()
		if err := errors.Join(unix.Setfsgid(a.GID), unix.Setfsuid(a.UID)); err != nil {
			return fmt.Errorf("becoming %s: %w", a, err)
		}
		// The calls return no error; an impossible ID changes nothing and returns the current one.
		uid, _ := unix.SetfsuidRetUid(-1)
		gid, _ := unix.SetfsgidRetGid(-1)
		if uid != a.UID || gid != a.GID {
			return fmt.Errorf("becoming %s: the kernel set uid %d, gid %d", a, uid, gid)
		}
		return fn()
	})
}

// open is do for a function that opens a socket.
func open[T any](a Actor, fn func() (T, error)) (socket T, err error) {
	err = a.do(func() (err error) {
		socket, err = fn()
		return err
	})
	return socket, err
}

// socketOptions are the options of a proxy with foreign source addresses.
type socketOptions struct {
	transparent, shared bool
	mark                uint32
}

// control is a hook of net.Dialer and net.ListenConfig: it sets the options before the socket is bound.
func (o socketOptions) control(_, _ string, c syscall.RawConn) (err error) {
	failed := c.Control(func(fd uintptr) {
		if o.transparent { // in IPv6, too, by this option of SOL_IP
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		}
		if o.shared {
			err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
		}
		if o.mark != 0 {
			err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(o.mark)))
		}
	})
	return errors.Join(failed, err)
}
