package nfnetlink

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Join subscribes the Conn to a netfilter multicast group (NFNLGRP_…). Afterwards the Conn is only for Listen. buffer is the size of its
// receive queue in bytes, as the kernel counts them.
func (c *Conn) Join(group, buffer int) error {
	err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	if err = errors.Join(err, unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)); err != nil {
		return fmt.Errorf("joining netfilter group %d with room for %d bytes: %w", group, buffer, err)
	}
	return nil
}

// listenPause bounds the delay until Listen notices the end of its context.
const listenPause = 100 * time.Millisecond

// Listen calls each with every message of the joined groups until ctx ends. It calls lost when the kernel dropped messages
// because the queue was full.
func (c *Conn) Listen(ctx context.Context, each func(Message), lost func()) error {
	for ctx.Err() == nil {
		ready := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}} //nolint:gosec // a descriptor
		n, err := unix.Poll(ready, int(listenPause.Milliseconds()))
		if n == 0 || errors.Is(err, unix.EINTR) {
			continue
		}
		data, err := c.datagram(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			lost()
			continue
		case errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return err
		}
		for len(data) > 0 {
			r, rest, err := next(data)
			if err != nil {
				return err
			}
			data = rest
			if m, err := object(r); err == nil && r.kind >= unix.NLMSG_MIN_TYPE {
				each(m)
			}
		}
	}
	return nil
}
