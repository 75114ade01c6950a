package labtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// raw opens a socket for packets of an IP protocol to the destination.
func (a Request) raw(ctx context.Context, protocol int) (*net.IPConn, error) {
	network := "ip4:" + strconv.Itoa(protocol)
	if a.To.Addr().Is6() {
		network = "ip6:" + strconv.Itoa(protocol)
	}
	conn, err := open(a.From, func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, a.To.Addr().String()) })
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn.(*net.IPConn), nil
}

// ping waits for an echo. The kernel fills in the checksum of ICMPv6.
func (a Request) ping(ctx context.Context) error {
	if !a.To.Addr().Is6() {
		return fmt.Errorf("pinging %s: only IPv6 is pinged here", a.To.Addr())
	}
	conn, err := a.raw(ctx, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	const request, reply = 128, 129
	// Type, code, checksum (2), identifier (2), sequence number (2).
	if _, err := conn.Write([]byte{request, 0, 0, 0, 0x13, 0x37, 0, 1}); err != nil {
		return err
	}
	buf := make([]byte, 1<<12)
	for {
		n, _, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		if n >= 8 && buf[0] == reply && bytes.Equal(buf[4:8], []byte{0x13, 0x37, 0, 1}) {
			return nil
		}
	}
}

// Stray segments have the source port strayPort, on which nothing listens. The connection that follows one has the
// destination port followUpPort.
const (
	strayPort    = 4711
	followUpPort = 1
)

// Flags of a TCP header (RFC 9293, 3.1).
const (
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

// stray sends the segment and looks for the reset. Then it opens a connection, which always gets an answer, even if
// only a reset: if that answer comes first, the segment gets none.
func (a Request) stray(ctx context.Context) error {
	conn, err := a.raw(ctx, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	source, _ := netip.AddrFromSlice(conn.LocalAddr().(*net.IPAddr).IP)
	followUp := netip.AddrPortFrom(a.To.Addr(), followUpPort)
	if _, err := conn.Write(segment(source.Unmap(), a.To, flagSYN|flagACK)); err != nil {
		return err
	}
	if _, err := conn.Write(segment(source.Unmap(), followUp, flagSYN)); err != nil {
		return err
	}
	buf := make([]byte, 1<<12)
	for {
		// ReadFrom removes the IPv4 header; Read does not.
		n, _, err := conn.ReadFrom(buf)
		if err != nil {
			return fmt.Errorf("waiting for the answer to the connection behind a stray segment: %w", err)
		}
		if n < headerLength || binary.BigEndian.Uint16(buf[2:]) != strayPort {
			continue
		}
		switch binary.BigEndian.Uint16(buf[0:]) {
		case a.To.Port():
			if buf[13]&flagRST != 0 {
				return ErrRefused
			}
		case followUpPort:
			return ErrSilent
		}
	}
}

const headerLength = 20

// segment is a TCP header (RFC 9293, 3.1).
func segment(source netip.Addr, to netip.AddrPort, flags byte) []byte {
	s := make([]byte, headerLength)
	binary.BigEndian.PutUint16(s[0:], strayPort)
	binary.BigEndian.PutUint16(s[2:], to.Port())
	binary.BigEndian.PutUint32(s[4:], 1) // sequence number
	binary.BigEndian.PutUint32(s[8:], 1) // acknowledgement number
	s[12] = headerLength / 4 << 4
	s[13] = flags
	binary.BigEndian.PutUint16(s[14:], 1024) // window

	pseudo := append(source.AsSlice(), to.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, unix.IPPROTO_TCP, 0, headerLength)
	binary.BigEndian.PutUint16(s[16:], checksum(append(pseudo, s...)))
	return s
}

// checksum is the Internet checksum (RFC 1071) of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
