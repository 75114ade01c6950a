package probeset

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// ipsets makes the reference's ipsets with an entry each.
func (n node) ipsets(t *testing.T) {
	t.Helper()
	check.OK(t, netnstest.At(string(n)).Do(func() error {
		for i, f := range shape(Want{IPv6: true}) {
			family := []uint8{unix.AF_INET, unix.AF_INET6}[i]
			if err := netlink.IpsetCreate(f.set, "hash:ip", netlink.IpsetCreateOptions{Comments: true, Family: family}); err != nil {
				return err
			}
			address := net.ParseIP([]string{pod4, pod6}[i])
			if err := netlink.IpsetAdd(f.set, &netlink.IPSetEntry{IP: address, Comment: "uid-1"}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// entries returns the number of entries of each ipset.
func (n node) ipsetEntries(t *testing.T) (entries map[string]int) {
	t.Helper()
	check.OK(t, netnstest.At(string(n)).Do(func() error {
		all, err := netlink.IpsetListAll()
		entries = map[string]int{}
		for _, one := range all {
			entries[one.SetName] = len(one.Entries)
		}
		return err
	}))
	return entries
}

// TestReadAny: the entries of both modes of the reference; none where it has neither.
func TestReadAny(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	read := func() map[netip.Addr]string {
		entries, err := ReadAny(netnstest.At(string(n)))
		check.OK(t, err)
		return entries
	}
	check.Equal(t, len(read()), 0, "entries without a set")
	n.ipsets(t)
	want := map[netip.Addr]string{netip.MustParseAddr(pod4): "uid-1", netip.MustParseAddr(pod6): "uid-1"}
	check.Diff(t, "of the ipsets", want, read())
	n.nft(t, reference("add element inet istio-ambient-nat istio-inpod-probes-v4 { 10.0.0.9 comment \"uid-9\" }\n"))
	want[netip.MustParseAddr("10.0.0.9")] = "uid-9"
	check.Diff(t, "of both", want, read())
}

// postrouting writes the reference's rules on the host by the programs of a variant.
func (n node) postrouting(t *testing.T, variant string) {
	t.Helper()
	for program, set := range map[string][2]string{
		"iptables": {"istio-inpod-probes-v4", probe4}, "ip6tables": {"istio-inpod-probes-v6", probe6},
	} {
		for _, rule := range []string{
			"-N ISTIO_POSTRT", "-I POSTROUTING 1 -j ISTIO_POSTRT",
			"-A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set " + set[0] + " dst -j SNAT --to-source " + set[1],
		} {
			netnstest.Run(t, string(n), "env", append([]string{"XTABLES_LOCKFILE=/dev/null", program + "-" + variant, "-t", "nat"}, strings.Fields(rule)...)...)
		}
	}
}

func TestRemoveReference(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
		for _, rule := range []string{"-A POSTROUTING -o lo -j MASQUERADE", "-N KUBE-POSTROUTING", "-A POSTROUTING -j KUBE-POSTROUTING"} {
			netnstest.Run(t, string(n), program, append([]string{"-t", "nat"}, strings.Fields(rule)...)...)
		}
	}
	before := n.list(t)
	n.ipsets(t)
	n.postrouting(t, "nft")
	check.Equal(t, n.list(t) != before, true, "the reference's rules are there")
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	check.Diff(t, "other programs' rules", before, n.list(t))
	check.Diff(t, "ipsets", map[string]int{}, n.ipsetEntries(t))
	generation := n.generation(t)
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	check.Equal(t, n.generation(t), generation, "generation after it was done already")
}

// TestRemoveReference_LegacyTables: netlink does not reach the chain, but it matches nothing any more.
func TestRemoveReference_LegacyTables(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve(t)
	l.ipsets(t)
	l.postrouting(t, "legacy")
	l.sources(t, probe4, probe6, "10.0.1.2", "fd01::2")
	check.OK(t, RemoveReference(netnstest.At(string(l.node))))
	check.Diff(t, "ipsets", map[string]int{"istio-inpod-probes-v4": 0, "istio-inpod-probes-v6": 0}, l.ipsetEntries(t))
	l.sources(t, "10.0.0.1", "fd00::1", "10.0.1.2", "fd01::2")
}

// TestRemoveReference_ProbesGoOn: between Apply and RemoveReference both are there.
func TestRemoveReference_ProbesGoOn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve(t)
	l.ipsets(t)
	l.postrouting(t, "nft")
	for _, step := range []func() error{
		func() error { return nil },
		func() error {
			_, err := Apply(netnstest.At(string(l.node)), want(pod4+"=uid-1", pod6+"=uid-1"))
			return err
		},
		func() error { return RemoveReference(netnstest.At(string(l.node))) },
	} {
		check.OK(t, step())
		l.sources(t, probe4, probe6, "10.0.1.2", "fd01::2")
	}
}
