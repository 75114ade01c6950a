package redirection_test

import (
	"slices"
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

// After each configuration of the reference cleaning leaves the rules that would be there without it, byte for byte; it does
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
	for i, c := range slices.Concat(configurations(), table(), random(40)) {
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

// older are rules of earlier versions of the reference, in both families unless an address is in them.
var older = []struct {
	name, text string
	family     ruleset.Family
}{
	{"the jumps of 2020 to 2024 and port 22", `* nat
-N ISTIO_INBOUND
-N ISTIO_REDIRECT
-N ISTIO_IN_REDIRECT
-N ISTIO_OUTPUT
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A OUTPUT -p udp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp --dport 22 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -o lo -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_OUTPUT -j RETURN
COMMIT
`, 0},
	{"the mark of 1.6", `* mangle
-N ISTIO_DIVERT
-N ISTIO_TPROXY
-N ISTIO_INBOUND
-A ISTIO_DIVERT -j MARK --set-mark 1337
-A ISTIO_DIVERT -j ACCEPT
-A ISTIO_TPROXY ! -d 127.0.0.1/32 -p tcp -j TPROXY --tproxy-mark 1337/0xffffffff --on-port 15001
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp -m socket -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY
-A OUTPUT -p tcp -s 127.0.0.1/32 ! -d 127.0.0.1/32 -j MARK --set-mark 1337
COMMIT
`, ruleset.IPv4},
	{"DNS of 1.6", `* nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -j REDIRECT --to-port 15013
COMMIT
`, 0},
	{"DNS of 1.8", `* nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -d 10.96.0.10/32 -j DNAT --to-destination 127.0.0.1:15053
-A POSTROUTING -p udp --dport 15053 -j SNAT --to-source 127.0.0.1
-A POSTROUTING -p udp -d 127.0.0.1/32 --dport 15053 -j SNAT --to-source 127.0.0.1
COMMIT
`, ruleset.IPv4},
	{"DNS until 1.22, everything", `* nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -j REDIRECT --to-port 15053
COMMIT
* raw
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 1337 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --gid-owner 1337 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -j CT --zone 2
-A PREROUTING -p udp --sport 53 -j CT --zone 1
COMMIT
`, 0},
	{"DNS until 1.22, servers", `* nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 0 -j RETURN
-A OUTPUT -p udp --dport 53 -d 10.96.0.10/32 -j REDIRECT --to-port 15053
COMMIT
* raw
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 0 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --uid-owner 0 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -d 10.96.0.10/32 -j CT --zone 2
-A PREROUTING -p udp --sport 53 -s 10.96.0.10/32 -j CT --zone 1
COMMIT
`, ruleset.IPv4},
	{"a virtual machine's interface of 1.6 in IPv6", `* nat
-N ISTIO_REDIRECT
-N ISTIO_OUTPUT
-I PREROUTING 1 -i net1 -j RETURN
-I PREROUTING 1 -i net1 -j RETURN
-A ISTIO_OUTPUT -j RETURN
-A OUTPUT -p tcp -j ISTIO_OUTPUT
COMMIT
`, ruleset.IPv6},
	{"guardrails of a run that was killed", `* filter
-I INPUT 1 -p tcp -j DROP
-I INPUT 1 -p udp -j DROP
-I FORWARD 1 -p tcp -j DROP
-I FORWARD 1 -p udp -j DROP
-I OUTPUT 1 -p tcp -j DROP
-I OUTPUT 1 -p udp -j DROP
COMMIT
`, 0},
}

func TestClean_OldVersions(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		control := dualPod(t)
		control.plant(t, v, early)
		never := filled(control.rules(t, v))
		for _, old := range older {
			t.Run(old.name, func(t *testing.T) {
				t.Parallel()
				old := func() pod {
					p := dualPod(t)
					p.plant(t, v, early)
					for _, f := range families {
						if old.family == 0 || old.family == f {
							p.restore(t, v, f, old.text)
						}
					}
					return p
				}
				cleaned, replaced, spec := old(), old(), dual()
				mustClean(t, cleaned.namespace(v))
				equal(t, "cleaned: not as if the mesh had never been here", never, filled(cleaned.rules(t, v)))
				// Every version had chains, with other rules than today's: they identify the mesh.
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

// TestClean_TablesOfOtherNames: names like those of the mesh in another table are no reason to remove it.
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
