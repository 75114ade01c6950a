package route

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Way is how the namespace sends packets to an address.
type Way struct {
	// Link is the interface that they leave by, lo for the namespace's own addresses.
	Link string
	// Source is the address that they have by default.
	Source netip.Addr
	// Local reports that the address is the namespace's own.
	Local bool
}

// ErrNoRoute says that the namespace sends no packets to the address.
var ErrNoRoute = errors.New("no route")

// WayTo returns the way of packets without a mark, as "ip route get" does (RTM_GETROUTE, rtnetlink(7)). A zone of the address is
// the interface.
func WayTo(to netip.Addr) (w Way, err error) {
	options := &netlink.RouteGetOptions{Oif: to.Zone()}
	routes, err := netlink.RouteGetWithOptions(to.WithZone("").AsSlice(), options)
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return w, fmt.Errorf("%w to %s: %w", ErrNoRoute, to, err)
	}
	found := routes[0]
	link, err := netlink.LinkByIndex(found.LinkIndex)
	if err != nil {
		return w, fmt.Errorf("%w to %s: looking up its interface: %w", ErrNoRoute, to, err)
	}
	source, _ := netip.AddrFromSlice(found.Src)
	return Way{Link: link.Attrs().Name, Source: source.Unmap(), Local: found.Type == unix.RTN_LOCAL}, nil
}
