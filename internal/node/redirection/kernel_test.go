package redirection_test

import (
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/referencetest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

var (
	variants = []iptables.Variant{iptables.NFT, iptables.Legacy}
	families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}
)

// byNetlink are nftables rules written without a tool, byTables native tables.
const (
	byNetlink iptables.Variant = "netlink"
	byTables  iptables.Variant = "native"
)

// tools returns the variant whose programs see the rules.
func tools(v iptables.Variant) iptables.Variant {
	if v == byNetlink {
		return iptables.NFT
	}
	return v
}

// eachVariant runs a test with both implementations of iptables, and without any.
func eachVariant(t *testing.T, test func(*testing.T, iptables.Variant)) {
	t.Helper()
	for _, v := range append(slices.Clone(variants), byNetlink) {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			test(t, v)
		})
	}
}

// program returns the name of an iptables program: the plain one or, with a suffix, the one that reads or writes rules.
func program(v iptables.Variant, f ruleset.Family, suffix string) string {
	return map[ruleset.Family]string{ruleset.IPv4: "iptables-", ruleset.IPv6: "ip6tables-"}[f] + string(tools(v)) + suffix
}

// pod is a network namespace that the machine's tools read and change, never the code under test.
type pod string

// emptyPod returns a pod whose only interface is lo, with only lo's addresses.
func emptyPod(tb testing.TB) pod {
	tb.Helper()
	return pod(netnstest.New(tb))
}

// newPod returns a pod with the addresses on eth0. The link stays down, so the kernel adds no address or route later.
func newPod(tb testing.TB, addresses ...string) pod {
	tb.Helper()
	p := emptyPod(tb)
	script := "link set lo up\nlink add eth0 type veth peer name peer0\n"
	for _, a := range addresses {
		script += "addr add " + a + " dev eth0\n"
	}
	p.feed(tb, script, "ip", "-batch", "-")
	return p
}

// dualPod returns a pod with an address of each family; only a Spec with dual stack captures the second one.
func dualPod(tb testing.TB) pod {
	tb.Helper()
	return newPod(tb, "10.20.0.2/24", "fd20::2/64")
}

// sharedPod returns a pod with foreign rules of both variants.
func sharedPod(tb testing.TB) pod {
	tb.Helper()
	p := dualPod(tb)
	p.plant(tb, iptables.NFT, early)
	p.plant(tb, iptables.Legacy, early)
	return p
}

// feed runs a command in the namespace with its own iptables lock.
func (p pod) feed(tb testing.TB, stdin, name string, args ...string) string {
	tb.Helper()
	return netnstest.Feed(tb, string(p), stdin, "env", append([]string{"XTABLES_LOCKFILE=" + string(p), name}, args...)...)
}

func (p pod) run(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	return p.feed(tb, "", name, args...)
}

// restore adds rules in the text format of iptables-restore.
func (p pod) restore(tb testing.TB, v iptables.Variant, f ruleset.Family, text string) {
	tb.Helper()
	if text != "" {
		p.feed(tb, text, program(v, f, "-restore"), "--noflush")
	}
}

// reference programs families like the reference implementation.
func (p pod) reference(tb testing.TB, v iptables.Variant, s redirect.Spec, families ...ruleset.Family) {
	tb.Helper()
	for _, f := range families {
		p.restore(tb, v, f, referencetest.Restore(s, f))
	}
}

// iptables runs one iptables command line per argument.
func (p pod) iptables(tb testing.TB, v iptables.Variant, f ruleset.Family, commands ...string) {
	tb.Helper()
	for _, c := range commands {
		p.run(tb, program(v, f, ""), strings.Fields(c)...)
	}
}

// save returns the output of iptables-save, without the parts that differ each time: see plain.
func (p pod) save(tb testing.TB, v iptables.Variant, f ruleset.Family) string {
	tb.Helper()
	return plain(p.run(tb, program(v, f, "-save")))
}

// rules returns the rules of both families, read with the tools of a variant.
func (p pod) rules(tb testing.TB, v iptables.Variant) string {
	tb.Helper()
	var b strings.Builder
	for _, f := range families {
		fmt.Fprintf(&b, "# %s %s\n%s", v, f, p.save(tb, v, f))
	}
	return b.String()
}

// routing returns the policy rules, the routes of all tables and the addresses on lo, once the kernel has finished its
// asynchronous work for a new address.
func (p pod) routing(tb testing.TB) string {
	tb.Helper()
	for tries := 0; p.run(tb, "ip", "-6", "addr", "show", "dev", "lo", "tentative") != ""; tries++ {
		if tries == 1000 {
			tb.Fatal("an address on lo stays tentative")
		}
	}
	var b strings.Builder
	for _, args := range []string{"-4 rule", "-6 rule", "-4 route show table all", "-6 route show table all", "-6 addr show dev lo"} {
		fmt.Fprintf(&b, "# ip %s\n%s", args, p.run(tb, "ip", strings.Fields(args)...))
	}
	return b.String()
}

var countersOfChain = regexp.MustCompile(`(?m) \[\d+:\d+\]$`)

// plain drops comment lines, sets counters to zero and sorts the tables by name because their printed order is
// arbitrary.
func plain(saved string) string {
	var tables []string
	for table := range strings.SplitSeq(saved, "COMMIT\n") {
		lines := slices.DeleteFunc(strings.Split(table, "\n"), func(l string) bool { return l == "" || l[0] == '#' })
		if len(lines) > 0 {
			tables = append(tables, strings.Join(append(lines, "COMMIT", ""), "\n"))
		}
	}
	slices.Sort(tables)
	return countersOfChain.ReplaceAllString(strings.Join(tables, ""), " [0:0]")
}

// ruleless matches a table with neither a rule nor its own chain nor a changed policy.
var ruleless = regexp.MustCompile(`(?m)^\*\w+\n(:\w+ ACCEPT \[0:0\]\n)*COMMIT\n`)

// filled drops empty tables, which stay once they are created.
func filled(saved string) string { return ruleless.ReplaceAllString(saved, "") }

// namespace returns the code under test with a variant; "" is backend auto.
func (p pod) namespace(v iptables.Variant) redirection.Namespace {
	return inNamespace(netnstest.At(string(p)), v)
}

func inNamespace(at *netns.Namespace, v iptables.Variant) redirection.Namespace {
	n := redirection.Namespace{NetNS: at, Log: slog.New(slog.DiscardHandler)}
	switch v {
	case "", iptables.NFT, iptables.Legacy:
		n.Tools.Force = v
	default:
		n.Backend = redirect.Backend(v)
	}
	return n
}

// equal compares texts by line.
func equal(tb testing.TB, what, want, got string) {
	tb.Helper()
	if diff := lineDiff(want, got); diff != "" {
		tb.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func lineDiff(want, got string) string {
	return cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n"))
}
