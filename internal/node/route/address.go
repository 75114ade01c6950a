package route

import (
	"bufio"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// passthrough is the source address of the proxy's connections to the app. IPv4 needs none on lo: 127.0.0.6 is in 127.0.0.0/8.
var passthrough = netip.PrefixFrom(redirect.PassthroughAddress(ruleset.IPv6), 128) //nolint:gochecknoglobals // a constant

// loopback is the index of the interface lo, the first interface of every namespace (LOOPBACK_IFINDEX, include/net/flow.h).
const loopback = 1

// address is an address of an interface.
type address struct {
	link   int
	prefix netip.Prefix
}

// Addresses returns the addresses of all interfaces: first IPv4 in the kernel's order for each interface, then IPv6 by interface. It
// converts an IPv4-mapped IPv6 address to IPv4.
func Addresses() ([]netip.Addr, error) {
	found, err := listAddresses()
	var all []netip.Addr
	for _, a := range found {
		all = append(all, a.prefix.Addr())
	}
	return all, err
}

// listAddresses lists the addresses of both families, if possible without the kernel's RTNL mutex. All namespaces share that mutex,
// and a busy node holds it most of the time because every interface that comes or goes waits for RCU with it. A
// request for the addresses of all families takes it, a request for IPv4 does not since Linux 6.9, and the procfs file
// for IPv6 never does.
func listAddresses() ([]address, error) {
	all, err := nfnetlink.List(unix.NETLINK_ROUTE, unix.RTM_GETADDR, nl.NewIfAddrmsg(unix.AF_INET).Serialize(), maxObjects, parseAddress)
	if err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	more, err := listAddresses6(maxObjects - len(all))
	return append(all, more...), err
}

// addresses6 has the IPv6 addresses of the calling thread's namespace. A kernel without IPv6 lacks the file.
const addresses6 = "/proc/thread-self/net/if_inet6"

// listAddresses6 lists at most limit IPv6 addresses, sorted by interface and address because the kernel's order comes from a hash table.
func listAddresses6(limit int) (all []address, err error) {
	file, err := os.Open(addresses6)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	defer file.Close() //nolint:errcheck // only read from
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if len(all) == limit {
			return nil, fmt.Errorf("listing the addresses: %w: it holds more than %d of them", nfnetlink.ErrUninspectable, maxObjects)
		}
		found, err := parseAddress6(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("listing the addresses: %w", err)
		}
		all = append(all, found)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("listing the addresses: %w", err)
	}
	slices.SortFunc(all, func(a, b address) int {
		return cmp.Or(cmp.Compare(a.link, b.link), a.prefix.Addr().Compare(b.prefix.Addr()))
	})
	return all, nil
}

// parseAddress6 reads a line of if_inet6 (net/ipv6/addrconf.c, if6_seq_show): address, interface, length of the prefix, scope,
// flags, all in hexadecimal, and the name of the interface.
func parseAddress6(line string) (found address, err error) {
	fields := strings.Fields(line)
	if len(fields) != 6 {
		return found, fmt.Errorf("reading the address %q", line)
	}
	ip, err := hex.DecodeString(fields[0])
	link, failed := strconv.ParseUint(fields[1], 16, 31)
	bits, wrong := strconv.ParseUint(fields[2], 16, 8)
	if err = errors.Join(err, failed, wrong); err != nil || len(ip) != net.IPv6len || bits > 8*net.IPv6len {
		return found, errors.Join(fmt.Errorf("reading the address %q", line), err)
	}
	return newAddress(int(link), netip.AddrFrom16([net.IPv6len]byte(ip)), int(bits)), nil
}

// newAddress returns an address of an interface. It converts an IPv4-mapped IPv6 address to IPv4.
func newAddress(link int, ip netip.Addr, bits int) address {
	if ip.Is4In6() {
		bits = max(bits-(ip.BitLen()-32), 0)
	}
	return address{link, netip.PrefixFrom(ip.Unmap(), bits)}
}

// parseAddress reads a struct ifaddrmsg and its attributes (linux/if_addr.h). IFA_LOCAL is the address if present; IFA_ADDRESS is
// then the other end's.
func parseAddress(message []byte) (found address, wanted bool, err error) {
	var ip netip.Addr
	bits := 0
	if len(message) >= unix.SizeofIfAddrmsg {
		head := nl.DeserializeIfAddrmsg(message)
		found.link, bits = int(head.Index), int(head.Prefixlen)
		attributes, _ := nl.ParseRouteAttr(message[head.Len():]) // empty if truncated
		for _, a := range attributes {
			if kind := a.Attr.Type; kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !ip.IsValid() {
				ip, _ = netip.AddrFromSlice(a.Value)
			}
		}
	}
	if !ip.IsValid() {
		return found, false, fmt.Errorf("reading an address of interface %d: %x", found.link, message)
	}
	return newAddress(found.link, ip, bits), true, nil
}

// findPassthrough returns the passthrough address on lo, whose prefix can be shorter than 128, or the zero Prefix.
func findPassthrough() (netip.Prefix, error) {
	all, err := listAddresses6(maxObjects)
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

// addPassthrough adds the address. It keeps an existing address, also with another prefix, without a request.
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

// removePassthrough removes the address only if it has this prefix.
func removePassthrough() error {
	err := netlink.AddrDel(nil, netlinkAddress())
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("removing %s from lo: %w", passthrough, explain(ruleset.IPv6, err))
	}
	return nil
}

func netlinkAddress() *netlink.Addr {
	return &netlink.Addr{LinkIndex: loopback, IPNet: netlink.NewIPNet(passthrough.Addr().AsSlice())}
}
