package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// passthrough is the address the proxy uses as source towards the app, so that rules can tell its connections from
// captured ones. IPv4 needs none on lo: 127.0.0.6 is in 127.0.0.0/8.
var passthrough = netip.MustParsePrefix("::6/128") //nolint:gochecknoglobals // a constant

// Addresses gives every address of every interface in the order in which the kernel lists them, which is all IPv4
// addresses before all IPv6 addresses, each by interface. An IPv4 address in IPv6 form is given as IPv4. Nobody asks
// whose they are, so the interfaces are not listed.
func Addresses() ([]netip.Prefix, error) {
	list, err := complete(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	addresses := make([]netip.Prefix, 0, len(list))
	for _, a := range list {
		prefix, ok := toPrefix(a.IPNet)
		if !ok {
			return nil, fmt.Errorf("reading an address of interface %d: %v", a.LinkIndex, a.IPNet)
		}
		addresses = append(addresses, prefix)
	}
	return addresses, nil
}

func toPrefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	address, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if address.Is4In6() {
		bits = max(bits-(address.BitLen()-32), 0)
	}
	return netip.PrefixFrom(address.Unmap(), bits), ok
}

// A loopback is the interface lo of the namespace.
type loopback struct{ index int }

func findLoopback() (loopback, error) {
	link, err := complete(func() (netlink.Link, error) { return netlink.LinkByName("lo") })
	if err != nil {
		return loopback{}, fmt.Errorf("looking for the interface lo: %w", err)
	}
	return loopback{index: link.Attrs().Index}, nil
}

// findPassthrough gives the passthrough address as it is on lo, where its prefix can be wider, or the zero Prefix.
func (lo loopback) findPassthrough() (netip.Prefix, error) {
	list, err := complete(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("listing the IPv6 addresses: %w", err)
	}
	for _, a := range list {
		if prefix, ok := toPrefix(a.IPNet); ok && prefix.Addr() == passthrough.Addr() && a.LinkIndex == lo.index {
			return prefix, nil
		}
	}
	return netip.Prefix{}, nil
}

func (lo loopback) checkPassthrough() ([]string, error) {
	there, err := lo.findPassthrough()
	if err != nil || there.IsValid() {
		return nil, err
	}
	return []string{fmt.Sprintf("address %s on lo is missing", passthrough)}, nil
}

func (lo loopback) addPassthrough() error {
	there, err := lo.findPassthrough()
	if err != nil || there.IsValid() {
		return err
	}
	err = netlink.AddrAdd(nil, lo.netlinkAddress())
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("adding %s to lo: %w", passthrough, explain(ruleset.IPv6, err))
	}
	return nil
}

func (lo loopback) removePassthrough() error {
	there, err := lo.findPassthrough()
	if err != nil || there != passthrough {
		return err
	}
	err = netlink.AddrDel(nil, lo.netlinkAddress())
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("removing %s from lo: %w", passthrough, explain(ruleset.IPv6, err))
	}
	return nil
}

func (lo loopback) netlinkAddress() *netlink.Addr {
	bits := passthrough.Addr().BitLen()
	return &netlink.Addr{
		LinkIndex: lo.index,
		IPNet:     &net.IPNet{IP: passthrough.Addr().AsSlice(), Mask: net.CIDRMask(passthrough.Bits(), bits)},
	}
}
