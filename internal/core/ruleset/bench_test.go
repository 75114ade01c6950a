package ruleset_test

import (
	"fmt"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// large is a Set of about the size of a captured pod's, with room to see growth.
func large(b *testing.B) ruleset.Set {
	b.Helper()
	var lines []string
	for i := range 10 {
		for j := range 8 {
			lines = append(lines, fmt.Sprintf("OWN_%d -p tcp -m tcp --dport %d -j RETURN", i, 1000*i+j))
		}
		lines = append(lines, fmt.Sprintf("OUTPUT -p tcp -j OWN_%d", i))
	}
	return nat(b, lines...)
}

func BenchmarkString(b *testing.B) {
	set := large(b)
	b.ReportAllocs()
	for b.Loop() {
		_ = set.String()
	}
}

func BenchmarkParse(b *testing.B) {
	text := large(b).String()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ruleset.Parse(ruleset.IPv4, text); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCompare compares with the same, with nothing, and with a Set in which every chain differs.
func BenchmarkCompare(b *testing.B) {
	want := large(b)
	drifted := parse(b, want.String())
	for i := range drifted.Tables[0].Chains {
		if c := &drifted.Tables[0].Chains[i]; len(c.Rules) > 0 {
			c.Rules = append(c.Rules[1:], c.Rules[0])
		}
	}
	for name, have := range map[string]ruleset.Set{"same": want, "fresh": {Family: ruleset.IPv4}, "drifted": drifted} {
		claim := own(want, have)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ruleset.Compare(want, have, claim)
			}
		})
	}
}

func BenchmarkReconcileFresh(b *testing.B) {
	want, have := large(b), ruleset.Set{Family: ruleset.IPv4}
	b.ReportAllocs()
	for b.Loop() {
		ruleset.Reconcile(want, have, ruleset.Claim{})
	}
}
