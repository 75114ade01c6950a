package redirection_test

import (
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// mustClean removes the rules and routing of the mesh.
func mustClean(t *testing.T, n redirection.Namespace) redirection.Report {
	t.Helper()
	r, err := n.Clean(t.Context(), redirect.Default())
	check.OK(t, err)
	return r
}

// After each configuration of the reference, Clean leaves the rules that would exist without it, byte for byte. It does
// nothing in a namespace without the mesh.
func TestClean_ReferenceRules(t *testing.T) {
	t.Parallel()
	ways := []iptables.Variant{iptables.NFT, iptables.Legacy, byNetlink}
	never := map[iptables.Variant]string{}
	for _, v := range ways {
		control := dualPod(t)
		control.plant(t, v, early)
		control.plant(t, v, late)
		never[v] = filled(control.rules(t, v))
		hasRules(t, control.namespace(v), false)
	}
	for i, c := range slices.Concat(configurations(), many(40)) {
		v := ways[i%len(ways)]
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := dualPod(t)
			p.plant(t, v, early)
			p.reference(t, v, c.spec, families...)
			p.plant(t, v, late)
			n := p.namespace(v)
			hasRules(t, n, true)
			mustClean(t, n)
			hasRules(t, n, false)
			equal(t, "not as if the mesh had never been here", never[v], filled(p.rules(t, v)))
			if again := mustClean(t, n); len(again.Programs) > 0 {
				t.Errorf("cleaning again ran %s", again.Programs)
			}
			if i >= len(configurations()) {
				return
			}
			alone := dualPod(t) // without foreign rules
			alone.reference(t, v, c.spec, families...)
			mustClean(t, alone.namespace(v))
			check.Equal(t, filled(alone.save(t, v, ruleset.IPv4)+alone.save(t, v, ruleset.IPv6)), "", "still there is")
		})
	}
}

func hasRules(t *testing.T, n redirection.Namespace, want bool) {
	t.Helper()
	if got, err := n.HasRules(t.Context()); err != nil || got != want {
		t.Errorf("the namespace has rules of the mesh: %t, %v, want %t", got, err, want)
	}
}

// older has the families of files with rules of earlier reference versions, by file extension.
var older = map[string][]ruleset.Family{".both": families, ".iptables": families[:1], ".ip6tables": families[1:]}

func TestClean_OldVersions(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		control := dualPod(t)
		control.plant(t, v, early)
		never := filled(control.rules(t, v))
		for name, text := range texts("older/*") {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				old := func() pod {
					p := dualPod(t)
					p.plant(t, v, early)
					for _, f := range older[path.Ext(name)] {
						p.restore(t, v, f, text)
					}
					return p
				}
				cleaned, replaced, spec := old(), old(), dual()
				mustClean(t, cleaned.namespace(v))
				equal(t, "cleaned: not as if the mesh had never been here", never, filled(cleaned.rules(t, v)))
				// Every version had chains, with other rules than today. The chains identify the mesh.
				for _, f := range families {
					replaced.restore(t, v, f, "*nat\n-N ISTIO_OLD\n-A ISTIO_OLD -p tcp -j RETURN\nCOMMIT\n")
				}
				mustApply(t, replaced.namespace(v), spec)
				verified(t, replaced.namespace(v), spec)
				mine := []ruleset.Set{redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv6)}
				equal(t, "replaced: foreign rules are not as they were", foreign(never), foreign(replaced.rules(t, v), mine...))
			})
		}
	})
}

// TestClean_TablesOfOtherNames: Clean does not remove another table for the mesh's chain names in it.
func TestClean_TablesOfOtherNames(t *testing.T) {
	t.Parallel()
	for _, backend := range []redirect.Backend{redirect.Netlink, redirect.Native} {
		p := dualPod(t)
		p.feed(t, "table inet istio-cni-trace-1 {\nchain istio-output { }\nchain ISTIO_OUTPUT { }\nchain output { type nat hook output priority -150; tcp dport 80 redirect to :9090; jump istio-output; jump ISTIO_OUTPUT; }\n}\n",
			"nft", "-f", "-")
		before := p.feed(t, "", "nft", "list", "table", "inet", "istio-cni-trace-1")
		n := p.namespace(byNetlink)
		n.Backend = backend
		mustApply(t, n, redirect.Default())
		mustClean(t, n)
		equal(t, "another table was changed", before, p.feed(t, "", "nft", "list", "table", "inet", "istio-cni-trace-1"))
	}
}

// masked is a mode of the mesh whose policy rules compare a part of the mark.
type masked struct{ redirect.Spec }

func (m masked) Owner() redirect.Owner {
	o := redirect.Sidecar()
	o.Mark, o.Mask = 0x111, 0xfff
	return o
}

func (m masked) Routing(redirect.Families) redirect.Routing {
	return redirect.Routing{MarkFamilies: families, Mark: 0x111, Mask: 0xfff, Table: 100, Priority: 32764}
}

func TestClean_PartOfTheMark(t *testing.T) {
	t.Parallel()
	p, want := dualPod(t), masked{dual()}
	n := p.namespace(byNetlink)
	policies := func() string { return p.run(t, "ip", "rule") + p.run(t, "ip", "-6", "rule") }
	routing := func() []string {
		r, err := n.Verify(t.Context(), want)
		check.OK(t, err)
		return r.Routing
	}
	p.run(t, "ip", "rule", "add", "fwmark", "0x111", "lookup", "100", "pref", "7")
	p.run(t, "ip", "rule", "add", "fwmark", "0x111/0xff", "lookup", "101", "pref", "8")
	before := policies()
	_, err := n.Apply(t.Context(), want, redirection.Reconcile)
	check.OK(t, err)
	check.Diff(t, "after Apply", []string(nil), routing())
	p.run(t, "ip", "-6", "rule", "add", "fwmark", "0x111/0xfff", "lookup", "105")
	p.run(t, "ip", "-6", "route", "add", "local", "default", "dev", "lo", "table", "105")
	check.Diff(t, "of an earlier configuration", []string{`policy rule "fwmark 0x111/0xfff lookup 105" (IPv6) is left over`}, routing())
	for _, clean := range []func() (redirection.Report, error){
		func() (redirection.Report, error) { return n.Apply(t.Context(), want, redirection.Reconcile) },
		func() (redirection.Report, error) { return n.Clean(t.Context(), want) },
	} {
		_, err = clean()
		check.OK(t, err)
		check.Equal(t, strings.Contains(policies(), "lookup 105"), false, "left over")
	}
	check.Equal(t, policies(), before, "after Clean")
	check.Equal(t, p.run(t, "ip", "route", "show", "table", "all", "type", "local", "default"), "", "after Clean")
}
