// Package sockdiag lists the listening TCP sockets of a network namespace by sock_diag(7), without a program.
//
// It promises a bounded answer whatever the processes of the namespace open, and that a dual-stack IPv6 socket counts for both
// families. It never opens a connection and never changes anything.
//
// Start at Listening.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Listener is a listening TCP socket.
type Listener struct {
	// Address is the local address and port. The unspecified address of IPv6 accepts IPv4 as well if Dual is set.
	Address netip.AddrPort
	Dual    bool
	// UID is the user that created the socket, in the initial user namespace of this process.
	UID uint32
}

// Accepts reports whether a connection to an address and port of this host reaches the socket.
func (l Listener) Accepts(to netip.AddrPort) bool {
	own := l.Address.Addr()
	switch {
	case l.Address.Port() != to.Port():
		return false
	case own.Is4() == to.Addr().Is4():
		return own.IsUnspecified() || own == to.Addr()
	}
	return own.Is6() && own.IsUnspecified() && l.Dual
}

// maxListeners bounds the answer: a process can listen on any number of ports and addresses.
const maxListeners = 1 << 14

// ErrTooMany means that the namespace has more listening sockets than are read.
var ErrTooMany = fmt.Errorf("more than %d listening sockets", maxListeners)

// Listening lists the listening TCP sockets of both families in the calling thread's network namespace.
func Listening() (all []Listener, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		some, err := list(family)
		if err != nil {
			return nil, fmt.Errorf("listing the listening sockets: %w", err)
		}
		all = append(all, some...)
	}
	return all, nil
}

// The netlink library determines the byte order at its first use, without a lock: that is before there are goroutines here.
var _ = nl.NativeEndian()

// Sizes and offsets of linux/inet_diag.h: struct inet_diag_req_v2 and struct inet_diag_msg, which share inet_diag_sockid.
const (
	requestSize = 56
	messageSize = 72
	portOffset  = 4
	addrOffset  = 8
	uidOffset   = 64
)

// request is struct inet_diag_req_v2 for the listening sockets of a family.
func request(family uint8) []byte {
	const listening = 10 // TCP_LISTEN, linux/tcp_states.h
	r := make([]byte, requestSize)
	r[0], r[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(r[4:], 1<<listening)
	return r
}

// data is a request's payload.
type data []byte

func (d data) Len() int          { return len(d) }
func (d data) Serialize() []byte { return d }

func list(family uint8) (all []Listener, err error) {
	r := nl.NewNetlinkRequest(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	r.AddData(data(request(family)))
	var broken error
	err = r.ExecuteIter(unix.NETLINK_INET_DIAG, unix.SOCK_DIAG_BY_FAMILY, func(message []byte) bool {
		var one Listener
		if one, broken = parse(message); broken == nil && len(all) == maxListeners {
			broken = ErrTooMany
		}
		all = append(all, one)
		return broken == nil
	})
	if errors.Is(err, unix.ENOENT) { // the kernel has no inet_diag for the family
		err = fmt.Errorf("the kernel has no sock_diag for TCP (CONFIG_INET_DIAG): %w", err)
	}
	return all, errors.Join(err, broken)
}

// parse reads a struct inet_diag_msg with its attributes.
func parse(message []byte) (Listener, error) {
	if len(message) < messageSize {
		return Listener{}, fmt.Errorf("the kernel's message has %d bytes, at least %d are expected", len(message), messageSize)
	}
	address := netip.AddrFrom4([4]byte(message[addrOffset:]))
	if message[0] == unix.AF_INET6 {
		address = netip.AddrFrom16([16]byte(message[addrOffset:]))
	}
	l := Listener{
		Address: netip.AddrPortFrom(address, binary.BigEndian.Uint16(message[portOffset:])),
		UID:     binary.NativeEndian.Uint32(message[uidOffset:]),
	}
	attributes, err := nl.ParseRouteAttr(message[messageSize:])
	if err != nil {
		return Listener{}, fmt.Errorf("reading attributes: %w", err)
	}
	const v6Only = 11 // INET_DIAG_SKV6ONLY, linux/inet_diag.h
	for _, a := range attributes {
		if a.Attr.Type == v6Only && len(a.Value) > 0 {
			l.Dual = a.Value[0] == 0
		}
	}
	return l, nil
}
