package route

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

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
