// Package sockdiag lists the listening TCP sockets of a network namespace with sock_diag(7), without a program.
//
// It promises a bounded result whatever the processes of the namespace open, and that a dual-stack IPv6 socket accepts both
// families. It never opens a connection and never changes anything.
//
// Start at Listening.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Listener is a listening TCP socket.
type Listener struct {
	// Address is the local address and port. The unspecified address of IPv6 accepts IPv4 as well if Dual is set.
	Address netip.AddrPort
	Dual    bool
	// UID is the user that created the socket, in the user namespace of this process.
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

// maxListeners bounds the result: a process can listen on any number of ports and addresses.
const maxListeners = 1 << 14

// Listening lists the listening TCP sockets of both families in the calling thread's network namespace.
func Listening() (all []Listener, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		some, err := nfnetlink.List(unix.NETLINK_INET_DIAG, unix.SOCK_DIAG_BY_FAMILY, request(family), maxListeners, parse)
		if errors.Is(err, unix.ENOENT) { // the kernel has no inet_diag for the family
			err = fmt.Errorf("the kernel has no sock_diag for TCP (CONFIG_INET_DIAG): %w", err)
		}
		if err != nil {
			return nil, fmt.Errorf("listing the listening sockets: %w", err)
		}
		all = append(all, some...)
	}
	return all, nil
}

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

// parse reads a struct inet_diag_msg with its attributes.
func parse(message []byte) (l Listener, wanted bool, err error) {
	if len(message) < messageSize {
		return l, false, fmt.Errorf("the kernel's message has %d bytes, at least %d are expected", len(message), messageSize)
	}
	address := netip.AddrFrom4([4]byte(message[addrOffset:]))
	if message[0] == unix.AF_INET6 {
		address = netip.AddrFrom16([16]byte(message[addrOffset:])).Unmap()
	}
	const v6Only = 11 // INET_DIAG_SKV6ONLY, linux/inet_diag.h
	attributes := nfnetlink.Attributes(message[messageSize:])
	only := attributes.Get(v6Only).Value
	return Listener{
		Address: netip.AddrPortFrom(address, binary.BigEndian.Uint16(message[portOffset:])),
		Dual:    len(only) > 0 && only[0] == 0, UID: binary.NativeEndian.Uint32(message[uidOffset:]),
	}, true, attributes.Check()
}
