package xtables_test

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink/nfnetlinktest"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// encode returns the expressions of a rule.
func encode(f ruleset.Family, r ruleset.Rule) (nfnetlink.Attributes, error) {
	var b nfnetlink.Buffer
	if err := xtables.Encode(&b, f, r); err != nil {
		return nil, err
	}
	data, err := b.Bytes()
	return nfnetlink.Attributes(data).Get(unix.NFTA_RULE_EXPRESSIONS).Value, err
}

// rulesOf are all rules of a Spec.
func rulesOf(f ruleset.Family, s redirect.Spec) []ruleset.Rule {
	return rulesettest.Rules(redirect.Rules(s, f), redirect.RejectAll(f))
}

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// more are rules that no Spec makes and that can be written all the same.
func more() []ruleset.Rule {
	tcp := ruleset.Protocol{Number: ruleset.TCP}
	return []ruleset.Rule{
		ruleset.IPTables("", nil),
		ruleset.IPTables("", ruleset.Drop, ruleset.StateNew|ruleset.StateInvalid|ruleset.StateRelated),
		ruleset.IPTables("", ruleset.Accept, ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(1), Source: true, Not: true}),
		ruleset.IPTables("", ruleset.Jump{Chain: "CHAIN", Goto: true}, ruleset.Protocol{Number: 99}, ruleset.Mark{Value: 1}),
		ruleset.IPTables("", ruleset.Jump{Chain: "X"}, ruleset.Interface{Name: "eth+"}, ruleset.Interface{Name: "a+", Out: true, Not: true}),
		ruleset.IPTables("", ruleset.Return, ruleset.Mark{Value: 0, Connection: true, Not: true}),
		ruleset.IPTables("", ruleset.SetMark(0), ruleset.Protocol{Number: ruleset.TCP, Not: true}),
		ruleset.IPTables("", ruleset.Return, tcp, ruleset.Reset{}, ruleset.Owner{ID: 1}, ruleset.Owner{ID: 2, Group: true, Not: true}),
	}
}

// FuzzRulesComeBack takes all rules of a Spec to expressions and back.
func FuzzRulesComeBack(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		for _, family := range families {
			for _, r := range rulesOf(family, spectest.Random(seed)) {
				comesBack(t, family, r)
			}
		}
	})
}

func comesBack(t *testing.T, f ruleset.Family, r ruleset.Rule) {
	t.Helper()
	expressions, err := encode(f, r)
	if err != nil {
		t.Fatalf("%s: %q: %v", f, r, err)
	}
	if got, ok := xtables.Decode(f, expressions, nil); !ok || !got.Equal(r) {
		t.Fatalf("%s: %q came back as %q (understood: %v)", f, r, got, ok)
	}
}

func TestUnusualRulesComeBack(t *testing.T) {
	for _, f := range families {
		for _, r := range more() {
			comesBack(t, f, r)
		}
		for _, s := range spectest.Special() {
			for _, r := range rulesOf(f, s) {
				comesBack(t, f, r)
			}
		}
	}
}

// FuzzExpressionsAreReadOnce reads any bytes as expressions. A decoded rule must be read as the same rule again when it is
// written.
func FuzzExpressionsAreReadOnce(f *testing.F) {
	for _, family := range families {
		for _, r := range append(rulesOf(family, spectest.Random(1)), more()...) {
			expressions, err := encode(family, r)
			if err != nil {
				f.Fatal(err)
			}
			f.Add([]byte(expressions), []byte("\x00\x03abc"))
			f.Add([]byte(expressions), []byte("\x01\x03abc"))
		}
	}
	f.Fuzz(func(t *testing.T, expressions, userdata []byte) {
		for _, family := range families {
			r, ok := xtables.Decode(family, expressions, userdata)
			if strings.HasPrefix(r.String(), "[not understood: ") == ok {
				t.Fatalf("%q: understood: %v", r, ok)
			}
			if strings.ContainsAny(r.String(), "\n\r") {
				t.Fatalf("%q is more than one line", r)
			}
			again, err := encode(family, r)
			if ok != (err == nil) {
				t.Fatalf("%q: understood: %v, written: %v", r, ok, err)
			}
			if !ok {
				continue
			}
			if got, ok := xtables.Decode(family, again, nil); !ok || !got.Equal(r) {
				t.Fatalf("%q was written and is read as %q", r, got)
			}
		}
	})
}

// TestEachBitOfARuleIsRead changes every single bit of every value of every rule: whatever comes of it, it is not the rule
// that it was. Counters do not count.
func TestEachBitOfARuleIsRead(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, f := range families {
		for _, want := range append(rulesOf(f, spec), more()...) {
			expressions, err := encode(f, want)
			if err != nil {
				t.Fatal(err)
			}
			for at, changed := range nfnetlinktest.Flips(expressions) {
				if got, _ := xtables.Decode(f, changed, nil); got.Equal(want) {
					t.Fatalf("%s: %q is read as before when byte %d is changed: %x", f, want, at, changed)
				}
			}
		}
	}
}

// TestOpaqueRulesAreNotWritten: neither rules that were read, nor those that the kernel has no match for.
func TestOpaqueRulesAreNotWritten(t *testing.T) {
	everything := netip.MustParsePrefix("0.0.0.0/0")
	for _, tt := range []struct {
		rule ruleset.Rule
		want string
	}{
		{ruleset.Opaque("-m quota --quota 5"), `cannot encode rule "-m quota --quota 5": only its text is known`},
		{ruleset.IPTables("", ruleset.Return, ruleset.Network{Prefix: everything, Not: true}), "no match for a network that is everything"},
	} {
		if _, err := encode(ruleset.IPv4, tt.rule); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want %q in it", tt.rule, err, tt.want)
		}
	}
}
