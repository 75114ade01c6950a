package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Loopback returns the name of the loopback device of the calling thread's namespace. Root in the namespace can change the name. Each
// namespace has exactly one device with IFF_LOOPBACK.
func Loopback() (string, error) { return LinkName(loopback) }

// LinkName returns the name of an interface. It uses an ioctl (netdevice(7)) because rtnetlink would wait for the RTNL mutex.
func LinkName(index uint32) (string, error) {
	request, err := unix.NewIfreq("")
	if err == nil {
		request.SetUint32(index)
		err = ioctl(unix.SIOCGIFNAME, request)
	}
	if err != nil {
		return "", fmt.Errorf("reading the name of interface %d: %w", index, err)
	}
	return request.Name(), nil
}

// ioctl sends a request about an interface. The kernel writes the response into it.
func ioctl(number uint, request *unix.Ifreq) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // only read from
	return unix.IoctlIfreq(fd, number, request)
}

// checkLoopback checks that the loopback device is named lo, as in the rules for loopback traffic.
func checkLoopback() ([]string, error) {
	const name = "lo"
	found, err := Loopback()
	if err != nil || found == name {
		return nil, err
	}
	return []string{"interface lo is not the loopback device (that is " + printable.Text(found, 100) + ")"}, nil
}

// Links returns the names of the interfaces that are up, without the loopback device. It uses procfs and an ioctl because rtnetlink
// would wait for the RTNL mutex.
func Links() (names []string, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		name, _, is := strings.Cut(strings.TrimSpace(line), ":")
		request, err := unix.NewIfreq(name)
		if !is || err != nil { // the heading
			continue
		}
		err = ioctl(unix.SIOCGIFFLAGS, request)
		switch flags := request.Uint16(); {
		case errors.Is(err, unix.ENODEV): // the interface is gone
		case err != nil:
			return nil, fmt.Errorf("listing the interfaces: %w", err)
		case flags&unix.IFF_UP != 0 && flags&unix.IFF_LOOPBACK == 0:
			names = append(names, name)
		}
	}
	return names, nil
}

// Attachment classifies the other end of an interface with an address, as far as the kernel shows it. A higher value needs more
// than privileges in the namespace itself.
type Attachment uint8

// Absent means that no interface has the address. OnLoopback means that it is on lo or on an interface that is down, so that no
// packet for it arrives from outside. Inside means that it is on an interface that does not lead to the node's namespace: a
// dummy, a bridge, or a link to another namespace. Outside means that it is on a hardware device, or on an interface with its
// other end in the node's namespace.
const (
	Absent Attachment = iota
	OnLoopback
	Inside
	Outside
)

// maxLinks bounds the inspected interfaces with an address: only a process in the pod makes more than one.
const maxLinks = 16

// Attachments returns the best attachment of each address in the current namespace. node is a file descriptor of the node's
// namespace.
func Attachments(addresses []netip.Addr, node int) ([]Attachment, error) {
	all, err := listAddresses()
	if err != nil {
		return nil, err
	}
	attached, links := make([]Attachment, len(addresses)), make([]int, len(addresses))
	for _, a := range all {
		i := slices.Index(addresses, a.prefix.Addr())
		if i < 0 || links[i] >= maxLinks {
			continue
		}
		links[i]++
		found, err := attachmentOf(a.link, node)
		if err != nil {
			return nil, fmt.Errorf("reading interface %d: %w", a.link, err)
		}
		attached[i] = max(attached[i], found)
	}
	return attached, nil
}

func attachmentOf(index, node int) (Attachment, error) {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return Absent, err
	}
	attributes := link.Attrs()
	switch {
	case attributes.Flags&net.FlagLoopback != 0 || attributes.Flags&net.FlagUp == 0:
		return OnLoopback, nil
	case attributes.NetNsID < 0 && link.Type() == "device":
		return Outside, nil
	case attributes.NetNsID < 0:
		return Inside, nil
	}
	// To show the interface, the kernel has numbered the other end's namespace. If that is the node's, the node's has a number.
	id, err := netlink.GetNetNsIdByFd(node)
	if err != nil {
		return Absent, fmt.Errorf("reading the number of the node's network namespace: %w", err)
	}
	if id >= 0 && id == attributes.NetNsID {
		return Outside, nil
	}
	return Inside, nil
}
