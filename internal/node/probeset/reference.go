package probeset

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// The reference's rules on the host in its iptables mode: a chain in table nat of both families, the jump to it, and ipsets.
const (
	natTable      = "nat"
	builtinChain  = "POSTROUTING"
	iptablesChain = "ISTIO_POSTRT"
)

// RemoveReference removes what the reference's iptables mode left on the host; call it after Apply. A chain in the legacy tables
// stays, which no netlink removes: its set is emptied, so that it matches nothing, and stays as well.
func RemoveReference(host *netns.Namespace) error {
	err := transact(host, func(c *nfnetlink.Conn, b *nfnetlink.Batch) error {
		for _, f := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
			if err := removeChain(c, b, f); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, nfnetlink.ErrUnsupported) {
		return fmt.Errorf("removing chain %s of another Istio CNI agent: %w", iptablesChain, err)
	}
	return host.Do(func() (err error) {
		for _, f := range shape(Want{IPv6: true}) {
			err = errors.Join(err, removeIPSet(f.set))
		}
		return err
	})
}

// removeChain adds the messages that remove the reference's chain and the jumps to it.
func removeChain(c *nfnetlink.Conn, b *nfnetlink.Batch, family uint8) error {
	_, there, err := c.Get(unix.NFT_MSG_GETCHAIN, family, func(b *nfnetlink.Buffer) { b.Chain(natTable, iptablesChain) })
	if err != nil || !there {
		return err
	}
	var jumps [][]byte // a message for the batch would end the dump
	err = dumpRules(c, family, natTable, builtinChain, func(rule nfnetlink.Attributes) {
		if jump(rule) == iptablesChain {
			jumps = append(jumps, bytes.Clone(rule.Get(unix.NFTA_RULE_HANDLE).Value))
		}
	})
	for _, handle := range jumps {
		b.Add(unix.NFT_MSG_DELRULE, 0, family, func(b *nfnetlink.Buffer) {
			b.In(natTable, builtinChain)
			b.Attribute(unix.NFTA_RULE_HANDLE, handle)
		})
	}
	deleteChain(b, family, natTable, iptablesChain)
	return err
}

// removeIPSet empties and removes an ipset in the namespace of the calling thread. It leaves an ipset that a rule uses.
func removeIPSet(name string) error {
	err := netlink.IpsetFlush(name)
	if err == nil {
		err = netlink.IpsetDestroy(name)
	}
	if err == nil || errors.Is(err, nl.IPSetError(nl.IPSET_ERR_BUSY)) || noIPSet(err) {
		return nil
	}
	return fmt.Errorf("removing ipset %s of another Istio CNI agent: %w", name, err)
}

// noIPSet reports whether there is no such ipset, or a kernel without ipsets.
func noIPSet(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// ReadAny is Read with the entries of the ipsets that the reference has in its iptables mode.
func ReadAny(host *netns.Namespace) (map[netip.Addr]string, error) {
	found, err := Read(host)
	if err != nil && !errors.Is(err, ErrUnsupported) {
		return nil, err
	}
	entries := map[netip.Addr]string{}
	maps.Copy(entries, found)
	return entries, host.Do(func() error {
		for _, f := range shape(Want{IPv6: true}) {
			set, err := netlink.IpsetList(f.set)
			if err != nil && !noIPSet(err) {
				return fmt.Errorf("reading ipset %s: %w", f.set, err)
			}
			if err == nil {
				addAll(entries, set.Entries)
			}
		}
		return nil
	})
}

func addAll(entries map[netip.Addr]string, of []netlink.IPSetEntry) {
	for _, e := range of {
		if a, ok := netip.AddrFromSlice(e.IP); ok {
			entries[Plain(a)] = e.Comment
		}
	}
}
