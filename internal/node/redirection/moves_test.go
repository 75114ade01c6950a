package redirection_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// Whatever configuration the reference left, applying another one leaves the rules that it leaves on a fresh pod.
func TestApply_ReplacesConfiguration(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		want := map[string]string{}
		for _, c := range configurations() {
			fresh := dualPod(t)
			mustApply(t, fresh.namespace(v), c.spec)
			want[c.name] = fresh.rules(t, v)
		}
		for _, from := range configurations() {
			for _, to := range configurations() {
				t.Run("from "+from.name+" to "+to.name, func(t *testing.T) {
					t.Parallel()
					p := dualPod(t)
					n := p.namespace(v)
					p.reference(t, v, from.spec, families...)
					r := mustApply(t, n, to.spec)
					if (from.name == to.name) != (len(r.Programs) == 0) {
						t.Errorf("%d programs ran", len(r.Programs))
					}
					equal(t, "not as on a fresh pod", want[to.name], filled(p.rules(t, v)))
					verified(t, n, to.spec)
				})
			}
		}
	})
}

// Replacing a configuration also replaces its addresses, routes and policy rules, and removes the rules of a family that is
// captured no more.
func TestApply_ReplacesRouting(t *testing.T) {
	t.Parallel()
	mark := func(mark, table uint32) redirect.Spec {
		return dual(byTPROXY, func(s *redirect.Spec) { s.Mark, s.Table = mark, table })
	}
	onlyIPv4 := redirect.Default()
	onlyIPv4.Mode = redirect.TPROXY
	tests := []struct {
		name     string
		from, to redirect.Spec
	}{
		{"TPROXY to REDIRECT", dual(byTPROXY), dual()},
		{"another mark to REDIRECT", mark(7, 300), dual()},
		{"REDIRECT to TPROXY", dual(), dual(byTPROXY)},
		{"one mark to another", mark(7, 300), mark(8, 300)},
		{"one mark and table to another", mark(7, 300), mark(8, 301)},
		{"one table to another", mark(7, 300), mark(7, 301)},
		{"both families to one", dual(byTPROXY), onlyIPv4},
		{"one family to both", onlyIPv4, dual(byTPROXY)},
		{"TPROXY to TPROXY of no port", dual(byTPROXY), dual(byTPROXY, func(s *redirect.Spec) { s.Inbound = redirect.Ports{} })},
	}
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				t.Parallel()
				fresh, p := dualPod(t), dualPod(t)
				mustApply(t, fresh.namespace(v), test.to)
				n := p.namespace(v)
				mustApply(t, n, test.from)
				mustApply(t, n, test.to)
				verified(t, n, test.to)
				equal(t, "not as on a fresh pod", filled(fresh.saves(t)), filled(p.saves(t)))
			})
		}
	})
}

// Tools without a forced variant stay with the variant that the reference would take: legacy where it is in use.
func TestApply_VariantInUse(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		p := dualPod(t)
		spec := dual()
		p.reference(t, v, dual(byTPROXY), families...)
		n := p.namespace("")
		n.Backend = redirect.Tools
		r := mustApply(t, n, spec)
		if len(r.Tools) != 2 || r.Tools[0] != program(v, ruleset.IPv4, "-restore") || r.Tools[1] != program(v, ruleset.IPv6, "-restore") {
			t.Errorf("the tools are %q", r.Tools)
		}
		for _, f := range families {
			equal(t, f.String(), redirect.Rules(spec, f).String(), filled(p.save(t, v, f)))
		}
	}
}
