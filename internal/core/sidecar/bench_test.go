package sidecar_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// BenchmarkDecide measures a pod as the injector makes it, one that is not injected, and one that is decided by name.
func BenchmarkDecide(b *testing.B) {
	for name, changes := range map[string][]change{
		"captured": {
			annotation(sidecar.ModeKey, "REDIRECT"), annotation(sidecar.InboundPortsKey, "*"), annotation(sidecar.InboundPortsExcludeKey, "15020"),
			annotation(sidecar.OutboundKey, "*"), env("ISTIO_META_DNS_CAPTURE", "true"), runAs(new(int64(1337)), new(int64(1337))),
		},
		"not injected": {notInjected},
		"excluded":     {named("kube-system", "dns")},
	} {
		facts, policy := pod(changes...)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				sidecar.Decide(facts, policy)
			}
		})
	}
}
