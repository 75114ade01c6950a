package redirection_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// The reference's rules, fed to the kernel in the reference's order and spelling, and ours leave the same in it; and
// that is what ours say that iptables-save prints.
func TestRulesAreThoseOfTheReference(t *testing.T) {
	t.Parallel()
	for _, c := range slices.Concat(table(), random(60)) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, f := range families {
				want := redirect.Rules(c.spec, f)
				printsAsParsed(t, want)
			}
			for _, v := range variants {
				reference, ours := emptyPod(t), emptyPod(t)
				reference.reference(t, v, c.spec, families...)
				for _, f := range families {
					want := redirect.Rules(c.spec, f)
					install(t, ours, v, want)
					theirs, now := reference.save(t, v, f), ours.save(t, v, f)
					same := true
					for _, d := range []struct{ what, diff string }{
						{"not the rules of the reference (-reference +ours)", lineDiff(theirs, now)},
						{"not what the kernel's tools print (-printed +ours)", lineDiff(now, want.String())},
					} {
						if d.diff != "" {
							same = false
							t.Errorf("%s %s: %s:\n%s", v, f, d.what, d.diff)
						}
					}
					if !same {
						t.Logf("%+v", c.spec)
					}
				}
			}
		})
	}
}

// install programs a family that has nothing yet.
func install(tb testing.TB, p pod, v iptables.Variant, want ruleset.Set) {
	tb.Helper()
	have := ruleset.Set{Family: want.Family}
	p.restore(tb, v, want.Family, ruleset.Reconcile(want, have, redirect.Owned(want, have)).String())
}

// printsAsParsed is the inverse property: what a Set prints, read, is the Set.
func printsAsParsed(t *testing.T, s ruleset.Set) {
	t.Helper()
	back, err := ruleset.Parse(s.Family, s.String())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, back, cmpopts.IgnoreFields(ruleset.Rule{}, "Why")); diff != "" {
		t.Errorf("%s: parsing what is printed gives another set (-set +parsed):\n%s", s.Family, diff)
	}
}

// Rejecting the second family is nothing the reference has; it must still be what the kernel's tools print.
func TestRejectionIsPrintedAsTheKernelHasIt(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		for _, f := range families {
			p := emptyPod(t)
			install(t, p, v, redirect.RejectAll(f))
			equal(t, string(v)+" "+f.String(), p.save(t, v, f), redirect.RejectAll(f).String())
			printsAsParsed(t, redirect.RejectAll(f))
		}
	})
}

// The routing of the reference, as the ip commands to which it is equivalent.
func TestRoutingIsThatOfTheReference(t *testing.T) {
	t.Parallel()
	const (
		self    = "-6 addr add ::6/128 dev lo\n"
		policy4 = "rule add fwmark 1337 lookup 133\nroute add local default dev lo table 133\n"
		policy6 = "-6 rule add fwmark 1337 lookup 133\n-6 route add local default dev lo table 133\n"
	)
	other := strings.NewReplacer("1337", "7", "133", "300")
	tproxy := func(s *redirect.Spec) { s.Mode = redirect.TPROXY }
	both := func(f ...func(*redirect.Spec)) func(*redirect.Spec) {
		return func(s *redirect.Spec) {
			for _, set := range f {
				set(s)
			}
		}
	}
	dual := func(s *redirect.Spec) { s.DualStack = true }
	v4, v6 := []string{"10.20.0.2/24"}, []string{"fd20::2/64"}
	for _, test := range []struct {
		name      string
		addresses []string
		spec      func(*redirect.Spec)
		want      string
	}{
		{"REDIRECT in IPv4 needs nothing", v4, func(*redirect.Spec) {}, ""},
		{"REDIRECT in IPv6 needs the passthrough address", v6, func(*redirect.Spec) {}, self},
		{"REDIRECT of both without dual stack needs nothing", slices.Concat(v4, v6), func(*redirect.Spec) {}, ""},
		{"REDIRECT of both needs the passthrough address", slices.Concat(v4, v6), dual, self},
		{"TPROXY in IPv4 delivers marked packets", v4, tproxy, policy4},
		{"TPROXY in IPv6 does so in both", v6, tproxy, self + policy4 + policy6},
		{"TPROXY of both without dual stack does so in IPv4", slices.Concat(v4, v6), tproxy, policy4},
		{"TPROXY of both does so in both", slices.Concat(v4, v6), both(tproxy, dual), self + policy4 + policy6},
		{"TPROXY of no port delivers nothing", slices.Concat(v4, v6), both(tproxy, dual, func(s *redirect.Spec) { s.Inbound = redirect.Ports{} }), self},
		{"TPROXY of a port delivers marked packets", v4, both(tproxy, func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: []uint16{80}} }), policy4},
		{"TPROXY with another mark and table", slices.Concat(v4, v6), both(tproxy, dual, func(s *redirect.Spec) { s.Mark, s.Table = 7, 300 }), self + other.Replace(policy4+policy6)},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := redirect.Default()
			test.spec(&s)
			reference, ours := newPod(t, test.addresses...), newPod(t, test.addresses...)
			for line := range strings.Lines(test.want) {
				reference.run(t, "ip", strings.Fields(line)...)
			}
			want := reference.routing(t)
			for range 2 {
				if _, err := ours.namespace(iptables.NFT).Apply(t.Context(), s, 0); err != nil {
					t.Fatal(err)
				}
				equal(t, "not the routing of the reference", want, ours.routing(t))
			}
			clean := newPod(t, test.addresses...)
			if _, err := ours.namespace(iptables.NFT).Clean(t.Context(), redirect.Default()); err != nil {
				t.Fatal(err)
			}
			equal(t, "not as it was after cleaning", clean.routing(t), ours.routing(t))
		})
	}
}
