package nftables_test

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// BenchmarkNewNamespace writes the default rules of both families into a new namespace, here and with the two
// iptables-nft-restore of a version that has them, in turn. It reports how many times as long the latter take.
func BenchmarkNewNamespace(b *testing.B) {
	wants := both(redirect.Default())
	var ours, theirs time.Duration
	for b.Loop() {
		ours += timed(b, func() error { return nftables.Apply(b.Context(), changes(wants...)...) })
		theirs += timed(b, func() error {
			for _, want := range wants {
				none := ruleset.Set{Family: want.Family}
				cmd := exec.CommandContext(b.Context(), program(want.Family, "-restore"), "--noflush")
				cmd.Stdin = strings.NewReader(ruleset.Reconcile(want, none, redirect.Owned(want, none)).String())
				if err := cmd.Run(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(ours.Microseconds())/float64(b.N), "µs/netlink")
	b.ReportMetric(float64(theirs.Microseconds())/float64(b.N), "µs/restore")
	b.ReportMetric(float64(theirs)/float64(ours), "restore/netlink")
}

// timed runs fn in a new namespace and measures fn alone.
func timed(b *testing.B, fn func() error) time.Duration {
	b.Helper()
	ns := netnstest.New(b)
	var took time.Duration
	err := netns.Do(ns, func() error {
		start := time.Now()
		err := fn()
		took = time.Since(start)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return took
}

// BenchmarkSameAgain finds that a namespace holds what is wanted.
func BenchmarkSameAgain(b *testing.B) {
	ns, wants := netnstest.New(b), both(redirect.Default())
	err := netns.Do(ns, func() error {
		if err := nftables.Apply(b.Context(), changes(wants...)...); err != nil {
			return err
		}
		for b.Loop() {
			if err := nftables.Apply(b.Context(), changes(wants...)...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
