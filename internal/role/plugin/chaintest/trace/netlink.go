package trace

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Message is a message to the kernel by netlink(7).
type Message struct {
	// Protocol is the socket's: NETLINK_NETFILTER, NETLINK_ROUTE.
	Protocol    int
	Type, Flags uint16
	// Family is the address family: the first byte behind the header in the messages of both protocols.
	Family uint8
}

// Messages returns the netlink messages of a run, grouped by system call.
func (r *Record) Messages(protocol int) [][]Message {
	var all [][]Message
	for _, c := range r.Calls {
		if len(c.Sent) == 0 || c.Socket == nil || c.Socket.Domain != unix.AF_NETLINK || c.Socket.Protocol != protocol {
			continue
		}
		var messages []Message
		sent, _ := syscall.ParseNetlinkMessage(c.Sent)
		for _, m := range sent {
			one := Message{Protocol: protocol, Type: m.Header.Type, Flags: m.Header.Flags}
			if len(m.Data) > 0 {
				one.Family = m.Data[0]
			}
			messages = append(messages, one)
		}
		all = append(all, messages)
	}
	return all
}

// BeginsBatch reports whether the message begins a transaction of netfilter.
func (m Message) BeginsBatch() bool {
	return m.Protocol == unix.NETLINK_NETFILTER && m.Type == unix.NFNL_MSG_BATCH_BEGIN
}

// Removes reports whether the message removes rules, chains, tables and sets of nf_tables, or addresses, routes, policy rules
// and links.
func (m Message) Removes() bool {
	if m.Protocol == unix.NETLINK_ROUTE {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 == unix.RTM_DELLINK&3
	}
	if m.Protocol != unix.NETLINK_NETFILTER || m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return false
	}
	switch m.Type & 0xff {
	case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELSETELEM,
		unix.NFT_MSG_DELOBJ, unix.NFT_MSG_DELFLOWTABLE:
		return true
	default: // NFT_MSG_DESTROYTABLE and the others of Linux 6.3
		return m.Type&0xff >= firstDestroy && m.Type&0xff <= lastDestroy
	}
}

const firstDestroy, lastDestroy = 0x1a, 0x20

// Writes reports whether the message changes anything.
func (m Message) Writes() bool {
	if m.Protocol == unix.NETLINK_ROUTE {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 != unix.RTM_GETLINK&3
	}
	return m.BeginsBatch() || m.Removes()
}

// Under returns the names of files and sockets below a directory in a run's system calls of any kind.
func (r *Record) Under(dir string) []string {
	var all []string
	for _, c := range r.Calls {
		if strings.Contains(c.Path, dir) {
			all = append(all, c.Path)
		}
	}
	return all
}

// Sockets returns the number of created sockets of a domain: AF_UNIX, AF_INET, AF_NETLINK.
func (r *Record) Sockets(domain int) int {
	count := 0
	for _, c := range r.Calls {
		if c.Number == unix.SYS_SOCKET && c.Result >= 0 && int(c.Args[0]) == domain { //nolint:gosec // a small number
			count++
		}
	}
	return count
}

// Connections returns the addresses of connect calls except netlink: the file of a unix socket, or the number of the family.
func (r *Record) Connections() []string {
	var all []string
	for _, c := range r.Calls {
		if c.Number == unix.SYS_CONNECT {
			all = append(all, c.Path)
		}
	}
	return all
}
