package nftables_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// message is the header of a sent netlink message.
type message struct{ kind, flags uint16 }

// wire records the requests to the kernel.
type wire struct{ requests [][]message }

func (w *wire) see(request []byte) {
	var messages []message
	for len(request) > 0 {
		n := binary.NativeEndian.Uint32(request)
		messages = append(messages, message{binary.NativeEndian.Uint16(request[4:]), binary.NativeEndian.Uint16(request[6:])})
		request = request[n:]
	}
	w.requests = append(w.requests, messages)
}

// writes returns the requests that change something.
func (w *wire) writes() [][]message {
	return slices.DeleteFunc(slices.Clone(w.requests), func(r []message) bool { return r[0].kind != unix.NFNL_MSG_BATCH_BEGIN })
}

// watch applies a plan and returns the sent messages.
func (p pod) watch(tb testing.TB, change plan) *wire {
	tb.Helper()
	w := &wire{}
	check.OK(tb, p.update(tb, change, w.see))
	return w
}

func both(s redirect.Spec) []ruleset.Set {
	return []ruleset.Set{redirect.Rules(s, ruleset.IPv4), redirect.Rules(s, ruleset.IPv6)}
}

func nothing() []ruleset.Set { return []ruleset.Set{{Family: ruleset.IPv4}, {Family: ruleset.IPv6}} }

// TestApply_NewNamespace bounds the cost of an ADD: it requests the generation and the list of tables, and writes all
// tables of both families in one request of which only the last message is acknowledged.
func TestApply_NewNamespace(t *testing.T) {
	w := newPod(t).watch(t, reconcile(both(everything())...))
	check.Equal(t, len(w.requests), 3, "requests were sent")
	writes := w.writes()
	if len(writes) != 1 {
		t.Fatalf("%d transactions were sent, want 1", len(writes))
	}
	makes := []uint16{unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_NEWRULE}
	for i, m := range writes[0] {
		inner := i > 0 && i < len(writes[0])-1
		if inner && !slices.Contains(makes, m.kind&0xff) {
			t.Errorf("message %d is of type %#x, which makes nothing", i, m.kind)
		}
		check.Equal(t, m.flags&(unix.NLM_F_ACK|unix.NLM_F_ECHO) != 0, i == len(writes[0])-2, "message", i, "asks for an answer")
	}
}

// withRule returns the Set with one more rule at the end of the last chain of a table.
func withRule(s ruleset.Set, table string, r ruleset.Rule) ruleset.Set {
	t := s.Table(table)
	t.Chains = append(slices.Clone(t.Chains), ruleset.Chain{
		Name: "ISTIO_ZZZ", Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{r},
	})
	others := slices.DeleteFunc(slices.Clone(s.Tables), func(o ruleset.Table) bool { return o.Name == table })
	return ruleset.New(s.Family, append(others, t)...)
}

// refusals has rules that the kernel refuses, with a part of the error.
var refusals = []struct {
	name string
	rule ruleset.Rule
	want string
}{
	{
		"a jump to nowhere", ruleset.IPTables("", ruleset.Jump{Chain: "NOWHERE"}, ruleset.Protocol{Number: ruleset.TCP}),
		`IPv6, table raw, chain ISTIO_ZZZ, rule "-p tcp -j NOWHERE", immediate: no such file or directory; the chain it leads to does not exist`,
	},
	{
		"a match that insists on a protocol", ruleset.IPTables("", ruleset.Return, ruleset.AnyPort{List: ruleset.PortList(5, 6)}, ruleset.Protocol{}),
		`IPv6, table raw, chain ISTIO_ZZZ, rule "-p 0 -m multiport --dports 5,6 -j RETURN", match multiport: invalid argument`,
	},
	{
		"a target of another table",
		ruleset.IPTables("", ruleset.TProxy{Family: ruleset.IPv6, Port: 5, Mark: 1}, ruleset.Protocol{Number: ruleset.TCP}),
		`IPv6, table raw, chain ISTIO_ZZZ, rule "-p tcp -j TPROXY --on-port 5 --on-ip :: --tproxy-mark 0x1/0xffffffff", target TPROXY: invalid argument`,
	},
	{
		"a rule that was only read", ruleset.Read("-m quota --quota 5"),
		`writing IPv6 rules: table raw, "-A ISTIO_ZZZ -m quota --quota 5": cannot encode match {--quota 5}`,
	},
}

