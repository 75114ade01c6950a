package nftables_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/test/check"
)

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// pod is a network namespace that tests read and change with iptables and with the code under test.
type pod string

func newPod(tb testing.TB) pod {
	tb.Helper()
	return pod(netnstest.New(tb))
}

// do runs the code under test in the namespace.
func (p pod) do(tb testing.TB, fn func() error) {
	tb.Helper()
	check.OK(tb, netns.Do(string(p), fn))
}

// run runs a command, which must succeed, with stdin as its standard input.
func (p pod) run(tb testing.TB, stdin, name string, args ...string) string {
	tb.Helper()
	return netnstest.Feed(tb, string(p), stdin, name, args...)
}

// program returns iptables-nft or ip6tables-nft, with a suffix.
func program(f ruleset.Family, suffix string) string {
	return map[ruleset.Family]string{ruleset.IPv4: "iptables-nft", ruleset.IPv6: "ip6tables-nft"}[f] + suffix
}

// save returns the output of iptables-save.
func (p pod) save(tb testing.TB, f ruleset.Family) ruleset.Set {
	tb.Helper()
	set, err := ruleset.Parse(f, p.run(tb, "", program(f, "-save")))
	check.OK(tb, err)
	return set
}

// restore adds rules with iptables-restore.
func (p pod) restore(tb testing.TB, f ruleset.Family, text string) {
	tb.Helper()
	if text != "" {
		p.run(tb, text, program(f, "-restore"), "--noflush")
	}
}

// plan makes the content of a transaction from the existing rules.
type plan func(*nftables.View) nftables.Plan

// reconcile brings the families to the sets, whatever rules of the mesh exist.
func reconcile(wants ...ruleset.Set) plan {
	return func(v *nftables.View) nftables.Plan {
		var p nftables.Plan
		for _, want := range wants {
			have := v.Set(want.Family)
			p.Programs = append(p.Programs, ruleset.Reconcile(want, have, redirect.Sidecar().Owned(want, have)))
		}
		return p
	}
}

// native brings the native tables to the set.
func native(want ruleset.Set) plan {
	return func(*nftables.View) nftables.Plan { return nftables.Plan{Native: &want} }
}

// ownerOf returns the owner of the rules, a sidecar without one.
func ownerOf(owner []redirect.Owner) redirect.Owner {
	return append(owner, redirect.Sidecar())[0]
}

// update reads the current namespace and applies the plan made from it.
func update(tb testing.TB, change plan, sent func([]byte), owner ...redirect.Owner) error {
	tb.Helper()
	s, err := nftables.Open()
	if err != nil {
		return err
	}
	s.OnSend(sent)
	v, err := s.Read(tb.Context(), ownerOf(owner))
	if err == nil {
		err = v.Apply(change(v))
	}
	return errors.Join(err, s.Close())
}

// try is apply for a plan that may fail.
func (p pod) try(tb testing.TB, change plan) error {
	tb.Helper()
	return netns.Do(string(p), func() error { return update(tb, change, nil) })
}

func (p pod) apply(tb testing.TB, change plan, owner ...redirect.Owner) {
	tb.Helper()
	p.do(tb, func() error { return update(tb, change, nil, owner...) })
}

// view returns the rules that the code under test reads.
func (p pod) view(tb testing.TB, owner ...redirect.Owner) (v *nftables.View) {
	tb.Helper()
	p.do(tb, func() error {
		s, err := nftables.Open()
		if err != nil {
			return err
		}
		v, err = s.Read(tb.Context(), ownerOf(owner))
		return errors.Join(err, s.Close())
	})
	return v
}

func (p pod) read(tb testing.TB, f ruleset.Family) ruleset.Set {
	tb.Helper()
	return p.view(tb).Set(f)
}

// verifyNative compares the native tables with the set.
func (p pod) verifyNative(tb testing.TB, want ruleset.Set, owner ...redirect.Owner) ruleset.Diff {
	tb.Helper()
	have := p.view(tb, owner...).Set(ruleset.Inet)
	return ruleset.Compare(want, have, redirect.OwnedNative(have))
}

// chain returns the texts of the rules in a chain of IPv4's table nat.
func (p pod) chain(tb testing.TB, name string) []string {
	tb.Helper()
	c, _ := p.read(tb, ruleset.IPv4).Table("nat").Chain(name)
	return specs(c.Rules)
}

func specs(rules []ruleset.Rule) []string {
	var out []string
	for _, r := range rules {
		out = append(out, r.String())
	}
	return out
}

// kernel lists all objects of a family, one line for each table, chain and rule, with every byte of its expressions.
// It leaves out numbers that differ between namespaces.
func (p pod) kernel(tb testing.TB, f ruleset.Family) []string {
	tb.Helper()
	var lines []string
	p.do(tb, func() error {
		conn, err := nfnetlink.Open()
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		conn.Budget = nfnetlink.Budget{Objects: 100_000, Bytes: 1 << 26}
		family := map[ruleset.Family]uint8{
			ruleset.IPv4: unix.NFPROTO_IPV4, ruleset.IPv6: unix.NFPROTO_IPV6, ruleset.Inet: unix.NFPROTO_INET,
		}[f]
		omit := map[uint16][]uint16{
			unix.NFT_MSG_GETTABLE: {unix.NFTA_TABLE_USE, 4 /* NFTA_TABLE_HANDLE */},
			unix.NFT_MSG_GETCHAIN: {unix.NFTA_CHAIN_HANDLE, unix.NFTA_CHAIN_USE, unix.NFTA_CHAIN_COUNTERS},
			unix.NFT_MSG_GETRULE:  {unix.NFTA_RULE_HANDLE, unix.NFTA_RULE_POSITION},
		}
		for _, kind := range []uint16{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_GETRULE} {
			err := conn.Dump(tb.Context(), kind, family, nil, func(m nfnetlink.Message) error {
				line := fmt.Sprint(kind)
				for a := range m.Attributes.All() {
					if !slices.Contains(omit[kind], a.Kind) {
						line += fmt.Sprintf(" %d=%q", a.Kind, a.Value)
					}
				}
				lines = append(lines, line)
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	// Rules keep their order within a chain; chains come in the order of their creation.
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
	return lines
}

// chainOf returns the kind, table and chain of a line.
func chainOf(line string) string {
	words := strings.SplitN(line, " ", 4)
	return strings.Join(words[:min(3, len(words))], " ")
}

// equal compares texts by line.
func equal(tb testing.TB, what, want, got string) {
	tb.Helper()
	check.Diff(tb, what, strings.Split(want, "\n"), strings.Split(got, "\n"))
}

// everything returns a Spec with every kind of rule.
func everything() redirect.Spec {
	s := redirect.Default()
	s.Mode, s.DropInvalid, s.DNS = redirect.TPROXY, true, redirect.DNSAll
	s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1", "v2"}
	s.UIDs, s.GIDs, s.OwnerGroupsExclude = []uint32{1, 2}, []uint32{3, 4}, []uint32{5}
	s.OutboundPorts, s.OutboundPortsExclude = ruleset.PortList(3306), ruleset.PortList(9, 10)
	return s
}
