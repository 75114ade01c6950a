package redirection_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// mostAllocated bounds the allocations for reading a namespace up to its budget.
const mostAllocated = 100 << 20

// A process in a pod can fill its namespace. No backend reads all of it, and none changes it.
func TestBounds_NamespaceTooLarge(t *testing.T) {
	type filler func(*testing.T, pod)
	nft := func(family uint8, table, chain string, chains, rules int) filler {
		return func(t *testing.T, p pod) { nftablestest.Fill(t, string(p), family, table, chain, chains, rules) }
	}
	legacy := func(f ruleset.Family, chain string) filler {
		text := "*filter\n:" + chain + " - [0:0]\n" + strings.Repeat("-A "+chain+" -p tcp -j ACCEPT\n", 60_000) + "COMMIT\n"
		return func(t *testing.T, p pod) { p.restore(t, iptables.Legacy, f, text) }
	}
	for name, fill := range map[string]filler{
		"300,000 rules":                       nft(unix.NFPROTO_IPV4, "nat", "THEIRS", 1, 300_000),
		"60,000 rules in a chain of the mesh": nft(unix.NFPROTO_IPV6, "nat", "ISTIO_OUTPUT", 1, 60_000),
		"60,000 native rules":                 nft(unix.NFPROTO_INET, "istio-proxy-nat", "istio-output", 1, 60_000),
		"60,000 chains":                       nft(unix.NFPROTO_IPV4, "mangle", "ISTIO_X", 60_000, 0),
		"30,000 chains with long names":       nft(unix.NFPROTO_INET, "istio-proxy-nat", strings.Repeat("x", 230), 30_000, 0),
		"legacy rules":                        legacy(ruleset.IPv4, "THEIRS"),
		"legacy rules of the mesh":            legacy(ruleset.IPv6, "ISTIO_OUTPUT"),
	} {
		t.Run(name, func(t *testing.T) {
			p := dualPod(t)
			fill(t, p)
			for _, b := range []iptables.Variant{"", byTables, "iptables"} {
				n := p.namespace(b)
				uninspectable(t, n, dual(), "50000")
			}
		})
	}
}

// uninspectable checks that every operation returns ErrUninspectable, stays within a bound of memory, and changes nothing.
func uninspectable(t *testing.T, n redirection.Namespace, spec redirect.Spec, bound string) {
	t.Helper()
	for what, do := range map[string]func() (redirection.Report, error){
		"Verify":    func() (redirection.Report, error) { return n.Verify(t.Context(), spec) },
		"Apply":     func() (redirection.Report, error) { return n.Apply(t.Context(), spec, redirection.Reconcile) },
		"Clean":     func() (redirection.Report, error) { return n.Clean(t.Context(), spec) },
		"PlanClean": func() (redirection.Report, error) { return n.PlanClean(t.Context()) },
	} {
		var r redirection.Report
		var err error
		size := allocated(func() { r, err = do() })
		if what == "PlanClean" && bound != "50000" { // routes are read only where they may be changed
			continue
		}
		if !errors.Is(err, redirection.ErrUninspectable) || !strings.Contains(fmt.Sprint(err), bound) {
			t.Errorf("%s by %q: error %.300v", what, n.Backend, err)
		}
		if size > mostAllocated {
			t.Errorf("%s by %q allocates %d bytes", what, n.Backend, size)
		}
		if r.Processes != 0 || len(r.Programs) != 0 {
			t.Errorf("%s by %q starts %d processes, changes %v", what, n.Backend, r.Processes, r.Programs)
		}
	}
}

// allocated returns the number of bytes that fn allocates.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// A namespace may hold as much as the budget allows: it is read, and the missing rules are written.
func TestBounds_ManyRules(t *testing.T) {
	p := dualPod(t)
	nftablestest.Fill(t, string(p), unix.NFPROTO_IPV4, "nat", "THEIRS", 20_000, 20_000)
	nftablestest.Fill(t, string(p), unix.NFPROTO_IPV4, "theirs", "theirs", 1, 60_000) // a table that is not read
	n := p.namespace("")
	size := allocated(func() {
		mustApply(t, n, dual())
		verified(t, n, dual())
	})
	if size > 2*mostAllocated {
		t.Errorf("it allocates %d bytes", size)
	}
}

// Routes are read only if rules mark packets, and only up to a bound.
func TestBounds_TooManyRoutes(t *testing.T) {
	p := dualPod(t)
	n := p.namespace("")
	spec := dual(byTPROXY)
	mustApply(t, n, spec)
	var b strings.Builder
	for i := range 70_000 {
		fmt.Fprintf(&b, "route add 11.%d.%d.%d/32 dev lo table 133\n", i>>16, i>>8&255, i&255)
	}
	p.feed(t, b.String(), "ip", "-batch", "-")
	uninspectable(t, n, spec, "65536")
}

// A tool that prints without end or does not end is killed, because a container of the pod controls its input.
func TestBounds_ToolReadsTooMuch(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ does, want string }{
		"prints without end": {"exec yes -- '-A OUTPUT -p tcp -j ACCEPT'", "more than 50000 rules of iptables"},
		"warns without end":  {"exec yes -- '# Warning' >&2", "takes more than 10s"},
		"does not end":       {"exec sleep 1000", "takes more than 10s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := dualPod(t)
			p.restore(t, iptables.NFT, ruleset.IPv4, "*nat\n:THEIRS - [0:0]\nCOMMIT\n")
			b := newToolbox(t).add(t, iptables.NFT, "/usr/sbin/xtables-nft-multi", "case $name in *-save) "+test.does+";; esac", "iptables-", "ip6tables-")
			n := p.namespace(iptables.NFT)
			n.Tools.Path = b.dir
			_, err := n.Verify(t.Context(), dual())
			if err == nil || !strings.Contains(err.Error(), test.want) || !errors.Is(err, redirection.ErrUninspectable) || len(err.Error()) > 1<<10 {
				t.Errorf("error is %.300v, want … %s", err, test.want)
			}
		})
	}
}
