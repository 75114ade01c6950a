package redirection_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/referencetest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// everything returns all rules of the namespace that any tool lists.
func (p pod) everything(t *testing.T) string {
	t.Helper()
	return filled(p.rules(t, iptables.NFT)+p.rules(t, iptables.Legacy)+p.routing(t)) + p.run(t, "nft", "list", "ruleset", "inet")
}

// program adds rules of the mesh to the pod: the reference's rules by the tools of each variant, or of both.
func (p pod) program(t *testing.T, by iptables.Variant, spec redirect.Spec) {
	t.Helper()
	of := families[:1]
	if spec.DualStack {
		of = families
	}
	switch by {
	case "both":
		p.reference(t, iptables.NFT, spec, of...)
		p.reference(t, iptables.Legacy, spec, of...)
	case iptables.NFT, iptables.Legacy:
		p.reference(t, by, spec, of...)
	default:
		mustApply(t, p.namespace(by), spec)
	}
}

// Each backend fully replaces or removes the rules of each other one, and leaves foreign rules unchanged.
func TestApply_TakesOverFromEveryBackend(t *testing.T) {
	t.Parallel()
	spec, before, untouched := dual(), dual(byTPROXY), sharedPod(t).everything(t)
	for _, to := range []iptables.Variant{"", byNetlink, byTables, iptables.NFT, iptables.Legacy} {
		fresh := sharedPod(t)
		mustApply(t, fresh.namespace(to), spec)
		want := fresh.everything(t)
		for _, from := range []iptables.Variant{byNetlink, byTables, iptables.NFT, iptables.Legacy, "both"} {
			t.Run(fmt.Sprintf("%s to %s", from, to), func(t *testing.T) {
				t.Parallel()
				p := sharedPod(t)
				n := p.namespace(to)
				hasRules(t, n, false)
				p.program(t, from, before)
				hasRules(t, n, true)
				if r, err := n.Apply(t.Context(), spec, redirection.FailOnConflict); !errors.Is(err, redirection.ErrConflict) {
					t.Errorf("FailOnConflict: %v, programs %s", err, r.Programs)
				}
				if r := mustApply(t, n, spec); to == "" && r.Tools[0] != "netlink" {
					t.Errorf("the tools are %q", r.Tools)
				}
				equal(t, "not as on a fresh pod", want, p.everything(t))
				verified(t, n, spec)
				check.Equal(t, len(mustApply(t, n, spec).Programs), 0, "programs of a second Apply")
				cleaned := sharedPod(t)
				cleaned.program(t, from, before)
				mustClean(t, cleaned.namespace(to))
				hasRules(t, cleaned.namespace(to), false)
				equal(t, "cleaned: not as if the mesh had never been here", untouched, cleaned.everything(t))
			})
		}
	}
}

// TestVerifyAny_OtherBackend: rules from before auto changed to another backend are accepted and stay unchanged.
func TestVerifyAny_OtherBackend(t *testing.T) {
	t.Parallel()
	for _, from := range []iptables.Variant{byNetlink, byTables, iptables.Legacy} {
		for _, auto := range []redirect.Backend{"", redirect.Native, redirect.Tools} {
			p, spec := dualPod(t), dual(byTPROXY)
			mustApply(t, p.namespace(from), spec)
			n := p.namespace("")
			n.Auto = auto
			if r, err := n.VerifyAny(t.Context(), spec); err != nil || !r.Clean() {
				t.Errorf("%s, auto is %q: %v, %v", from, auto, r.Diffs, err)
			}
			if r, err := n.VerifyAny(t.Context(), dual()); err != nil || r.Clean() {
				t.Errorf("%s, auto is %q: rules of another configuration are taken for the wanted ones: %v", from, auto, err)
			}
		}
	}
}

// TestApply_AutoIsNative: the node's choice applies to auto, and to no other backend.
func TestApply_AutoIsNative(t *testing.T) {
	t.Parallel()
	for backend, want := range map[iptables.Variant]string{"": "native", byNetlink: "netlink"} {
		n := dualPod(t).namespace(backend)
		n.Auto = redirect.Native
		check.Equal(t, mustApply(t, n, dual()).Tools[0], want, backend)
		verified(t, n, dual())
	}
}

