package route

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// Attachment classifies the other end of an interface with an address, as far as the kernel shows it. A higher one takes more
// than privileges in the namespace itself.
type Attachment uint8

// Absent is an address that no interface has. OnLoopback is one on lo or on an interface that is down, where no packet for it
// arrives from outside. Inside is one on an interface that connects to no other namespace of the node: a dummy, a bridge, or a
// link to another namespace than the node's. Outside is one on an interface whose other end is in the node's namespace, or
// on a device of the hardware.
const (
	Absent Attachment = iota
	OnLoopback
	Inside
	Outside
)

// maxLinks bounds how many interfaces with an address are inspected: only a process in the pod makes more than one.
const maxLinks = 16

// Attachments returns, for each of the addresses, the best attachment that it has in the current namespace. Node is an open
// file of the node's namespace.
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
	// The kernel has numbered the other end's namespace to show the interface, so the node's has a number if it is that one.
	id, err := netlink.GetNetNsIdByFd(node)
	if err != nil {
		return Absent, fmt.Errorf("reading the number of the node's network namespace: %w", err)
	}
	if id >= 0 && id == attributes.NetNsID {
		return Outside, nil
	}
	return Inside, nil
}
