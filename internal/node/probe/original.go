package probe

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// OriginalDestination returns the address that a client connected to, before any redirection (SO_ORIGINAL_DST of
// linux/netfilter_ipv4.h, IP6T_SO_ORIGINAL_DST of linux/netfilter_ipv6/ip6_tables.h). Without an entry of connection tracking
// no rule changed the address: then it is the connection's local address, as always under TPROXY.
func OriginalDestination(conn *net.TCPConn) (netip.AddrPort, error) {
	const soOriginalDst = 80
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	at, _ := conn.LocalAddr().(*net.TCPAddr) // nil gives the zero address
	local := netip.AddrPortFrom(at.AddrPort().Addr().Unmap(), at.AddrPort().Port())
	var original netip.AddrPort
	failed := raw.Control(func(fd uintptr) {
		// Of the types of x/sys only the size matters.
		if local.Addr().Is4() { // struct sockaddr_in: family, port in network order, address
			var in *unix.IPv6Mreq
			if in, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); err == nil {
				m := in.Multiaddr
				original = netip.AddrPortFrom(netip.AddrFrom4([4]byte(m[4:8])), binary.BigEndian.Uint16(m[2:]))
			}
			return
		}
		var in6 *unix.IPv6MTUInfo // it begins with struct sockaddr_in6
		if in6, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); err == nil {
			port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, in6.Addr.Port))
			original = netip.AddrPortFrom(netip.AddrFrom16(in6.Addr.Addr), port)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return local, failed
	}
	return original, errors.Join(failed, err)
}
