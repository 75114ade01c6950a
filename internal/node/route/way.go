package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Way is the route of the namespace's packets to an address.
type Way struct {
	// Link is the outgoing interface, which is the loopback device for the namespace's own addresses.
	Link string
	// Source is the default source address.
	Source netip.Addr
	// Local reports that the address is the namespace's own, Astray that the loopback device leads there though it is not.
	Local, Astray bool
}

// Flow has the selectors of policy rules besides addresses. The zero value of a field except UID means unset.
type Flow struct {
	Protocol            uint8
	Source, Destination uint16 // ports
	UID                 uint32
}

// EndError means that the namespace has no route to an address. Errno is the error of a connect to the address.
type EndError struct {
	To    netip.Addr
	Errno unix.Errno
}

// ends has a text for each error with which routes and policy rules refuse packets (fib_props; fib4_rule_action).
var ends = map[unix.Errno]string{ //nolint:gochecknoglobals // a constant table
	unix.EINVAL:       "a blackhole route or policy rule ends the way to %s",
	unix.EHOSTUNREACH: "an unreachable route ends the way to %s",
	unix.ENETUNREACH:  "no route leads to %s, a policy rule makes it unreachable, or it is no address of one host",
	unix.EACCES:       "a prohibit route or policy rule ends the way to %s",
}

// Error names what ends the way, and the error of a connect.
func (e *EndError) Error() string {
	return fmt.Sprintf(ends[e.Errno]+" (%s: %s)", e.To, unix.ErrnoName(e.Errno), e.Errno.Error())
}

// WayTo returns the way of packets without a mark. It uses the kernel's lookup for connect(2). The error is an *EndError if a route
// or a policy rule ends the way. The address's zone, if any, is the outgoing interface.
func WayTo(to netip.Addr, f Flow) (w Way, err error) {
	found, err := f.lookUp(to, netip.Addr{})
	switch ended := (*EndError)(nil); {
	case err == nil && to.Is4(): // again with the socket's source address (ip_route_connect)
		source := found.source
		found, err = f.lookUp(to, source)
		found.source = source
	case errors.As(err, &ended) && to.Is6():
		found, err = f.lookUpFrom(to, ended)
	}
	if err != nil {
		return w, err
	}
	name, err := LinkName(found.link)
	local := found.kind == unix.RTN_LOCAL
	return Way{Link: name, Source: found.source, Local: local, Astray: found.link == loopback && !local}, err
}

// maxSources bounds the number of source addresses to try.
const maxSources = 16

// lookUpFrom repeats the failed lookup of an IPv6 route with a source address (ip6_dst_lookup_tail). It tries several addresses and
// returns the first route; the kernel may choose another address.
func (f Flow) lookUpFrom(to netip.Addr, ended *EndError) (route, error) {
	own, err := listAddresses6(maxObjects)
	if err != nil {
		return route{}, err
	}
	tried := 0
	for _, a := range own {
		if a.link == loopback || a.prefix.Addr().IsLinkLocalUnicast() || tried == maxSources {
			continue
		}
		tried++
		if found, err := f.lookUp(to, a.prefix.Addr()); err == nil || !errors.As(err, &ended) {
			return found, err
		}
	}
	return route{}, ended
}

// Attributes of linux/rtnetlink.h; of Linux 4.17.
const (
	rtaSport = 28 // RTA_SPORT
	rtaDport = 29 // RTA_DPORT
)

// lookUp looks up a route like "ip route get" (RTM_GETROUTE, rtnetlink(7)), with more selectors than package netlink supports.
func (f Flow) lookUp(to, source netip.Addr) (found route, err error) {
	head := &nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Dst_len: uint8(to.BitLen()), Src_len: uint8(source.BitLen())}} //nolint:gosec // at most 128
	if to.Is6() {
		head.Family = unix.AF_INET6
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, 0)
	request.AddData(head)
	add := func(kind int, value []byte) { request.AddData(nl.NewRtAttr(kind, value)) }
	add(unix.RTA_DST, to.AsSlice())
	add(unix.RTA_UID, binary.NativeEndian.AppendUint32(nil, f.UID))
	if source.IsValid() {
		add(unix.RTA_SRC, source.AsSlice())
	}
	if to.Zone() != "" {
		link, failed := netlink.LinkByName(to.Zone())
		if failed != nil {
			return found, fmt.Errorf("looking up the route to %s: %w", to, failed)
		}
		add(unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(link.Attrs().Index))) //nolint:gosec // it is positive
	}
	if f.Protocol != 0 {
		add(unix.RTA_IP_PROTO, []byte{f.Protocol})
	}
	if f.Source != 0 {
		add(rtaSport, binary.BigEndian.AppendUint16(nil, f.Source))
	}
	if f.Destination != 0 {
		add(rtaDport, binary.BigEndian.AppendUint16(nil, f.Destination))
	}
	if found, err = answerOf(request); err != nil {
		if errno := unix.Errno(0); errors.As(err, &errno) && ends[errno] != "" {
			return found, &EndError{To: to, Errno: errno}
		}
		return found, fmt.Errorf("looking up the route to %s: %w", to, err)
	}
	if many := found.kind == unix.RTN_BROADCAST || found.kind == unix.RTN_MULTICAST; many && f.Protocol == unix.IPPROTO_TCP {
		return found, &EndError{To: to, Errno: unix.ENETUNREACH}
	}
	return found, nil
}

// answerOf returns the route that answers a request.
func answerOf(request *nl.NetlinkRequest) (found route, err error) {
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	for _, one := range answers {
		head, attributes, failed := parseHead(one)
		if failed != nil {
			return found, failed
		}
		found = parseRoute(head, attributes)
	}
	return found, err
}
