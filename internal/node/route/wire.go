package route

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Wire makes a pair of virtual interfaces between the current namespace and another, which the open file is of. Both ends
// are down.
func Wire(name, peer string, other int) error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: peer, PeerNamespace: netlink.NsFd(other)}); err != nil {
		return fmt.Errorf("making interfaces %q and %q: %w", name, peer, err)
	}
	return nil
}

// Up gives an interface of the current namespace addresses and switches it on. An IPv6 address counts at once, without the
// kernel asking whether somebody else has it.
func Up(name string, addresses ...netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("looking for interface %q: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("switching interface %q on: %w", name, err)
	}
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a.String())
		if err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
		if a.Addr().Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, address); err != nil {
			return fmt.Errorf("giving interface %q address %s: %w", name, a, err)
		}
	}
	return nil
}

// Default sends all traffic of the current namespace that has no other way to a gateway.
func Default(gateways ...netip.Addr) error {
	for _, gateway := range gateways {
		if err := netlink.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("adding a default route by %s: %w", gateway, err)
		}
	}
	return nil
}
