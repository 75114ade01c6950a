package walk_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// TestTheConfigurationIsInferredFromTheRules: of any Spec, the rules of the inferred one are the same.
func TestTheConfigurationIsInferredFromTheRules(t *testing.T) {
	specs := spectest.Special()
	for seed := range uint64(300) {
		specs["seed "+string(rune('0'+seed%10))+string(rune('0'+seed/10%10))+string(rune('0'+seed/100))] = spectest.Random(seed)
	}
	for name, spec := range specs {
		if slices.ContainsFunc(spec.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() && !p.Masked().Addr().IsLoopback() }) {
			continue // such as ::1/96: the kernel does not know that it begins at a loopback address
		}
		if !spec.Outbound.All && !slices.ContainsFunc(spec.Outbound.List, func(p netip.Prefix) bool { return p.Bits() > 0 }) {
			spec.Outbound = redirect.Networks{All: true} // what is not captured at all counts as removed
		}
		for _, native := range []bool{false, true} {
			f := redirect.Families{IPv6: redirect.Captured, HasIPv4: true}
			w := walk.Wanted{Spec: spec, Families: f, Native: native}
			got, isNative, found := walk.Namespace{Live: w.Sets()}.Infer()
			again := walk.Wanted{Spec: got, Families: f, Native: native}
			if want, have := text(w), text(again); !found || isNative != native || want != have {
				t.Errorf("%s, native %v: %v %v\n%s", name, native, found, isNative, cmp.Diff(want, have))
			}
		}
	}
	if _, _, found := (walk.Namespace{Live: []ruleset.Set{live(t, ruleset.IPv4, "nat OUTPUT -j ACCEPT")}}).Infer(); found {
		t.Error("a namespace without rules of the mesh")
	}
}

// text is that of the rules, without what is listed twice.
func text(w walk.Wanted) (all string) {
	for _, s := range w.Sets() {
		for _, table := range s.Tables {
			for _, c := range table.Chains {
				var rules []string
				for _, r := range c.Rules {
					if !slices.Contains(rules, r.String()) {
						rules = append(rules, r.String())
						all += s.Family.String() + " " + table.Name + " " + c.Name + " " + r.String() + "\n"
					}
				}
			}
		}
	}
	return all
}
