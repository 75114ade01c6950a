package redirect_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestSets_PrintedReadExplained: the rules of any Spec print, parse, have reasons, and jump to chains that are there. The reference's native
// tables fail with DNS servers of a family that is not captured.
func TestSets_PrintedReadExplained(t *testing.T) {
	for name, spec := range spectest.Many(200) {
		for _, f := range families {
			for _, set := range []ruleset.Set{redirect.Rules(spec, f), redirect.RejectAll(f)} {
				check.Equal(t, wrongWith(set), "", name, f, set)
			}
		}
		for _, treatment := range []redirect.Treatment{redirect.Unused, redirect.Captured, redirect.Rejected, redirect.Bypassed} {
			check.Equal(t, missing(spec.NativeSet(redirect.Families{IPv6: treatment})), "", name, "IPv6 treatment", treatment)
		}
	}
}

// wrongWith returns the fault of a wanted Set, "" if the Set is right.
func wrongWith(set ruleset.Set) string {
	parsed, err := ruleset.Parse(set.Family, set.String())
	if err != nil {
		return err.Error()
	}
	if !parsed.Equal(set) {
		return "it parses as another Set: " + cmp.Diff(set.String(), parsed.String())
	}
	if to := missing(set); to != "" {
		return to + " is a jump target and missing"
	}
	for _, table := range set.Tables {
		for _, c := range table.Chains {
			for _, r := range c.Rules {
				if r.Why == "" || r.String() == "" || r.String() != strings.Join(strings.Fields(r.String()), " ") {
					return "rule " + r.String() + " has no reason or extra blanks"
				}
			}
			if c.Policy == ruleset.NoPolicy && !strings.HasPrefix(c.Name, "ISTIO_") {
				return "chain " + c.Name + " has a foreign name"
			}
		}
	}
	return ""
}

// missing returns a jump target that its table lacks, "" if all chains exist.
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

// foreign returns rules of other programs, of kinds that occur in pods' namespaces. None resembles a rule of ours.
func foreign() ruleset.Set {
	return rulesettest.Set(
		"filter INPUT DROP", "filter INPUT -j KUBE-FIREWALL", "filter INPUT -p tcp -j DROP", "filter OUTPUT -p udp -j DROP",
		`filter KUBE-FIREWALL -m comment --comment "see -j ISTIO_OUTPUT" -j RETURN`,
		"mangle PREROUTING -p tcp -m mark --mark 0x1/0xff -j MARK --set-xmark 0x2/0xffffffff", "mangle OUTPUT -o eth9 -j ACCEPT",
		"nat PREROUTING -p tcp -m tcp --dport 8888 -j CNI-DN-1", "nat OUTPUT -m addrtype --dst-type LOCAL -j CNI-DN-1",
		`nat OUTPUT -p tcp -m comment --comment "not -j ISTIO_OUTPUT \"either\"" -j LOG --log-prefix "x -j ISTIO_A"`,
		"nat OUTPUT -m addrtype --dst-type LOCAL -j CNI-DN-1", "nat POSTROUTING -o eth9 -j MASQUERADE",
		"nat CNI-DN-1 -p tcp -m tcp --dport 8888 -j DNAT --to-destination 10.9.9.9:80", "security OUTPUT -d 10.9.0.0/16 -j ACCEPT",
	)
}

// TestSets_ReplaceEachOther goes from any Spec to any other and back to nothing, with and without foreign
// rules, ahead of our rules or behind.
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
			for spec, after := range spectest.Many(60) {
				for _, f := range families {
					n := rulesettest.NewNamespace(ruleset.Set{Family: f})
					if foreigners == first {
						check.OK(t, n.Add(foreign()))
					}
					n.Reach(t, redirect.Rules(before, f), redirect.Sidecar().Owned)
					if foreigners == last {
						check.OK(t, n.Add(foreign()))
					}
					n.Reach(t, redirect.Rules(after, f), redirect.Sidecar().Owned)
					n.Reach(t, redirect.RejectAll(f), redirect.Sidecar().Owned)
					n.Reach(t, ruleset.Set{Family: f}, redirect.Sidecar().Owned)
					want := rulesettest.NewNamespace(ruleset.Set{Family: f})
					if foreigners != never {
						check.OK(t, want.Add(foreign()))
					}
					check.Diff(t, fmt.Sprintf("%s, %s: the namespace is not restored", spec, f), linesOf(want), linesOf(n))
				}
				before = after
			}
		})
	}
}

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// written are fields as a user writes them.
type written map[redirect.Field]string

