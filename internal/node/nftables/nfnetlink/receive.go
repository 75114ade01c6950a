package nfnetlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// receive reads one datagram and calls each with every message of objects in it. It reports whether the datagram
// contains the end of a dump. It drops answers to older requests, and stops at an error of the callback.
func (c *Conn) receive(each func(raw) error) (bool, error) {
	data, err := c.datagram(0)
	if err != nil {
		return false, err
	}
	for len(data) > 0 {
		m, rest, err := next(data)
		if err != nil {
			return false, err
		}
		data = rest
		if m.sequence != c.sequence {
			continue
		}
		c.interrupted = c.interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
		switch m.kind {
		case unix.NLMSG_DONE:
			return true, doneError(m.payload)
		case unix.NLMSG_ERROR:
			return true, readError(m.payload).asError()
		case unix.NLMSG_NOOP:
		default:
			if err := each(m); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

func (c *Conn) datagram(flags int) ([]byte, error) {
	for {
		n, _, got, from, err := unix.Recvmsg(c.fd, c.buffer[:], nil, flags)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, fmt.Errorf("reading the kernel's answer: %w", err)
		case got&unix.MSG_TRUNC != 0:
			return nil, fmt.Errorf("reading the kernel's answer: it is longer than %d bytes", len(c.buffer))
		}
		// Any process may send to a netlink socket. Only the kernel has port 0.
		if sender, ok := from.(*unix.SockaddrNetlink); ok && sender.Pid == 0 {
			return c.buffer[:n], nil
		}
	}
}

// raw is a message with its headers.
type raw struct {
	kind, flags uint16
	sequence    uint32
	payload     []byte
}

var errBroken = errors.New("the kernel's answer is broken")

func next(data []byte) (raw, []byte, error) {
	if len(data) < unix.NLMSG_HDRLEN {
		return raw{}, nil, errBroken
	}
	n := int(binary.NativeEndian.Uint32(data))
	if n < unix.NLMSG_HDRLEN || n > len(data) {
		return raw{}, nil, errBroken
	}
	m := raw{
		kind: binary.NativeEndian.Uint16(data[4:]), flags: binary.NativeEndian.Uint16(data[6:]),
		sequence: binary.NativeEndian.Uint32(data[8:]), payload: data[unix.NLMSG_HDRLEN:n],
	}
	return m, data[min((n+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(data)):], nil
}

// object parses a message that has attributes after its headers.
func object(r raw) (Message, error) {
	if len(r.payload) < headers-unix.NLMSG_HDRLEN {
		return Message{}, errBroken
	}
	m := Message{Type: r.kind, Family: r.payload[0], Attributes: r.payload[headers-unix.NLMSG_HDRLEN:]}
	if err := m.Attributes.Check(); err != nil {
		return Message{}, fmt.Errorf("%w: %w", errBroken, err)
	}
	return m, nil
}

// doneError reads the end of a dump, which holds a negative errno after a failure.
func doneError(payload []byte) error {
	if len(payload) < 4 {
		return nil
	}
	return refusal{errno: errnoOf(payload)}.asError()
}

func errnoOf(payload []byte) unix.Errno {
	return unix.Errno(-binary.NativeEndian.Uint32(payload)) // two's complement
}

// refusal is a struct nlmsgerr with its attributes: errno, the refused message, the text, and the offset in the message.
type refusal struct {
	errno    unix.Errno
	sequence uint32
	text     string
	offset   int // offset of the wrong attribute from the start of the message; 0 if unknown
}

// asError returns nil for an acknowledgement.
func (r refusal) asError() error {
	switch {
	case r.errno == 0:
		return nil
	case r.errno == unix.ERESTART || r.errno == unix.EINTR:
		return fmt.Errorf("%w [%w]", ErrChanged, r.errno)
	case r.text != "":
		return fmt.Errorf("%w (%s)", r.errno, r.text)
	}
	return r.errno
}

// readError reads an error of the kernel, with the attributes of NETLINK_EXT_ACK. Kernels without NETLINK_CAP_ACK repeat
// our message before them.
func readError(payload []byte) refusal {
	const errorLength = 4 + unix.NLMSG_HDRLEN
	if len(payload) < errorLength {
		return refusal{errno: unix.EBADMSG}
	}
	r := refusal{errno: errnoOf(payload), sequence: binary.NativeEndian.Uint32(payload[4+8:])}
	more := Attributes(payload[errorLength:])
	r.text = more.Get(unix.NLMSGERR_ATTR_MSG).Text()
	if at := more.Get(unix.NLMSGERR_ATTR_OFFS).Value; len(at) == 4 {
		r.offset = int(binary.NativeEndian.Uint32(at))
	}
	return r
}

// errUnsettled is the error for a list that changed during each attempt.
var errUnsettled = errors.New("the objects changed at each attempt to list them")

// List returns the parsed objects of a dump by another netlink protocol (NETLINK_ROUTE, …): get is the type of the request, body the
// part after its header. parse receives each message without its header; List leaves out an object for which it returns false. Above
// limit objects the error is ErrUninspectable. Then, and after an error of parse, the rest of the list stays in the kernel.
func List[T any](protocol int, get uint16, body []byte, limit int, parse func(message []byte) (T, bool, error)) (all []T, err error) {
	err = complete(func() error {
		all = nil
		seen := 0
		return list(protocol, get, body, func(r raw) error {
			if seen++; seen > limit {
				return fmt.Errorf("%w: it holds more than %d of them", ErrUninspectable, limit)
			}
			one, wanted, broken := parse(r.payload)
			if wanted && broken == nil {
				all = append(all, one)
			}
			return broken
		})
	})
	return all, err
}

// complete repeats a listing while objects change during it, because such a list may lack entries.
func complete(listing func() error) error {
	const attempts = 5
	for range attempts {
		if err := listing(); !errors.Is(err, ErrChanged) {
			return err
		}
	}
	return errUnsettled
}

func list(protocol int, get uint16, body []byte, each func(raw) error) error {
	c, err := open(protocol)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing was written
	var b Buffer
	at := c.header(&b, get, unix.NLM_F_DUMP)
	b.data = append(b.data, body...)
	finish(&b, at)
	if err := c.send(b.data); err != nil {
		return err
	}
	return c.collect(context.Background(), each)
}

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
