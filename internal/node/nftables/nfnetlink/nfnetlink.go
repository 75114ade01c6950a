// Package nfnetlink talks to the kernel's netfilter by netlink: messages, dumps, and transactions of nf_tables. [List] reads a dump by
// another netlink protocol.
//
// It promises that a Batch is one transaction of the kernel in one system call, that only its last message requests an
// acknowledgement, and that a refusal names its message. It never enters a namespace (a Conn belongs to the network
// namespace of the thread that opened it), starts no process, and does not interpret the messages.
//
// Start reading at Conn. The protocol is include/uapi/linux/netlink.h and include/uapi/linux/netfilter/nfnetlink.h.
package nfnetlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// headers is the length of a struct nlmsghdr and the following struct nfgenmsg.
const headers = unix.NLMSG_HDRLEN + 4

// receiveBuffer has room for any datagram of the kernel: dumps come in pieces of at most 32 kB.
const receiveBuffer = 1 << 16

// buffers keeps the receive buffers of closed sockets: the audit opens several sockets for each pod.
var buffers = sync.Pool{New: func() any { return new([receiveBuffer]byte) }} //nolint:gochecknoglobals // a cache

// defaultSendBuffer is the number of bytes that fit into a socket's send buffer of the default size.
const defaultSendBuffer = 1 << 16

// receiveTimeout bounds the wait for an answer. The kernel has queued all answers when the send returns.
const receiveTimeout = 10 // seconds

// ErrUnsupported is returned by a kernel without nf_tables.
var ErrUnsupported = errors.New("the kernel has no nf_tables: it needs CONFIG_NF_TABLES and CONFIG_NETFILTER_NETLINK " +
	"(modules nf_tables and nfnetlink)")

// ErrChanged is returned if another program changed the namespace's nf_tables since the generation of a Batch, or
// during a dump. Nothing was written.
var ErrChanged = errors.New("another program changed the rules meanwhile")

// ErrUninspectable is returned if the kernel lists more than the budget of the Conn allows.
var ErrUninspectable = errors.New("the network namespace cannot be inspected")

// Budget bounds dumps because the processes of a pod can fill its namespace.
type Budget struct {
	// Objects is the number of messages in all dumps, Bytes their length.
	Objects, Bytes int
}

// Conn is a netlink socket. It is for one goroutine at a time.
type Conn struct {
	// Budget is shared by all dumps of the Conn. Each object reduces it. Open leaves it zero, which allows no object.
	Budget Budget

	fd       int
	sequence uint32
	buffer   *[receiveBuffer]byte
	// interrupted is set if the kernel's objects changed during a dump.
	interrupted bool
	// Sent, if set, is called with the bytes of every request before the send. Tests count messages with it.
	Sent func([]byte)
}

// Open opens a socket in the network namespace of the calling thread.
func Open() (*Conn, error) {
	c, err := open(unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		err = fmt.Errorf("%w [%w]", ErrUnsupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("opening a netfilter socket: %w", err)
	}
	return c, nil
}

func open(protocol int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, err
	}
	c := &Conn{fd: fd, buffer: buffers.Get().(*[receiveBuffer]byte)} //nolint:forcetypeassert // it holds nothing else
	if err := c.configure(); err != nil {
		return nil, errors.Join(fmt.Errorf("setting up the socket: %w", err), c.Close())
	}
	return c, nil
}

// configure bounds waiting and requests extended ACKs (kernel 4.12) that do not repeat the refused message.
func (c *Conn) configure() error {
	for _, option := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, option, 1); err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
			return err
		}
	}
	return unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: receiveTimeout})
}

// Close closes the socket. Messages are not valid after it.
func (c *Conn) Close() error {
	buffers.Put(c.buffer)
	c.buffer = nil
	return unix.Close(c.fd)
}

// Message is a received message without its headers.
type Message struct {
	Type       uint16
	Family     uint8
	Attributes Attributes
}

// begin adds the headers of a message and returns its offset.
func (c *Conn) begin(b *Buffer, kind, flags uint16, family uint8, resource uint16) int {
	at := c.header(b, kind, flags)
	b.data = append(b.data, family, unix.NFNETLINK_V0)
	b.data = binary.BigEndian.AppendUint16(b.data, resource)
	return at
}

