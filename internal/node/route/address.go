package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// passthrough is the address the proxy uses as source towards the app, so that rules can tell its connections from
// captured ones. IPv4 needs none on lo: 127.0.0.6 is in 127.0.0.0/8.
var passthrough = netip.PrefixFrom(redirect.PassthroughAddress(ruleset.IPv6), 128) //nolint:gochecknoglobals // a constant

// Addresses gives every address of every interface in the order in which the kernel lists them, which is all IPv4
// addresses before all IPv6 addresses, each by interface. An IPv4 address in IPv6 form is given as IPv4. The interfaces
// are not listed.
func Addresses() ([]netip.Addr, error) {
	list, err := complete(func() (list []netip.Addr, err error) {
		err = eachAddress(netlink.FAMILY_ALL, func(_ int, p netip.Prefix) { list = append(list, p.Addr()) })
		return list, err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	return list, nil
}

// eachAddress reads the addresses of a family, with the index of their interface, as the kernel sends them.
func eachAddress(family int, fn func(link int, address netip.Prefix)) error {
	request := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfAddrmsg(family))
	return dump(request, unix.RTM_NEWADDR, func(message []byte) error {
		link, address, ok := parseAddress(message)
		if !ok {
			return fmt.Errorf("reading an address of interface %d: %x", link, message)
		}
		fn(link, address)
		return nil
	})
}

// parseAddress reads a struct ifaddrmsg and its attributes (linux/if_addr.h). IFA_ADDRESS is the address, but that of the
// other end where there is an IFA_LOCAL.
func parseAddress(message []byte) (link int, address netip.Prefix, ok bool) {
	if len(message) < unix.SizeofIfAddrmsg {
		return 0, netip.Prefix{}, false
	}
	head := nl.DeserializeIfAddrmsg(message)
	attributes, err := nl.ParseRouteAttr(message[head.Len():])
	if err != nil {
		return int(head.Index), netip.Prefix{}, false
	}
	var found netip.Addr
	for _, a := range attributes {
		if kind := a.Attr.Type; kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !found.IsValid() {
			found, ok = netip.AddrFromSlice(a.Value)
		}
	}
	bits := int(head.Prefixlen)
	if found.Is4In6() {
		bits = max(bits-(found.BitLen()-32), 0)
	}
	return int(head.Index), netip.PrefixFrom(found.Unmap(), bits), ok
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
	found, err := complete(func() (found netip.Prefix, err error) {
		err = eachAddress(netlink.FAMILY_V6, func(link int, p netip.Prefix) {
			if p.Addr() == passthrough.Addr() && link == lo.index {
				found = p
			}
		})
		return found, err
	})
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("listing the IPv6 addresses: %w", err)
	}
	return found, nil
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