// The kernel refuses iptables' owner match there (net/netfilter/xt_owner.c), so auto selects native tables.
func TestApply_PodWithUsersOfItsOwn(t *testing.T) {
	t.Parallel()
	_, path := netnstest.Unshared(t, 100000, 65536)
	netnstest.Open(t, path)
	p, spec := pod(path), redirect.Default()
	p.feed(t, "link set lo up\nlink add eth0 type veth peer name peer0\naddr add 10.30.0.2/24 dev eth0\n", "ip", "-batch", "-")
	_, err := p.namespace(byNetlink).Apply(t.Context(), spec, redirection.Reconcile)
	check.Fails(t, err, "table nat, chain ISTIO_OUTPUT", "match owner: invalid argument", "hostUsers: false")
	r := mustApply(t, p.namespace(""), spec)
	check.Diff(t, "tools", []string{"native"}, r.Tools)
	verified(t, p.namespace(""), spec)
	check.Contains(t, p.run(t, "nft", "list", "ruleset"), "istio-proxy-nat", "skuid 1337")
}

// Foreign legacy tables stay, and no program of the host is started because of them. Nothing is written twice.
func TestApply_NoToolOfTheHost(t *testing.T) {
	t.Parallel()
	for _, b := range []iptables.Variant{"", byNetlink, byTables} {
		p := dualPod(t)
		for _, f := range families {
			p.iptables(t, iptables.Legacy, f, "-t nat -N DOCKER", "-t mangle -A OUTPUT -p tcp -j ACCEPT", "-A INPUT -p tcp -j ACCEPT")
		}
		legacy, n := p.rules(t, iptables.Legacy), p.namespace(b)
		n.Tools = iptables.Host{Path: "/nonexistent"}
		for _, programs := range []bool{true, false} {
			r := mustApply(t, n, dual(byTPROXY))
			if r.Processes != 0 || len(r.Notes) != 0 || (len(r.Programs) > 0) != programs {
				t.Errorf("%q: %d processes, notes %q, %v", b, r.Processes, r.Notes, r.Programs)
			}
		}
		equal(t, string(b), legacy, p.rules(t, iptables.Legacy))
	}
}

// Legacy rules that no tool can remove are an error: Apply neither adds to them nor ignores them.
func TestApply_LegacyRules(t *testing.T) {
	// The tools are saved from the covered directory, for this test alone.
	dir, inside := inMounts(t, `cp /usr/sbin/xtables-*-multi "$2" && mount -t tmpfs none /usr/sbin`)
	if !inside {
		return
	}
	b := newToolbox(t).add(t, iptables.Legacy, filepath.Join(dir, "xtables-legacy-multi"), "", "iptables-", "ip6tables-")
	for _, f := range families {
		p := dualPod(t)
		p.feed(t, referencetest.Restore(dual(byTPROXY), f), filepath.Join(b.dir, program(iptables.Legacy, f, "-restore")), "--noflush")
		n := p.namespace("")
		_, applied := n.Apply(t.Context(), dual(), redirection.Reconcile)
		_, verified := n.Verify(t.Context(), dual())
		_, cleaned := n.Clean(t.Context(), dual())
		for _, err := range []error{applied, verified, cleaned} {
			check.Fails(t, err, "in the legacy iptables tables")
		}
	}
}

// Whatever configuration the reference or an earlier Apply left, applying another one gives the same rules, addresses, routes and policy
// rules as on a fresh pod.
func TestApply_ReplacesConfiguration(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		want := map[string]string{}
		for _, c := range configurations() {
			fresh := dualPod(t)
			mustApply(t, fresh.namespace(v), c.spec)
			want[c.name] = filled(fresh.rules(t, v)) + fresh.routing(t)
		}
		for _, from := range configurations() {
			for _, to := range configurations() {
				t.Run("from "+from.name+" to "+to.name, func(t *testing.T) {
					t.Parallel()
					p := dualPod(t)
					n := p.namespace(v)
					p.program(t, v, from.spec)
					r := mustApply(t, n, to.spec)
					check.Equal(t, len(r.Programs) == 0, from.name == to.name, "no program ran")
					equal(t, "not as on a fresh pod", want[to.name], filled(p.rules(t, v))+p.routing(t))
					verified(t, n, to.spec)
				})
			}
		}
	})
}

// Tools without a forced variant keep the variant that the reference would select: legacy where it is in use.
func TestApply_VariantInUse(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		p := dualPod(t)
		spec := dual()
		p.reference(t, v, dual(byTPROXY), families...)
		n := p.namespace("")
		n.Backend = redirect.Tools
		r := mustApply(t, n, spec)
		check.Diff(t, "tools", []string{program(v, ruleset.IPv4, "-restore"), program(v, ruleset.IPv6, "-restore")}, r.Tools)
		for _, f := range families {
			equal(t, f.String(), redirect.Rules(spec, f).String(), filled(p.save(t, v, f)))
		}
	}
}
