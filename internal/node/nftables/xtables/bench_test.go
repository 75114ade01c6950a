package xtables_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// BenchmarkEncode translates the default rules of one family.
func BenchmarkEncode(b *testing.B) {
	rules := rulesOf(ruleset.IPv4, redirect.Default())
	b.ReportAllocs()
	for b.Loop() {
		var buffer nfnetlink.Buffer
		for _, r := range rules {
			if err := xtables.Encode(&buffer, ruleset.IPv4, r); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkDecode translates them back.
func BenchmarkDecode(b *testing.B) {
	var all []nfnetlink.Attributes
	for _, r := range rulesOf(ruleset.IPv4, redirect.Default()) {
		expressions, err := encode(ruleset.IPv4, r)
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, expressions)
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, expressions := range all {
			if _, ok := xtables.Decode(ruleset.IPv4, expressions, nil); !ok {
				b.Fatal("a rule was not understood")
			}
		}
	}
}