func (w written) values() redirect.Values {
	values := redirect.Values{}
	for field, text := range w {
		values[field] = redirect.Value{Source: "test", Text: text}
	}
	return values
}

// spec returns the default Spec with some fields written over it, in the strict dialect of annotations.
func (w written) spec(tb testing.TB) redirect.Spec {
	tb.Helper()
	s, err := redirect.Parse(redirect.Default(), w.values(), redirect.Dialect{Strict: true})
	check.OK(tb, err)
	return s
}

// TestExplain prints the rules with their reasons for review. Real packets (node/redirection) test their effect.
func TestExplain(t *testing.T) {
	explained := func(t *testing.T, name string, sets ...ruleset.Set) {
		var got []string
		for _, set := range sets {
			got = append(got, set.Explain())
		}
		rulesettest.Golden(t, filepath.Join("explain", name+".txt"), strings.Join(got, "\n"))
	}
	explained(t, "rejected", redirect.RejectAll(ruleset.IPv4), redirect.RejectAll(ruleset.IPv6))
	for _, test := range []struct {
		name  string // of the golden file
		w     written
		tweak func(*redirect.Spec)
	}{
		{name: "default"},
		{name: "nothing", w: written{
			redirect.FieldInbound: "", redirect.FieldOutbound: "", redirect.FieldOutboundPortsExclude: "", redirect.FieldOwnerGroups: "",
		}},
		{
			name: "lists", w: written{
				redirect.FieldInbound: "8080,9090", redirect.FieldOutbound: "10.0.0.7/8,fd00::/8", redirect.FieldOutboundPorts: "443,8443",
				redirect.FieldRerouteInterfaces: "vm0,vm1", redirect.FieldOwnerGroups: "2000,3000",
			},
			tweak: func(s *redirect.Spec) {
				s.DNS, s.DNSServers = redirect.DNSServers, addresses("10.0.0.53", "fd00::53", "10.0.0.54")
			},
		},
		{name: "excluded", w: written{
			redirect.FieldInboundExclude: "22,15020,15021,15090", redirect.FieldOutboundPortsExclude: "3306,53",
			redirect.FieldOutboundExclude: "10.1.0.0/16,fd00:1::/32", redirect.FieldOwnerGroupsExclude: "2000,3000",
			redirect.FieldExcludeInterfaces: "eth1,net1", redirect.FieldRerouteInterfaces: "vm0,vm1",
		}},
		{name: "loopback-captured", w: written{redirect.FieldOutbound: "127.0.0.0/8,10.0.0.0/8", redirect.FieldLoopback: "127.0.0.1/24"}},
		{
			name: "identities-listeners-dns", w: written{
				redirect.FieldUIDs: "1337,2000", redirect.FieldGIDs: "3000", redirect.FieldOutboundPort: "15101",
				redirect.FieldInboundPort: "15106", redirect.FieldTunnelPort: "15108",
			},
			tweak: func(s *redirect.Spec) { s.DNS = redirect.DNSAll },
		},
		{name: "tproxy", w: written{redirect.FieldMode: "TPROXY"}},
		{
			name: "tproxy-ports-interfaces-invalid", w: written{
				redirect.FieldMode: "TPROXY", redirect.FieldInbound: "8080", redirect.FieldExcludeInterfaces: "eth1", redirect.FieldMark: "4000",
			},
			tweak: func(s *redirect.Spec) { s.DropInvalid = true },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := test.w.spec(t)
			if test.tweak != nil {
				test.tweak(&spec)
			}
			explained(t, test.name, redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv6))
		})
	}
}

