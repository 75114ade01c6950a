package walk_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// TestInfer_Configuration: for any Spec, the inferred Spec has the same rules.
func TestInfer_Configuration(t *testing.T) {
	for name, spec := range spectest.Many(300) {
		if slices.ContainsFunc(spec.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() && !p.Masked().Addr().IsLoopback() }) {
			continue // such as ::1/96: the kernel does not know that it begins at a loopback address
		}
		if !spec.Outbound.All && !slices.ContainsFunc(spec.Outbound.List, func(p netip.Prefix) bool { return p.Bits() > 0 }) {
			spec.Outbound = redirect.Networks{All: true} // without outbound capture the rules look removed
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
	if _, _, found := (walk.Namespace{Live: []ruleset.Set{rulesettest.Set("nat OUTPUT -j ACCEPT")}}).Infer(); found {
		t.Error("found a configuration without rules of the mesh")
	}
}

// TestInfer_HostileRules: a pod can add very many rules to chains of the mesh.
func TestInfer_HostileRules(t *testing.T) {
	const many = 100_000
	rules := make([]ruleset.Rule, many)
	for i := range rules {
		rules[i] = ruleset.Read(fmt.Sprintf("-d 10.%d.%d.%d/32 -j RETURN", i>>16, i>>8&255, i&255))
	}
	table := ruleset.Table{Name: "nat", Chains: []ruleset.Chain{{Name: "ISTIO_OUTPUT", Policy: ruleset.NoPolicy, Rules: rules}}}
	spec, _, found := walk.Namespace{Live: []ruleset.Set{{Family: ruleset.IPv4, Tables: []ruleset.Table{table}}}}.Infer()
	if n := len(spec.OutboundExclude); !found || n == 0 || n > 1000 {
		t.Errorf("%d networks", n)
	}
}

// FuzzInfer: rules of any text give a Spec that rules can be made from.
func FuzzInfer(f *testing.F) {
	f.Add("nat", "ISTIO_OUTPUT", "-m owner --gid-owner 5 -j RETURN")
	f.Add("nat", "ISTIO_INBOUND", "-p tcp -m tcp --dport 99999 -j RETURN")
	f.Add("mangle", "ISTIO_TPROXY", "-j TPROXY --on-port x")
	f.Fuzz(func(t *testing.T, table, chain, rule string) {
		chains := []ruleset.Chain{{Name: chain, Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{ruleset.Read(rule), ruleset.Read(rule)}}}
		spec, native, _ := walk.Namespace{Live: []ruleset.Set{{Family: ruleset.IPv4, Tables: []ruleset.Table{{Name: table, Chains: chains}}}}}.Infer()
		w := walk.Wanted{Spec: spec, Families: redirect.Families{IPv6: redirect.Captured}, Native: native}
		if len(w.Sets()) == 0 {
			t.Error("no rules")
		}
	})
}

// text prints the rules without duplicates.
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