// header adds a struct nlmsghdr, which finish completes, and returns its offset.
func (c *Conn) header(b *Buffer, kind, flags uint16) int {
	c.sequence++
	at := len(b.data)
	b.data = binary.NativeEndian.AppendUint32(b.data, 0)
	b.data = binary.NativeEndian.AppendUint16(b.data, kind)
	b.data = binary.NativeEndian.AppendUint16(b.data, flags|unix.NLM_F_REQUEST)
	b.data = binary.NativeEndian.AppendUint32(b.data, c.sequence)
	b.data = binary.NativeEndian.AppendUint32(b.data, 0)
	return at
}

func finish(b *Buffer, at int) {
	binary.NativeEndian.PutUint32(b.data[at:], uint32(len(b.data)-at)) //nolint:gosec // far below 4 GB
}

// nfTables returns a message type of the nf_tables subsystem.
func nfTables(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

// Generation returns the kernel's generation ID, which each change of the namespace's nf_tables increments. It is never zero.
func (c *Conn) Generation() (uint32, error) {
	found, _, err := c.Get(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, nil)
	if errors.Is(err, unix.EINVAL) {
		// nfnetlink gives this answer for a subsystem that is not loaded.
		err = fmt.Errorf("%w [%w]", ErrUnsupported, err)
	}
	if err != nil {
		return 0, fmt.Errorf("querying the generation of the rules: %w", err)
	}
	generation, _ := found.Get(unix.NFTA_GEN_ID).Uint32()
	return generation, nil
}

// request sends a message of nf_tables with the attributes that fill adds; nil adds none.
func (c *Conn) request(kind, flags uint16, family uint8, fill func(*Buffer)) error {
	var b Buffer
	at := c.begin(&b, nfTables(kind), flags, family, 0)
	if fill != nil {
		fill(&b)
	}
	finish(&b, at)
	request, err := b.Bytes()
	if err != nil {
		return err
	}
	return c.send(request)
}

// Dump calls each with every object of a kind (NFT_MSG_GETTABLE, …) of a family; fill adds attributes that narrow the list
// and may be nil. Dump returns ErrChanged if the kernel could not return one consistent list. It returns ErrUninspectable
// above the Budget, the cause of the context when that ends, and an error of each: then the rest of the list stays in the
// kernel, which answers no other request on this socket, so that the caller can only close the Conn.
func (c *Conn) Dump(ctx context.Context, kind uint16, family uint8, fill func(*Buffer), each func(Message) error) error {
	if err := c.request(kind, unix.NLM_F_DUMP, family, fill); err != nil {
		return err
	}
	return c.collect(ctx, func(r raw) error {
		m, err := object(r)
		if err == nil {
			err = c.charge(m)
		}
		if err == nil {
			err = each(m)
		}
		return err
	})
}

// Get returns one object of a kind (NFT_MSG_GETTABLE, …) of a family, which the attributes of fill name, and false if there is none.
// The next request overwrites the attributes.
func (c *Conn) Get(kind uint16, family uint8, fill func(*Buffer)) (found Attributes, there bool, err error) {
	err = c.request(kind, 0, family, fill)
	for err == nil && !there {
		_, err = c.receive(func(r raw) error {
			m, broken := object(r)
			found, there = m.Attributes, true
			return broken
		})
	}
	if errors.Is(err, unix.ENOENT) {
		return nil, false, nil
	}
	return found, there && err == nil, err
}

// collect reads a dump. It reads an inconsistent dump to its end because the next request needs the socket.
func (c *Conn) collect(ctx context.Context, each func(raw) error) error {
	c.interrupted = false
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		done, err := c.receive(each)
		switch {
		case err != nil:
			return err
		case done && c.interrupted:
			return ErrChanged
		case done:
			return nil
		}
	}
}

// charge subtracts an object from the budget.
func (c *Conn) charge(m Message) error {
	c.Budget.Objects--
	c.Budget.Bytes -= headers + len(m.Attributes)
	if c.Budget.Objects < 0 || c.Budget.Bytes < 0 {
		return ErrUninspectable
	}
	return nil
}

func (c *Conn) send(request []byte) error {
	if c.Sent != nil {
		c.Sent(request)
	}
	if len(request) > defaultSendBuffer {
		// Writing rules needs CAP_NET_ADMIN anyway.
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(request)); err != nil {
			return fmt.Errorf("making room for a request of %d bytes: %w", len(request), err)
		}
	}
	if err := unix.Sendto(c.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("sending %d bytes to the kernel: %w", len(request), err)
	}
	return nil
}
