package redirect_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// specsToMeasure are a plain pod and one that uses much of what there is.
func specsToMeasure() map[string]redirect.Spec {
	rich := surroundings(bitTPROXY | bitDNS | bitDropInvalid | bitReroute | bitNoWildcard)
	rich.InboundExclude, rich.OutboundPortsExclude = []uint16{22, 15020, 15021, 15090}, []uint16{3306, 6379, 53, 123}
	return map[string]redirect.Spec{"plain": redirect.Default(), "rich": rich}
}

func BenchmarkRules(b *testing.B) {
	for name, spec := range specsToMeasure() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				redirect.Rules(spec, ruleset.IPv4)
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	values := written{
		redirect.FieldMode: "REDIRECT", redirect.FieldOutbound: "*", redirect.FieldInbound: "*", redirect.FieldInboundExclude: "15020",
		redirect.FieldOutboundExclude: "10.0.0.0/8,169.254.169.254/32", redirect.FieldOutboundPortsExclude: "3306,6379",
	}.values()
	base := redirect.Default()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := redirect.Parse(base, values, redirect.Dialect{Strict: true}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkClaim is the price of finding what is ours: in a new pod's namespace, and in one that is as it should be.
func BenchmarkClaim(b *testing.B) {
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	for name, have := range map[string]ruleset.Set{"fresh": {Family: ruleset.IPv4}, "in place": want} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				redirect.Claim(want, have)
			}
		})
	}
}
