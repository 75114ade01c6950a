package podnet_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/podnet"
)

// Whatever configuration the reference left, applying another one leaves the rules that it leaves on a fresh pod.
func TestApplyReplacesEveryOtherConfiguration(t *testing.T) {
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

// Replacing a configuration also replaces its addresses, routes and policy rules.
func TestApplyReplacesRouting(t *testing.T) {
	t.Parallel()
	mark := func(mark, table uint32) redirect.Spec {
		return dual(byTPROXY, func(s *redirect.Spec) { s.Mark, s.Table = mark, table })
	}
	onlyIPv4 := redirect.Default()
	onlyIPv4.Mode = redirect.TPROXY
	for _, test := range []struct {
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
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			fresh, p := dualPod(t), dualPod(t)
			mustApply(t, fresh.namespace(iptables.NFT), test.to)
			n := p.namespace(iptables.NFT)
			mustApply(t, n, test.from)
			mustApply(t, n, test.to)
			verified(t, n, test.to)
			equal(t, "not as on a fresh pod", fresh.routing(t), p.routing(t))
		})
	}
}

// A pod that loses a family keeps no rules of it.
func TestApplyTakesAwayAFamilyThatIsNotCapturedAnyMore(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		p := dualPod(t)
		n := p.namespace(v)
		p.reference(t, v, dual(byTPROXY), families...)
		mustApply(t, n, redirect.Default())
		if left := filled(p.save(t, v, ruleset.IPv6)); left != "" {
			t.Errorf("IPv6 still has\n%s", left)
		}
		verified(t, n, redirect.Default())
	})
}

// Rules of the other variant would be met by every packet as well.
func TestApplyLeavesNothingOfOursInTheOtherVariant(t *testing.T) {
	t.Parallel()
	other := map[iptables.Variant]iptables.Variant{
		iptables.NFT: iptables.Legacy, iptables.Legacy: iptables.NFT, byNetlink: iptables.Legacy,
	}
	eachVariant(t, func(t *testing.T, to iptables.Variant) {
		from := other[to]
		spec := dual(byTPROXY)
		fresh := dualPod(t)
		mustApply(t, fresh.namespace(to), spec)
		want := fresh.rules(t, to)
		for _, c := range configurations() {
			p := dualPod(t)
			p.plant(t, from, early)
			theirs := p.rules(t, from)
			mustApply(t, p.namespace(from), c.spec)
			r, err := p.namespace(to).Apply(t.Context(), spec, podnet.FailOnConflict)
			if err == nil {
				t.Errorf("%s: Refuse replaced rules of the other variant: %s", c.name, r.Programs)
			}
			mustApply(t, p.namespace(to), spec)
			equal(t, c.name+": not as on a fresh pod", want, filled(p.rules(t, to)))
			equal(t, c.name+": the other variant does not have somebody's rules only", filled(theirs), filled(p.rules(t, from)))
			verified(t, p.namespace(to), spec)
		}
	})
}

// Without being told, rules of either variant are moved over in full to where no tool is needed for them.
func TestApplyMovesRulesOfTheToolsOver(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		p := dualPod(t)
		spec := dual()
		p.reference(t, v, dual(byTPROXY), families...)
		r := mustApply(t, p.namespace(""), spec)
		if len(r.Tools) != 2 || r.Tools[0] != "netlink" || r.Tools[1] != "netlink" {
			t.Errorf("the tools are %q", r.Tools)
		}
		for _, f := range families {
			equal(t, f.String(), redirect.Rules(spec, f).String(), filled(p.save(t, iptables.NFT, f)))
			equal(t, f.String()+" of legacy", "", filled(p.save(t, iptables.Legacy, f)))
		}
		verified(t, p.namespace(""), spec)
	})
}

// Tools that are not told otherwise stay with the variant that the reference would take: legacy where it is in use.
func TestToolsStayWithTheVariantInUse(t *testing.T) {
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
