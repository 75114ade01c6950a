package redirection_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// named is a Spec with a description.
type named struct {
	name string
	spec redirect.Spec
}

// many returns the special Specs, and random ones for the given number of seeds; each test names its Spec.
func many(seeds uint64) (all []named) {
	special := spectest.Special()
	for _, name := range slices.Sorted(maps.Keys(special)) {
		all = append(all, named{"special: " + name, special[name]})
	}
	for seed := range seeds {
		all = append(all, named{fmt.Sprintf("random, seed %d", seed), spectest.Random(seed)})
	}
	return all
}

// The reference's rules, in the reference's order and spelling, and ours have the same result in the kernel; and
// iptables-save prints ours like String.
func TestRules_OfTheReference(t *testing.T) {
	t.Parallel()
	for _, c := range many(120) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
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

// install programs a family that has no rules yet.
func install(tb testing.TB, p pod, v iptables.Variant, want ruleset.Set) {
	tb.Helper()
	have := ruleset.Set{Family: want.Family}
	p.restore(tb, v, want.Family, ruleset.Reconcile(want, have, redirect.Sidecar().Owned(want, have)).String())
}

// The reference does not reject the second family; the rules must still match the output of the kernel's tools.
func TestRules_Rejection(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		for _, f := range families {
			p := emptyPod(t)
			install(t, p, v, redirect.RejectAll(f))
			equal(t, string(v)+" "+f.String(), p.save(t, v, f), redirect.RejectAll(f).String())
		}
	}
}

// Apply makes, and Clean removes, the same routing as the reference (here as equivalent ip commands), with or without rules.
// Foreign routing stays.
func TestRouting_OfTheReference(t *testing.T) {
	t.Parallel()
	const (
		self    = "-6 addr add ::6/128 dev lo\n"
		policy4 = "rule add fwmark 1337 lookup 133\nroute add local default dev lo table 133\n"
		policy6 = "-6 rule add fwmark 1337 lookup 133\n-6 route add local default dev lo table 133\n"
		others  = `rule add fwmark 1 lookup 100
route add local default dev lo table 100
rule add fwmark 1337 lookup 200
rule add from 10.9.0.0/16 lookup 201
-6 rule add fwmark 1 lookup 100
-6 route add local default dev lo table 100
-6 addr add ::7/128 dev lo
`
	)
	other := strings.NewReplacer("1337", "7", "133", "300")
	spec := func(set ...func(*redirect.Spec)) *redirect.Spec {
		s := dual(set...)
		s.DualStack = false
		return &s
	}
	both := func(set ...func(*redirect.Spec)) *redirect.Spec { s := dual(set...); return &s }
	inbound := func(ports ...uint16) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(ports...)} }
	}
	v4, v6, v46 := []string{"10.20.0.2/24"}, []string{"fd20::2/64"}, []string{"10.20.0.2/24", "fd20::2/64"}
	for _, test := range []struct {
		name      string
		addresses []string
		spec      *redirect.Spec // nil leaves it to the commands
		want      string
	}{
		{"REDIRECT in IPv4 needs nothing", v4, spec(), ""},
		{"REDIRECT in IPv6 needs the passthrough address", v6, spec(), self},
		{"REDIRECT of both without dual stack needs nothing", v46, spec(), ""},
		{"REDIRECT of both needs the passthrough address", v46, both(), self},
		{"TPROXY in IPv4 delivers marked packets", v4, spec(byTPROXY), policy4},
		{"TPROXY in IPv6 does so in both", v6, spec(byTPROXY), self + policy4 + policy6},
		{"TPROXY of both without dual stack does so in IPv4", v46, spec(byTPROXY), policy4},
		{"TPROXY of both does so in both", v46, both(byTPROXY), self + policy4 + policy6},
		{"TPROXY of no port delivers nothing", v46, both(byTPROXY, inbound()), self},
		{"TPROXY of a port delivers marked packets", v4, spec(byTPROXY, inbound(80)), policy4},
		{
			"TPROXY with another mark and table", v46,
			both(byTPROXY, func(s *redirect.Spec) { s.Mark, s.Table = 7, 300 }), self + other.Replace(policy4+policy6),
		},
		{"the usual mark without any rule", v46, nil, self + policy4 + policy6},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pod := func(commands string) pod {
				p := newPod(t, test.addresses...)
				for line := range strings.Lines(commands) {
					p.run(t, "ip", strings.Fields(line)...)
				}
				return p
			}
			want, ours := pod(others+test.want).routing(t), pod(others)
			if test.spec == nil {
				ours = pod(others + test.want)
			} else {
				missing := verify(t, ours.namespace(iptables.NFT), *test.spec).Routing
				check.Equal(t, len(missing), strings.Count(test.want, "\n"), "of the routing Verify misses", missing)
				for range 2 {
					mustApply(t, ours.namespace(iptables.NFT), *test.spec)
					equal(t, "not the routing of the reference", want, ours.routing(t))
				}
			}
			mustClean(t, ours.namespace(iptables.NFT))
			equal(t, "not as it was after cleaning", pod(others).routing(t), ours.routing(t))
		})
	}
}
