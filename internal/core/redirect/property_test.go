package redirect_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// TestSets_PrintedReadExplained holds for every Spec that there is.
func TestSets_PrintedReadExplained(t *testing.T) {
	for name, spec := range anySpecs(200) {
		for _, f := range families {
			for _, set := range []ruleset.Set{redirect.Rules(spec, f), redirect.RejectAll(f)} {
				if problem := wrongWith(set); problem != "" {
					t.Errorf("%s, %s: %s\n%s", name, f, problem, set)
				}
			}
		}
	}
}

// wrongWith returns the fault of a wanted Set, "" if it has none.
func wrongWith(set ruleset.Set) string {
	parsed, err := ruleset.Parse(set.Family, set.String())
	if err != nil {
		return err.Error()
	}
	if !parsed.Equal(set) {
		return "it is read as something else: " + cmp.Diff(set.String(), parsed.String())
	}
	if to := missing(set); to != "" {
		return to + " is jumped to and not there"
	}
	for _, table := range set.Tables {
		for _, c := range table.Chains {
			for _, r := range c.Rules {
				if r.Why == "" || r.String() == "" || r.String() != strings.Join(strings.Fields(r.String()), " ") {
					return "rule " + r.String() + " has no reason or blanks too many"
				}
			}
			if c.Policy == ruleset.NoPolicy && !strings.HasPrefix(c.Name, "ISTIO_") {
				return "chain " + c.Name + " has a foreign name"
			}
		}
	}
	return ""
}

// missing is a chain that a rule jumps to and that is not in its table, "" if there is none.
func missing(set ruleset.Set) string {
	for _, table := range set.Tables {
		for _, c := range table.Chains {
			for _, r := range c.Rules {
				jump, jumps := r.Target.(ruleset.Jump)
				if _, there := table.Chain(jump.Chain); jumps && !there {
					return table.Name + "/" + jump.Chain
				}
			}
		}
	}
	return ""
}

// TestSets_JumpTargets: in native tables too, where those of the reference fail with DNS servers of a family that is
// not captured.
func TestSets_JumpTargets(t *testing.T) {
	for name, spec := range anySpecs(500) {
		for _, treatment := range []redirect.Treatment{redirect.Unused, redirect.Captured, redirect.Rejected, redirect.Bypassed} {
			if to := missing(spec.NativeSet(redirect.Families{IPv6: treatment})); to != "" {
				t.Errorf("%s, IPv6 treatment %d: %s is not there", name, treatment, to)
			}
		}
	}
}

// foreign are rules of others, of kinds that are found in pods' namespaces. None looks like one of ours.
const foreign = `*filter
:INPUT DROP [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -p tcp -j DROP
-A OUTPUT -p udp -j DROP
-A KUBE-FIREWALL -m comment --comment "see -j ISTIO_OUTPUT" -j RETURN
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -p tcp -m mark --mark 0x1/0xff -j MARK --set-xmark 0x2/0xffffffff
-A OUTPUT -o eth9 -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-DN-1 - [0:0]
-A PREROUTING -p tcp -m tcp --dport 8888 -j CNI-DN-1
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-DN-1
-A OUTPUT -p tcp -m comment --comment "not -j ISTIO_OUTPUT \"either\"" -j LOG --log-prefix "x -j ISTIO_A"
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-DN-1
-A POSTROUTING -o eth9 -j MASQUERADE
-A CNI-DN-1 -p tcp -m tcp --dport 8888 -j DNAT --to-destination 10.9.9.9:80
COMMIT
*security
:OUTPUT ACCEPT [0:0]
-A OUTPUT -d 10.9.0.0/16 -j ACCEPT
COMMIT
`

// TestSets_ReplaceEachOther goes from any Spec to any other and back to nothing, with and without foreign
// rules, ahead of ours or behind.
func TestSets_ReplaceEachOther(t *testing.T) {
	type when uint8
	const (
		never when = iota
		first
		last
	)
	for name, foreigners := range map[string]when{"alone": never, "behind foreign rules": first, "before foreign rules": last} {
		t.Run(name, func(t *testing.T) {
			before := redirect.Default()
			for spec, after := range anySpecs(60) {
				for _, f := range families {
					n := rulesettest.NewNamespace(ruleset.Set{Family: f})
					if foreigners == first {
						add(t, n, foreign)
					}
					n.Reach(t, redirect.Rules(before, f), redirect.Sidecar().Owned)
					if foreigners == last {
						add(t, n, foreign)
					}
					n.Reach(t, redirect.Rules(after, f), redirect.Sidecar().Owned)
					n.Reach(t, redirect.RejectAll(f), redirect.Sidecar().Owned)
					n.Reach(t, ruleset.Set{Family: f}, redirect.Sidecar().Owned)
					want := rulesettest.NewNamespace(ruleset.Set{Family: f})
					if foreigners != never {
						add(t, want, foreign)
					}
					if diff := cmp.Diff(linesOf(want), linesOf(n)); diff != "" {
						t.Errorf("%s, %s: the namespace was not given back as it was (-want +got):\n%s", spec, f, diff)
					}
				}
				before = after
			}
		})
	}
}

// add adds the rules of an output of iptables-save to a namespace.
func add(t *testing.T, n *rulesettest.Namespace, text string) {
	t.Helper()
	set, err := ruleset.Parse(n.Save().Family, text)
	if err == nil {
		err = n.Add(set)
	}
	if err != nil {
		t.Error(err)
	}
}
