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

// passthrough is the source address of the proxy's connections to the app. IPv4 needs none on lo: 127.0.0.6 is in 127.0.0.0/8.
var passthrough = netip.PrefixFrom(redirect.PassthroughAddress(ruleset.IPv6), 128) //nolint:gochecknoglobals // a constant

// loopback is the index of the interface lo, which is the first of every namespace (LOOPBACK_IFINDEX, include/net/flow.h).
const loopback = 1

// address is one of an interface.
type address struct {
	link   int
	prefix netip.Prefix
}

// Addresses returns every address of every interface in the order in which the kernel lists them, which is all IPv4
// addresses before all IPv6 addresses, each by interface. An IPv4 address in IPv6 form is given as IPv4. The interfaces
// are not listed.
func Addresses() ([]netip.Addr, error) {
	found, err := listAddresses(netlink.FAMILY_ALL)
	var all []netip.Addr
	for _, a := range found {
		all = append(all, a.prefix.Addr())
	}
	return all, err
}

func listAddresses(family int) ([]address, error) {
	all, err := list(unix.RTM_NEWADDR, nl.NewIfAddrmsg(family), parseAddress)
	if err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	return all, nil
}

// parseAddress reads a struct ifaddrmsg and its attributes (linux/if_addr.h). IFA_ADDRESS is the address, but that of the
// other end where there is an IFA_LOCAL.
func parseAddress(message []byte) (found address, wanted bool, err error) {
	var ip netip.Addr
	bits := 0
	if len(message) >= unix.SizeofIfAddrmsg {
		head := nl.DeserializeIfAddrmsg(message)
		found.link, bits = int(head.Index), int(head.Prefixlen)
		attributes, _ := nl.ParseRouteAttr(message[head.Len():]) // none if they are cut off
		for _, a := range attributes {
			if kind := a.Attr.Type; kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !ip.IsValid() {
				ip, _ = netip.AddrFromSlice(a.Value)
			}
		}
	}
	if !ip.IsValid() {
		return found, false, fmt.Errorf("reading an address of interface %d: %x", found.link, message)
	}
	if ip.Is4In6() {
		bits = max(bits-(ip.BitLen()-32), 0)
	}
	found.prefix = netip.PrefixFrom(ip.Unmap(), bits)
	return found, true, nil
}

// findPassthrough returns the passthrough address on lo, of which the prefix can be shorter than 128, or the zero Prefix.
func findPassthrough() (netip.Prefix, error) {
	all, err := listAddresses(netlink.FAMILY_V6)
	for _, a := range all {
		if a.link == loopback && a.prefix.Addr() == passthrough.Addr() {
			return a.prefix, err
		}
	}
	return netip.Prefix{}, err
}

func checkPassthrough() ([]string, error) {
	there, err := findPassthrough()
	if err != nil || there.IsValid() {
		return nil, err
	}
	return []string{fmt.Sprintf("address %s on lo is missing", passthrough)}, nil
}

// addPassthrough leaves an address that is there as it is, also one with another prefix, and requests no change then.
func addPassthrough() error {
	there, err := findPassthrough()
	if err != nil || there.IsValid() {
		return err
	}
	err = netlink.AddrAdd(nil, netlinkAddress())
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("adding %s to lo: %w", passthrough, explain(ruleset.IPv6, err))
	}
	return nil
}

// removePassthrough removes the address with this prefix only.
func removePassthrough() error {
	err := netlink.AddrDel(nil, netlinkAddress())
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("removing %s from lo: %w", passthrough, explain(ruleset.IPv6, err))
	}
	return nil
}

func netlinkAddress() *netlink.Addr {
	bits := passthrough.Addr().BitLen()
	return &netlink.Addr{
		LinkIndex: loopback,
		IPNet:     &net.IPNet{IP: passthrough.Addr().AsSlice(), Mask: net.CIDRMask(passthrough.Bits(), bits)},
	}
}
