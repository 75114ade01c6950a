// Package probeset sets up the host's side of ambient mode: the kubelet's probes of enrolled pods get a source address that the
// pods' rules let pass. More exactly, packets of any local socket do, as in the reference, and forwarded packets do not.
//
//	table inet istio-ambient-nat {
//	  set istio-inpod-probes-v4 { type ipv4_addr; elements = { 10.42.0.7 comment "UID of the pod", … } }
//	  set istio-inpod-probes-v6 { type ipv6_addr; … }
//	  chain istio-probes {
//	    type nat hook postrouting priority srcnat - 1;
//	    meta l4proto tcp meta skuid >= 0 ip daddr @istio-inpod-probes-v4 counter snat to 169.254.7.127
//	    meta l4proto tcp meta skuid >= 0 ip6 daddr @istio-inpod-probes-v6 counter snat to fd16:9254:7127:1337:ffff:ffff:ffff:ffff
//	  }
//	}
//
// Table and sets have the reference's names. The chain does not: its nft mode adds a chain of priority 100, which fails if there is
// one of that name with another priority. Priority 99 is before the masquerade of every other program.
//
// It promises that Apply sends at most one transaction, which has only the difference or, if more than entries differ, replaces the
// table; that no probe sees a moment without rules or without an entry that stays; and that reading is bounded. It starts no process,
// and needs nf_tables with nat in family inet (Linux 5.2). It never touches another table, but for [RemoveReference].
//
// Start reading at Want and Apply; table.go has the table's messages, reference.go the reference's rules of its iptables mode.
package probeset

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Want is the host's side of ambient mode.
type Want struct {
	// V4 and V6 are the source addresses that probes get.
	V4, V6 netip.Addr
	// IPv6 wants the set and the rule for IPv6. Without it, Apply leaves IPv6 addresses out.
	IPv6 bool
	// Pods has the UID of the pod for each address.
	Pods map[netip.Addr]string
	// Keep decides about an entry of the kernel's set whose address Pods lacks: true leaves it. Nil removes them all.
	Keep func(address netip.Addr, uid string) bool
}

// ErrUnsupported is returned by a kernel without nf_tables or without nat in its family inet.
var ErrUnsupported = errors.New("the kernel cannot let probes pass to ambient pods: it needs nf_tables with nat in family inet " +
	"(Linux 5.2, CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT)")

// budget bounds what is read of the table. A node has at most some hundred pods.
var budget = nfnetlink.Budget{Objects: 10_000, Bytes: 16 << 20} //nolint:gochecknoglobals // a constant but for a test

// Apply brings the host's table to the wanted state. It reports whether it had to write.
func Apply(host *netns.Namespace, want Want) (changed bool, err error) {
	if !want.V4.Is4() || want.IPv6 && !want.V6.Is6() {
		return false, fmt.Errorf("probes of ambient pods cannot have the source addresses %s and %s", want.V4, want.V6)
	}
	err = transact(host, func(c *nfnetlink.Conn, b *nfnetlink.Batch) error {
		s := shape(want)
		have, failed := read(c, s)
		if failed != nil {
			return failed
		}
		pods := want.entries(have.entries)
		changed = true
		switch {
		case !have.whole:
			s.replace(b, have, pods)
		case maps.Equal(pods, have.entries):
			changed = false
		default:
			s.update(b, have.entries, pods)
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("writing the addresses of ambient pods into table inet %s: %w", tableName, err)
	}
	return changed, nil
}

// entries returns the wanted entries. have are the existing ones.
func (w Want) entries(have map[netip.Addr]string) map[netip.Addr]string {
	all := map[netip.Addr]string{}
	for a, uid := range have {
		if w.Keep != nil && w.Keep(a, uid) {
			all[a] = uid
		}
	}
	for a, uid := range w.Pods {
		all[Plain(a)] = uid[:min(len(uid), maxComment)]
	}
	maps.DeleteFunc(all, func(a netip.Addr, _ string) bool { return !w.takes(a) })
	return all
}

// Plain returns an address as it is in packets: without a zone, and IPv4 instead of an IPv4-mapped IPv6 address.
func Plain(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// takes reports whether an address gets an entry.
func (w Want) takes(a netip.Addr) bool { return a.IsValid() && (w.IPv6 || Plain(a).Is4()) }

// Read returns the entries of the host's table, also of the reference's; none without a table.
func Read(host *netns.Namespace) (entries map[netip.Addr]string, err error) {
	err = transact(host, func(c *nfnetlink.Conn, _ *nfnetlink.Batch) error {
		have, failed := read(c, shape(Want{IPv6: true}))
		entries = have.entries
		return failed
	})
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of ambient pods in table inet %s: %w", tableName, err)
	}
	return entries, nil
}

// Remove removes the table or, where the reference has taken it over, only our chain. Probes that are under way go on.
func Remove(host *netns.Namespace) error {
	err := transact(host, func(c *nfnetlink.Conn, b *nfnetlink.Batch) error {
		_, there, err := getTable(c)
		_, theirs, failed := getChain(c, referenceChain)
		_, ours, wrong := getChain(c, chainName)
		if err = errors.Join(err, failed, wrong); err != nil {
			return err
		}
		switch {
		case theirs && ours:
			deleteChain(b, unix.NFPROTO_INET, tableName, chainName)
		case there && !theirs:
			deleteTable(b)
		}
		return nil
	})
	if err != nil && !errors.Is(err, nfnetlink.ErrUnsupported) {
		return fmt.Errorf("removing table inet %s: %w", tableName, err)
	}
	return nil
}

// transact lets fill read and fill a batch, in the host's namespace, and sends it, again if another program changed rules meanwhile.
func transact(host *netns.Namespace, fill func(*nfnetlink.Conn, *nfnetlink.Batch) error) error {
	c, err := netns.In(host, nfnetlink.Open)
	if err != nil {
		return explain(err)
	}
	defer c.Close() //nolint:errcheck // a failed write is a refusal
	return explain(c.Transact(func(b *nfnetlink.Batch) error {
		c.Budget = budget
		return fill(c, b)
	}))
}

// explain marks the error of a kernel that lacks nf_tables, or the refusal of a message by one that lacks a part of it.
func explain(err error) error {
	var refused *nfnetlink.Refused
	lacks := errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP)
	switch {
	case errors.As(err, &refused) && refused.Message >= 0 && lacks, errors.Is(err, nfnetlink.ErrUnsupported), errors.Is(err, unix.EAFNOSUPPORT):
		return fmt.Errorf("%w [%w]", ErrUnsupported, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w; this needs CAP_NET_ADMIN in the node's network namespace", err)
	}
	return err
}
