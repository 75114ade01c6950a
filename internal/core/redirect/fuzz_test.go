package redirect_test

import (
	"errors"
	"reflect"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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

// FuzzOwned reads possible rules and cleans up: foreign rules stay as they were, and none of them is owned then.
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
