package route

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// The netlink package's functions open a socket for each request, on the calling thread and so in its namespace. A
// netlink.Handle would keep a socket, but this package sends too few requests to gain from it.

// The netlink package determines the byte order at its first use, without a lock. This call precedes all goroutines.
var _ = nl.NativeEndian()

// maxObjects bounds the objects of one listing: root in a namespace can add any number of addresses, routes and policy
// rules.
var maxObjects = 1 << 16 //nolint:gochecknoglobals // a constant but for a test

// list returns the objects of a family whose messages begin with a struct rtmsg (linux/rtnetlink.h), including policy rules, whose
// struct fib_rule_hdr (linux/fib_rules.h) has the same layout. It skips an object if parse returns false.
func list[T any](f ruleset.Family, get uint16, what string, parse func(*nl.RtMsg, []syscall.NetlinkRouteAttr) (T, bool)) ([]T, error) {
	head := nl.RtMsg{RtMsg: unix.RtMsg{Family: nlFamily(f)}}
	all, err := nfnetlink.List(unix.NETLINK_ROUTE, get, head.Serialize(), maxObjects, func(message []byte) (one T, wanted bool, err error) {
		head, attributes, err := parseHead(message)
		if err == nil {
			one, wanted = parse(head, attributes)
		}
		return one, wanted, err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the %s %s: %w", f, what, err)
	}
	return all, nil
}

func parseHead(message []byte) (*nl.RtMsg, []syscall.NetlinkRouteAttr, error) {
	if len(message) < unix.SizeofRtMsg {
		return nil, nil, errors.New("the kernel's message is too short")
	}
	attributes, err := nl.ParseRouteAttr(message[unix.SizeofRtMsg:])
	return nl.DeserializeRtMsg(message), attributes, err
}

// explain adds the cause and a remedy to an errno.
func explain(f ruleset.Family, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENETDOWN):
		return fmt.Errorf("%w: lo is down; bring it up first: ip link set lo up", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed in the namespace", err)
	case f == ruleset.IPv6 && !LoopbackHasIPv6():
		return fmt.Errorf("%w: %s", err, v6Off(ipv6Settings()))
	}
	return err
}

// ipv6Settings returns the IPv6 sysctls of the calling thread's namespace.
func ipv6Settings() fs.FS { return os.DirFS("/proc/sys/net/ipv6") }

// kernelHasIPv6 is set once the kernel is known to have IPv6, which it keeps: the first look at the sysctls of a new namespace is slow.
var kernelHasIPv6 atomic.Bool //nolint:gochecknoglobals // a fact about the kernel

// KernelHasIPv6 reports whether the kernel has IPv6, even if it is disabled on interfaces.
func KernelHasIPv6() bool {
	if kernelHasIPv6.Load() {
		return true
	}
	_, err := fs.Stat(ipv6Settings(), ".")
	kernelHasIPv6.Store(err == nil)
	return err == nil
}

// LoopbackHasIPv6 reports whether lo may have IPv6 addresses and routes in the calling thread's namespace.
func LoopbackHasIPv6() bool { return v6Off(ipv6Settings()) == "" }

// v6Off returns why lo has no IPv6, with a remedy, or "" if it has IPv6. settings are the sysctls of the calling thread's
// namespace.
func v6Off(settings fs.FS) string {
	if _, err := fs.Stat(settings, "."); err != nil {
		return "the kernel has no IPv6 (it may have been started with ipv6.disable=1); " +
			"turn it on or redirect IPv4 only"
	}
	// The kernel uses the interface's own setting; writing to "all" sets it on every interface.
	value, err := fs.ReadFile(settings, "conf/lo/disable_ipv6")
	if err == nil && strings.TrimSpace(string(value)) == "1" {
		return "IPv6 is disabled on lo; set net.ipv6.conf.lo.disable_ipv6=0 in the namespace or redirect IPv4 only"
	}
	return ""
}
