package nftables_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// randomSpecs is how many random Specs are tried; a failing test names the seed.
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
		if diff := cmp.Diff(theirs.kernel(t, f), ours.kernel(t, f)); diff != "" {
			t.Errorf("what the kernel holds, %s (-iptables +ours):\n%s", f, diff)
		}
	}
}
