package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// The netlink package's functions open a socket for each request, on the calling thread and so in its namespace. A
// netlink.Handle would keep one, but this package sends too few requests to gain from it.

// The package determines the byte order at its first use, without a lock: that is before there are goroutines here.
var _ = nl.NativeEndian()

// maxObjects bounds the objects of one listing: root in a namespace can add any number of addresses, routes and policy
// rules.
var maxObjects = 1 << 16 //nolint:gochecknoglobals // a constant but for a test

// list returns the parsed objects of a dump: reply is the type of the kernel's messages, head begins the request. list
// leaves out an object for which parse returns false.
func list[T any](reply uint16, head nl.NetlinkRequestData, parse func(message []byte) (T, bool, error)) (all []T, err error) {
	const get = unix.RTM_GETLINK - unix.RTM_NEWLINK
	err = complete(func() error {
		all = nil
		request := nl.NewNetlinkRequest(int(reply)+get, unix.NLM_F_DUMP)
		request.AddData(head)
		return dump(request, reply, func(message []byte) error {
			one, wanted, unread := parse(message)
			if wanted && unread == nil {
				all = append(all, one)
			}
			return unread
		})
	})
	return all, err
}

// listFamily is list for the objects of a family whose messages begin with a struct rtmsg (linux/rtnetlink.h); the struct
// fib_rule_hdr of policy rules has its layout (linux/fib_rules.h).
func listFamily[T any](f ruleset.Family, reply uint16, what string, parse func(*nl.RtMsg, []syscall.NetlinkRouteAttr) (T, bool)) ([]T, error) {
	all, err := list(reply, &nl.RtMsg{RtMsg: unix.RtMsg{Family: nlFamily(f)}}, func(message []byte) (one T, wanted bool, err error) {
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

// complete repeats a listing during which objects changed (NLM_F_DUMP_INTR, linux/netlink.h) or that a signal interrupted:
// such a listing may lack entries.
func complete(listing func() error) (err error) {
	const attempts = 5
	for range attempts {
		if err = listing(); !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return err
}

// dump calls each with every message of a kind in the kernel's answer. It returns ErrUninspectable above the bound. Then,
// and after an error of each, the rest of the answer stays in the kernel; the lists of package netlink read the whole answer
// into memory.
func dump(request *nl.NetlinkRequest, kind uint16, each func(message []byte) error) error {
	seen, interrupted := 0, false
	return receive(request, func(m syscall.NetlinkMessage) (done bool, err error) {
		interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
		switch m.Header.Type {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			return true, ended(m.Data, interrupted)
		case kind:
			if seen++; seen > maxObjects {
				return true, tooMany()
			}
			return false, each(m.Data)
		}
		return false, nil
	})
}

// tooMany is the error of a list above the bound.
func tooMany() error {
	return fmt.Errorf("%w: it holds more than %d of them", nfnetlink.ErrUninspectable, maxObjects)
}

// receive sends a request and calls each with every message of the kernel's answer until that is done or fails.
func receive(request *nl.NetlinkRequest, each func(syscall.NetlinkMessage) (done bool, err error)) error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer socket.Close()
	if err := errors.Join(socket.SetReceiveTimeout(&nl.SocketTimeoutTv), socket.Send(request)); err != nil {
		return err
	}
	for {
		messages, from, err := socket.Receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if from.Pid != nl.PidKernel || m.Header.Seq != request.Seq { // any process may send to a netlink socket
				continue
			}
			if done, err := each(m); done || err != nil {
				return err
			}
		}
	}
}

// ended reads the end of a list, which begins with a negative errno unless it is empty.
func ended(payload []byte, interrupted bool) error {
	if len(payload) >= 4 {
		if errno := unix.Errno(-binary.NativeEndian.Uint32(payload)); errno != 0 { // two's complement
			return errno
		}
	}
	if interrupted {
		return netlink.ErrDumpInterrupted
	}
	return nil
}

// explain adds the cause and a remedy to an errno.
func explain(f ruleset.Family, err error) error {
	switch {
	case errors.Is(err, unix.ENETDOWN):
		return fmt.Errorf("%w: lo is down; bring it up first: ip link set lo up", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed in the namespace", err)
	case f == ruleset.IPv6 && !LoopbackHasIPv6():
		return fmt.Errorf("%w: %s", err, v6Off(ipv6Settings()))
	}
	return err
}

// ipv6Settings are those of the calling thread's namespace.
func ipv6Settings() fs.FS { return os.DirFS("/proc/sys/net/ipv6") }

// KernelHasIPv6 reports whether the kernel has IPv6 in the calling thread's namespace, on however few interfaces.
func KernelHasIPv6() bool {
	_, err := fs.Stat(ipv6Settings(), ".")
	return err == nil
}

// LoopbackHasIPv6 reports whether lo may have IPv6 addresses and routes in the calling thread's namespace.
func LoopbackHasIPv6() bool { return v6Off(ipv6Settings()) == "" }

// v6Off returns why lo has no IPv6, with a remedy, or "" if it has. The settings of /proc are those of the calling thread's
// namespace.
func v6Off(settings fs.FS) string {
	if _, err := fs.Stat(settings, "."); err != nil {
		return "the kernel has no IPv6 (it may have been started with ipv6.disable=1); " +
			"turn it on or redirect IPv4 only"
	}
	// The kernel acts on the interface's own setting; writing to "all" sets those of the interfaces.
	value, err := fs.ReadFile(settings, "conf/lo/disable_ipv6")
	if err == nil && strings.TrimSpace(string(value)) == "1" {
		return "IPv6 is disabled on lo; set net.ipv6.conf.lo.disable_ipv6=0 in the namespace or redirect IPv4 only"
	}
	return ""
}
