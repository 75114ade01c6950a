package nftables_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/referencetest"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// treatment returns families with IPv6 captured or absent.
func treatment(ipv6 bool) redirect.Families {
	if ipv6 {
		return redirect.Families{IPv6: redirect.Captured, HasIPv4: true}
	}
	return redirect.Families{HasIPv4: true}
}

// TestNative_TablesOfTheReference writes each Spec's tables twice, with the code under test and with nft from the
// reference's text: the kernel must hold the same bytes, nft must list the same, and both must be read as the wanted rules.
func TestNative_TablesOfTheReference(t *testing.T) {
	specs := spectest.Special()
	for seed := range uint64(randomSpecs / 3) {
		specs[fmt.Sprintf("seed %d", seed)] = spectest.Random(seed)
	}
	for name, spec := range specs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, ipv6 := range []bool{false, true} {
				conformNative(t, redirect.Sidecar(), spec.NativeSet(treatment(ipv6)), referencetest.Script(spec, ipv6))
			}
		})
	}
	for _, other := range []redirect.Treatment{redirect.Rejected, redirect.Bypassed} { // the reference does not have these
		want := everything().NativeSet(redirect.Families{IPv6: other, HasIPv4: true})
		conformNative(t, redirect.Sidecar(), want, redirect.Sidecar().NativeScript(want))
	}
}

// conformNative returns what nft lists.
func conformNative(t *testing.T, owner redirect.Owner, want ruleset.Set, script string) (list string) {
	t.Helper()
	ours, theirs, scripted := newPod(t), newPod(t), newPod(t)
	ours.apply(t, native(want), owner)
	theirs.run(t, script, "nft", "-f", "-")
	scripted.run(t, owner.NativeScript(want), "nft", "-f", "-")
	list = theirs.run(t, "", "nft", "list", "ruleset")
	equal(t, "what nft lists", list, ours.run(t, "", "nft", "list", "ruleset"))
	equal(t, "what nft lists of our script", list, scripted.run(t, "", "nft", "list", "ruleset"))
	check.Diff(t, "what the kernel holds", theirs.kernel(t, ruleset.Inet), ours.kernel(t, ruleset.Inet))
	for who, p := range map[string]pod{"ours": ours, "nft's": theirs} {
		check.Equal(t, p.verifyNative(t, want, owner).String(), "", who)
	}
	return list
}

// TestNative_SpecReplaced changes from one Spec to the next and back to none. The reference would
// leave behind a table for which the next Spec has no rules, and its rules would stay in effect.
func TestNative_SpecReplaced(t *testing.T) {
	p := newPod(t)
	full := everything().NativeSet(treatment(true))
	for i, want := range []ruleset.Set{
		full, redirect.Default().NativeSet(treatment(true)), redirect.Default().NativeSet(treatment(false)), full,
		{Family: ruleset.Inet},
	} {
		check.Equal(t, len(p.watch(t, native(want)).writes()), 1, "step", i)
		check.Equal(t, len(p.watch(t, native(want)).writes()), 0, "step", i)
		fresh := newPod(t)
		fresh.apply(t, native(want))
		equal(t, fmt.Sprintf("step %d", i), fresh.run(t, "", "nft", "list", "ruleset"), p.run(t, "", "nft", "list", "ruleset"))
	}
}

// TestNative_EachDrift breaks one thing at a time.
func TestNative_EachDrift(t *testing.T) {
	spec := everything()
	spec.TunnelPort = 15009
	want := spec.NativeSet(treatment(true))
	tests := []struct{ name, nft, seen string }{
		{"a rule more", "add rule inet istio-proxy-nat istio-output tcp dport 9 counter accept", "+ -A istio-output tcp dport 9 counter accept"},
		{"an unknown rule", "add rule inet istio-proxy-nat istio-output ip ttl 9 counter accept", "+ -A istio-output meta nfproto ipv4 [a match of the network header, see rule handle "},
		{"a rule less", "flush chain inet istio-proxy-nat istio-redirect", "- -A istio-redirect meta l4proto tcp counter redirect to :15001"},
		{"a chain more", "add chain inet istio-proxy-raw istio-other", "chain istio-other: the chain is left over and not wanted"},
		{"a table less", "delete table inet istio-proxy-raw", "istio-proxy-raw chain istio-output-dns: the chain is missing"},
		{"a table more", "add table inet istio-proxy-filter; add chain inet istio-proxy-filter input", "istio-proxy-filter chain input("},
		{"a table asleep", "add table inet istio-proxy-mangle { flags dormant; }", "istio-proxy-mangle chain output: the chain is missing"},
		{
			"a policy", "add chain inet istio-proxy-nat output { policy drop; }",
			"istio-proxy-nat chain output: the chain is missing",
		},
	}
	for _, tt := range tests {
		p := newPod(t)
		p.apply(t, native(want))
		before := p.run(t, "", "nft", "list", "ruleset")
		p.run(t, "", "nft", tt.nft)
		check.Contains(t, p.verifyNative(t, want).String(), tt.seen)
		p.apply(t, native(want))
		// New tables are listed after existing ones.
		equal(t, tt.name, sortedTables(before), sortedTables(p.run(t, "", "nft", "list", "ruleset")))
	}
}

