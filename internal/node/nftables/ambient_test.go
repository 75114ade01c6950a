package nftables_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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
				if !strings.Contains(listed, "\n"+r.String()+"\n") {
					t.Errorf("nft does not list the rule as %q:\n%s", r, listed)
				}
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
