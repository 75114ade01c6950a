// Package nfwatch tells that the nf_tables of a network namespace have changed.
//
// It promises one descriptor and a few kilobytes for a Watch, also of the kernel's memory, and no thread; that a change which was
// made after Open returned is reported, also if the kernel dropped its message; and that reports are not closer to each other than
// the interval, however many changes there are. It does not say what has changed, nor by whom: own changes are reported as well.
//
// Start reading at Open.
package nfwatch

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// receiveBuffer is the size of the socket's queue in bytes, as the kernel counts them. A change that finds it full is reported too.
const receiveBuffer = 4096

// Watch is a subscription. It keeps the namespace alive until Close.
type Watch struct {
	socket   *os.File
	raw      syscall.RawConn
	interval time.Duration
	changed  chan struct{}
	closing  chan struct{}
}

// Open subscribes to the changes of a namespace. It needs CAP_NET_ADMIN there.
func Open(in *netns.Namespace, interval time.Duration) (*Watch, error) {
	fd, err := netns.In(in, subscribe)
	if err != nil {
		return nil, fmt.Errorf("watching the nf_tables of %s: %w", in.Inode(), err)
	}
	w := &Watch{
		socket: os.NewFile(uintptr(fd), "nf_tables"), interval: interval,
		changed: make(chan struct{}, 1), closing: make(chan struct{}),
	}
	if w.raw, err = w.socket.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("watching the nf_tables of %s: %w", in.Inode(), err), w.socket.Close())
	}
	go w.run()
	return w, nil
}

// subscribe opens a socket in the namespace of the calling thread.
func subscribe() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return -1, err
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer/2), // the kernel doubles the value
		// Bound, because the kernel leaves out a socket without a port.
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)}),
	)
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// Changed receives a value after a change. One value stands for any number of changes. It is closed after Close.
func (w *Watch) Changed() <-chan struct{} { return w.changed }

// Close ends the Watch. It is called once.
func (w *Watch) Close() {
	close(w.closing)
	_ = w.socket.Close() // nothing was written
}

// run reports changes until Close. While it pauses, the kernel's queue is full at worst.
func (w *Watch) run() {
	defer close(w.changed)
	pause := time.NewTimer(w.interval)
	defer pause.Stop()
	for w.wait() == nil {
		select {
		case w.changed <- struct{}{}:
		default:
		}
		pause.Reset(w.interval)
		select {
		case <-pause.C:
		case <-w.closing:
			return
		}
	}
}

// wait returns when there was a message, and empties the queue. The error means that the socket is closed.
func (w *Watch) wait() error {
	return w.raw.Read(func(fd uintptr) (done bool) {
		for n := 0; ; n++ {
			// The content of a message is dropped. ENOBUFS says that the kernel has dropped some.
			_, _, err := unix.Recvfrom(int(fd), nil, unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS), err == nil:
			default:
				return n > 0
			}
			if n == maxDrained {
				return true
			}
		}
	})
}

// maxDrained bounds the messages that are read at once, if others are queued meanwhile.
const maxDrained = 64
