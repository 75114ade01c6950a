package redirection_test

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Runs that overlap in one namespace must not put their rules beside each other's.
func TestApply_Concurrent(t *testing.T) {
	for _, v := range variants {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			n, spec := dualPod(t).namespace(v), dual(byTPROXY)
			var runs sync.WaitGroup
			for range 6 {
				runs.Go(func() {
					if _, err := n.Apply(t.Context(), spec, redirection.Reconcile); err != nil {
						t.Error(err)
					}
				})
			}
			runs.Wait()
			verified(t, n, spec)
		})
	}
}

// A tool whose parent was killed must have ended when the next run begins. The tool here is a script that takes a second; the
// parent is a process of this test binary.
func TestApply_KilledRun(t *testing.T) {
	if os.Getenv("PODNET_TEST_APPLY") != "" {
		n := redirection.Namespace{NetNS: netnstest.Open(t, os.Getenv("PODNET_TEST_APPLY")), Backend: redirect.Tools, Tools: iptables.Host{Path: os.Getenv("PODNET_TEST_PATH")}, Log: slog.New(slog.DiscardHandler)}
		_, _ = n.Apply(t.Context(), redirect.Default(), redirection.Reconcile)
		return
	}
	t.Parallel()
	p, started := newPod(t, "10.1.0.2/24"), filepath.Join(t.TempDir(), "started")
	n := p.namespace(iptables.NFT)
	slow := newToolbox(t).add(t, iptables.NFT, multi(t, iptables.NFT), "case $name in *-restore) touch "+started+"; sleep 1;; esac", "iptables-")
	first := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestApply_KilledRun$")
	first.Env = append(os.Environ(), "PODNET_TEST_APPLY="+n.NetNS.Path(), "PODNET_TEST_PATH="+slow.dir)
	check.OK(t, first.Start())
	agenttest.Eventually(t, "the start of the tool", func() bool { _, err := os.Stat(started); return err == nil })
	check.OK(t, first.Process.Kill())
	_ = first.Wait()
	mustApply(t, n, redirect.Default())
	time.Sleep(1500 * time.Millisecond) // long enough for an orphaned tool to write its rules now
	rules := p.save(t, iptables.NFT, ruleset.IPv4)
	if jumps := strings.Count(rules, "-A OUTPUT -j ISTIO_OUTPUT"); jumps != 1 {
		t.Errorf("%d jumps:\n%s", jumps, rules)
	}
}
