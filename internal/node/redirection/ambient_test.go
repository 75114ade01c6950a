package redirection_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// backends are all ways to write an ambient pod's rules.
var backends = []iptables.Variant{byNetlink, byTables, iptables.NFT, iptables.Legacy}

// ambientReference adds the reference's rules and routing.
func (p pod) ambientReference(t *testing.T, v iptables.Variant, s ambient.Spec) {
	t.Helper()
	if v == byTables {
		p.feed(t, ambienttest.Script(s), "nft", "-f", "-")
	}
	for i, option := range []string{"-4", "-6"} {
		if i == 1 && !s.IPv6 {
			break
		}
		if v != byTables {
			p.restore(t, v, families[i], ambienttest.Restore(s, families[i]))
		}
		p.run(t, "ip", option, "rule", "add", "fwmark", "0x111/0xfff", "pref", "32764", "lookup", "100")
		p.run(t, "ip", option, "route", "replace", "local", []string{"0.0.0.0/0", "::/0"}[i], "dev", "lo", "table", "100")
	}
}

// ambientPod returns a pod whose IPv6 is captured, or which has no IPv6 address.
func ambientPod(t *testing.T, s ambient.Spec) pod {
	t.Helper()
	if s.IPv6 {
		return dualPod(t)
	}
	return newPod(t, "10.20.0.2/24")
}

// TestAmbient_ReferenceRules: rules and routing of the reference are the wanted ones, and Apply makes the same. Clean removes them.
func TestAmbient_ReferenceRules(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"ingress", "default, virtual interfaces, DNS, IPv6"} {
		s := ambienttest.Specs()[name]
		for _, v := range backends {
			t.Run(fmt.Sprintf("%s, %s", name, v), func(t *testing.T) {
				t.Parallel()
				theirs, ours := ambientPod(t, s), ambientPod(t, s)
				untouched := ours.everything(t)
				theirs.ambientReference(t, v, s)
				verified(t, theirs.namespace(v), s)
				for i := range 2 {
					r := mustApply(t, ours.namespace(v), s)
					check.Equal(t, len(r.Programs) == 0, i > 0, "no programs in turn", i)
				}
				verified(t, ours.namespace(v), s)
				equal(t, "rules", sortedTables(theirs.everything(t)), sortedTables(ours.everything(t)))
				for _, p := range []pod{theirs, ours} {
					check.OK(t, check.Err(p.namespace(v).Clean(t.Context(), s)))
					equal(t, "cleaned", untouched, p.everything(t))
				}
			})
		}
	}
}

// sortedTables returns a text with its native tables in any order: nft lists them as they were made.
func sortedTables(text string) string {
	tables := strings.Split(text, "table inet ")
	slices.Sort(tables[1:])
	return strings.Join(tables, "table inet ")
}

// TestAmbient_Replaces: whatever rules were there, with foreign ones, the result is that on a fresh pod. The reference leaves table raw
// behind when DNS capture ends, does not notice a change from nft to iptables, and lets foreign rules win that come first.
func TestAmbient_Replaces(t *testing.T) {
	t.Parallel()
	specs := ambienttest.Specs()
	shared := func(t *testing.T) pod {
		t.Helper()
		p := dualPod(t)
		p.plant(t, iptables.NFT, early)
		p.plant(t, iptables.Legacy, early)
		return p
	}
	before := map[string]func(*testing.T, pod){
		"sidecar":           func(t *testing.T, p pod) { mustApply(t, p.namespace(byNetlink), dual()) },
		"sidecar by TPROXY": func(t *testing.T, p pod) { mustApply(t, p.namespace(byNetlink), dual(byTPROXY)) },
	}
	for _, name := range []string{"default, IPv6", "ingress, virtual interfaces, DNS, IPv6"} {
		for _, v := range backends {
			before[name+" by "+string(v)] = func(t *testing.T, p pod) { mustApply(t, p.namespace(v), specs[name]) }
		}
	}
	to, untouched := specs["default"], shared(t).everything(t)
	for _, v := range backends[:2] {
		fresh := shared(t)
		mustApply(t, fresh.namespace(v), to)
		want := sortedTables(fresh.everything(t))
		for from, program := range before {
			t.Run(fmt.Sprintf("%s to %s", from, v), func(t *testing.T) {
				t.Parallel()
				p := shared(t)
				program(t, p)
				mustApply(t, p.namespace(v), to)
				verified(t, p.namespace(v), to)
				equal(t, "not as on a fresh pod", want, sortedTables(p.everything(t)))
				check.Equal(t, len(mustApply(t, p.namespace(v), to).Programs), 0, "programs of a second Apply")
				check.OK(t, check.Err(p.namespace(v).Clean(t.Context(), to)))
				equal(t, "cleaned", untouched, p.everything(t))
			})
		}
	}
}

// TestAmbient_ReleasedFromOtherSettings: Clean needs nothing of the configuration that wrote the rules.
func TestAmbient_ReleasedFromOtherSettings(t *testing.T) {
	t.Parallel()
	for _, v := range backends {
		p := dualPod(t)
		untouched := p.everything(t)
		mustApply(t, p.namespace(v), ambienttest.Specs()["default, virtual interfaces, DNS, IPv6"])
		check.OK(t, check.Err(p.namespace("").Clean(t.Context(), ambient.Spec{})))
		equal(t, string(v), untouched, p.everything(t))
	}
}

// TestAmbient_EmptyChainIsWanted: a chain of ours without rules is no leftover, so that rules like a sidecar's stay another program's.
func TestAmbient_EmptyChainIsWanted(t *testing.T) {
	t.Parallel()
	s := ambienttest.Specs()["ingress"]
	p := ambientPod(t, s)
	mustApply(t, p.namespace(byNetlink), s)
	p.iptables(t, iptables.NFT, ruleset.IPv4, "-t nat -A OUTPUT -p udp --dport 53 -j REDIRECT --to-ports 15053")
	before := p.everything(t)
	check.Equal(t, len(mustApply(t, p.namespace(byNetlink), s).Programs), 0, "programs")
	equal(t, "with a foreign rule", before, p.everything(t))
}