func sortedTables(list string) string {
	tables := strings.SplitAfter(list, "\n}\n")
	slices.Sort(tables)
	return strings.Join(tables, "")
}

// TestNative_FromIptablesInOneTransaction moves a pod to native tables: the old rules are removed in the transaction
// that adds the new ones. A refused rule leaves everything unchanged.
func TestNative_FromIptablesInOneTransaction(t *testing.T) {
	p := newPod(t)
	p.apply(t, reconcile(both(redirect.Default())...))
	want := redirect.Default().NativeSet(treatment(true))
	move := func(to ruleset.Set) plan {
		return func(v *nftables.View) nftables.Plan {
			out := reconcile(nothing()...)(v)
			out.Native = &to
			return out
		}
	}
	bad := want
	bad.Tables = slices.Clone(want.Tables)
	bad.Tables[0].Chains = append(slices.Clone(bad.Tables[0].Chains), ruleset.Chain{
		Name: "istio-zzz", Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{ruleset.NFT("", ruleset.Jump{Chain: "nowhere"})},
	})
	before := p.run(t, "", "nft", "list", "ruleset")
	err := p.update(t, move(bad), nil)
	if text := `inet, table istio-proxy-nat, chain istio-zzz, rule "counter jump nowhere", immediate: `; err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %q in it", err, text)
	}
	equal(t, "after the refusal", before, p.run(t, "", "nft", "list", "ruleset"))
	check.Equal(t, len(p.watch(t, move(want)).writes()), 1, "transactions")
	for _, f := range families {
		check.Equal(t, p.read(t, f).Empty(), true, f, "has no rules of iptables")
	}
	check.Contains(t, p.run(t, "", "nft", "list", "tables"), "inet istio-proxy-nat")
}

// TestAmbient_RulesOfTheReference writes each Spec's rules twice, with the code under test and with iptables-restore from the
// reference's text: the kernel must hold the same bytes, iptables-save must print the reference's lines, and both must be read typed.
func TestAmbient_RulesOfTheReference(t *testing.T) {
	for name, s := range ambienttest.Specs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ours, theirs := newPod(t), newPod(t)
			ours.apply(t, reconcile(s.Sets(ambienttest.Families(s))...))
			for _, want := range s.Sets(ambienttest.Families(s)) {
				f, text := want.Family, ""
				if f == ruleset.IPv4 || s.IPv6 {
					text = ambienttest.Restore(s, f)
				}
				theirs.restore(t, f, text)
				check.Diff(t, f.String()+": bytes", theirs.kernel(t, f), ours.kernel(t, f))
				check.Equal(t, theirs.save(t, f).String(), want.String(), f, "iptables-save")
				for who, p := range map[string]pod{"ours": ours, "theirs": theirs} {
					have := p.read(t, f)
					typed(t, have)
					check.Equal(t, have.String(), want.String(), who, f)
				}
			}
			tables := s.NativeSet(ambienttest.Families(s))
			listed := strings.NewReplacer(" packets 0 bytes 0", "", "\t", "").Replace(conformNative(t, ambient.Owner(), tables, ambienttest.Script(s)))
			for _, r := range rulesettest.Rules(tables) {
				check.Contains(t, listed, "\n"+r.String()+"\n")
			}
		})
	}
	s := ambienttest.Specs()["default, virtual interfaces, DNS"]
	want := s.NativeSet(redirect.Families{HasIPv4: true, HasIPv6: true, IPv6: redirect.Bypassed}) // the reference does not have these
	conformNative(t, ambient.Owner(), want, ambient.Owner().NativeScript(want))
}

// typed fails for a rule with an unknown match or target.
func typed(t *testing.T, s ruleset.Set) {
	t.Helper()
	for _, r := range rulesettest.Rules(s) {
		if text := fmt.Sprintf("%T%#v", r.Target, r.Matches); strings.Contains(text, "Other") || strings.Contains(text, "Neutral") {
			t.Errorf("%q is not understood: %s", r, text)
		}
	}
}
