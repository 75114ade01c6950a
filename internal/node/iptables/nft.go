package iptables

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// nftInUse reports whether the namespace has any nf_tables table of the family, by asking the kernel for a list of
// tables (NFT_MSG_GETTABLE, include/uapi/linux/netfilter/nf_tables.h). An error means that nf_tables cannot be used.
func nftInUse(f ruleset.Family) (bool, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return false, fmt.Errorf("opening a netfilter socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return false, fmt.Errorf("setting up a netfilter socket: %w", err)
	}
	if err := unix.Sendto(fd, listTables(f), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, fmt.Errorf("asking for nf_tables tables: %w", err)
	}
	return answer(fd)
}

// listTables is the request: a netlink header and a struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h).
func listTables(f ruleset.Family) []byte {
	const length = unix.NLMSG_HDRLEN + 4
	m := make([]byte, length)
	binary.NativeEndian.PutUint32(m[0:], length)
	binary.NativeEndian.PutUint16(m[4:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE)
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	m[unix.NLMSG_HDRLEN] = unix.NFPROTO_IPV4
	if f == ruleset.IPv6 {
		m[unix.NLMSG_HDRLEN] = unix.NFPROTO_IPV6
	}
	return m
}

// answer reads until the kernel says that the list is done.
func answer(fd int) (bool, error) {
	const newTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	found := false
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return false, fmt.Errorf("listing nf_tables tables: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return false, fmt.Errorf("listing nf_tables tables: %w", err)
		}
		for _, m := range messages {
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				return found, nil
			case unix.NLMSG_ERROR:
				return false, fmt.Errorf("listing nf_tables tables: %w", errnoOf(m.Data))
			case newTable:
				found = true
			}
		}
	}
}

// errnoOf reads a struct nlmsgerr, which starts with a negative errno.
func errnoOf(data []byte) error {
	if len(data) < 4 {
		return unix.EINVAL
	}
	return unix.Errno(-binary.NativeEndian.Uint32(data)) // two's complement
}