// FuzzParse writes any text into any field. A refused text must leave the Spec alone and name the problem; an accepted one
// must give rules that can be printed, read and followed.
func FuzzParse(f *testing.F) {
	for i, text := range []string{
		"*", "", "REDIRECT", "TPROXY", "0", "8080,15008,8443,8080", "53,3306", "10.0.0.7/29,fd00::/64,172.16.0.0/12", "127.0.0.0/8,10.0.0.0/8", "::1/128",
		"0.0.0.0/0,::/0", "::ffff:10.0.0.0/104", "::1.2.3.4/120", "eth1,net-1,eth1", "vm0,vm1", "15101", "1337,2000", "4294967295", "127.0.0.9/30", "capture", "reject",
		",", " * ", "1,,2", "10.0.0.0/8 ", "::ffff:1.2.3.4/128", "eth0\n", "+1", "65536", "a-j",
	} {
		for field := redirect.FieldMode; field <= redirect.FieldSecondFamily; field++ {
			f.Add(byte(field), text, i%2 == 0, byte(i*7))
		}
	}
	f.Fuzz(func(t *testing.T, n byte, text string, isStrict bool, around byte) {
		field := redirect.Field(n % byte(redirect.FieldSecondFamily+1))
		base := spectest.Random(uint64(around))
		got, err := redirect.Parse(base, redirect.Values{field: {Source: "fuzz", Text: text}}, redirect.Dialect{Strict: isStrict, GroupID: groupID})
		if err != nil {
			var bad *redirect.FieldError
			if !errors.As(err, &bad) || bad.Field != field || bad.Text != text || bad.Problem == "" {
				t.Errorf("error %v does not name field %d and value %q", err, field, text)
			}
			if !reflect.DeepEqual(got, base) {
				t.Error("the Spec was changed all the same")
			}
			return
		}
		for _, family := range families {
			check.Equal(t, wrongWith(redirect.Rules(got, family)), "", "field", field, "value", text, family)
		}
	})
}

// FuzzOwned reads possible rules and cleans up: foreign rules stay unchanged and are not owned afterwards.
func FuzzOwned(f *testing.F) {
	for _, text := range []string{
		"*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:ISTIO_A - [0:0]\n-A PREROUTING -i vm0 -j ISTIO_REDIRECT\n-A PREROUTING -i vm0 -j RETURN\n-A ISTIO_A -g ISTIO_A\nCOMMIT\n",
		"*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:ISTIO_A - [0:0]\n-A PREROUTING -i eth1 -j RETURN\n-A OUTPUT -o eth1 -j RETURN\n-A OUTPUT -j ISTIO_A\nCOMMIT\n",
		"*mangle\n:OUTPUT ACCEPT [0:0]\n:ISTIO_INBOUND - [0:0]\n-A OUTPUT -o lo -p tcp -m mark --mark 0x1 -j RETURN\n-A OUTPUT -p tcp -j DROP\nCOMMIT\n",
		"*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n-A INPUT -p udp -j DROP\n-A INPUT -p tcp -j DROP\nCOMMIT\n",
		"*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -m comment --comment \"-j ISTIO_A\" -j DROP\nCOMMIT\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		have, err := ruleset.Parse(ruleset.IPv4, text)
		if err != nil {
			return
		}
		n := rulesettest.NewNamespace(ruleset.Set{Family: ruleset.IPv4})
		if n.Add(have) != nil {
			return // no kernel has such rules
		}
		nothing := ruleset.Set{Family: ruleset.IPv4}
		foreigners := rulesettest.Lines(rulesettest.NewNamespace(have).Save(), redirect.Sidecar().Owned(nothing, have))
		n.Reach(t, nothing, redirect.Sidecar().Owned)
		check.Diff(t, "what was not owned has changed", foreigners, linesOf(n))
		rulesettest.NewNamespace(have).Reach(t, redirect.Rules(redirect.Default(), ruleset.IPv4), redirect.Sidecar().Owned)
	})
}