// TestApply_OneRuleRefused makes the last rule of the last table of the second family fail: no table of any family
// may change, in a new namespace or in one with rules.
func TestApply_OneRuleRefused(t *testing.T) {
	for _, r := range refusals {
		t.Run(r.name, func(t *testing.T) {
			wants := both(everything())
			wants[1] = withRule(wants[1], "raw", r.rule)
			used := newPod(t)
			used.apply(t, reconcile(both(redirect.Default())...))
			for _, p := range []pod{newPod(t), used} {
				before := slices.Concat(p.kernel(t, ruleset.IPv4), p.kernel(t, ruleset.IPv6))
				check.Fails(t, p.update(t, reconcile(wants...), nil), r.want)
				after := slices.Concat(p.kernel(t, ruleset.IPv4), p.kernel(t, ruleset.IPv6))
				check.Diff(t, "something was left", before, after)
			}
		})
	}
}

// TestApply_ChangedByAnotherProgram has another program change the rules between reading and writing: nothing is written,
// and a second attempt succeeds.
func TestApply_ChangedByAnotherProgram(t *testing.T) {
	p := newPod(t)
	ours := reconcile(both(redirect.Default())...)
	err := p.update(t, func(v *nftables.View) nftables.Plan {
		p.run(t, "", "iptables-nft", strings.Fields("-t nat -A OUTPUT -j ACCEPT")...)
		return ours(v)
	}, nil)
	check.Is(t, err, nftables.ErrChanged)
	if strings.Contains(p.save(t, ruleset.IPv4).String(), "ISTIO") {
		t.Error("something was written nevertheless")
	}
	p.apply(t, ours)
	if rules := p.chain(t, "OUTPUT"); !slices.Equal(rules, []string{"-j ISTIO_OUTPUT", "-j ACCEPT"}) {
		t.Errorf("nat OUTPUT holds %q, want our jump ahead of the foreign rule", rules)
	}
}

func TestRead_InUse(t *testing.T) {
	p := newPod(t)
	p.run(t, "", "nft", "add table ip6 x")
	for f, want := range map[ruleset.Family]bool{ruleset.IPv4: false, ruleset.IPv6: true} {
		p.do(t, func() error {
			got, err := nftables.InUse(t.Context(), f)
			check.Equal(t, got, want, f, "in use")
			return err
		})
	}
}

// randomSpecs is the number of random Specs; a failing test names the seed.
const randomSpecs = 300

// TestRules_AsByIptables writes each set of rules twice, with the code under test and with iptables-restore: the
// kernel must hold the same bytes, iptables-save must print the wanted rules, and both must be read back the same.
func TestRules_AsByIptables(t *testing.T) {
	for name, spec := range spectest.Special() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conform(t, both(spec)...)
		})
	}
	for seed := range uint64(randomSpecs) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			conform(t, both(spectest.Random(seed))...)
		})
	}
	t.Run("everything is refused", func(t *testing.T) {
		conform(t, redirect.RejectAll(ruleset.IPv4), redirect.RejectAll(ruleset.IPv6))
	})
}

func conform(t *testing.T, wants ...ruleset.Set) {
	t.Helper()
	ours, theirs := newPod(t), newPod(t)
	ours.apply(t, reconcile(wants...))
	for _, want := range wants {
		f := want.Family
		none := ruleset.Set{Family: f}
		theirs.restore(t, f, ruleset.Reconcile(want, none, redirect.Sidecar().Owned(want, none)).String())
		equal(t, "what iptables-save prints, "+f.String(), want.String(), ours.save(t, f).String())
		equal(t, "what is read, "+f.String(), want.String(), ours.read(t, f).String())
		equal(t, "what is read of iptables' rules, "+f.String(), want.String(), theirs.read(t, f).String())
		check.Diff(t, fmt.Sprintf("what the kernel holds, %s", f), theirs.kernel(t, f), ours.kernel(t, f))
	}
}

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

// update reads the namespace and applies the plan made from it. sent, if any, is called with each request to the kernel.
func (p pod) update(tb testing.TB, change plan, sent func([]byte), owner ...redirect.Owner) error {
	tb.Helper()
	return netns.Do(string(p), func() error {
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
	})
}

func (p pod) apply(tb testing.TB, change plan, owner ...redirect.Owner) {
	tb.Helper()
	check.OK(tb, p.update(tb, change, nil, owner...))
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
