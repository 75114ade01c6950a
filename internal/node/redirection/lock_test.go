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

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Runs that overlap in one namespace must not put their rules beside each other's.
func TestRunsInOneNamespaceWaitForEachOther(t *testing.T) {
	for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			n := newPod(t, "10.1.0.2/24").namespace(v)
			spec := redirect.Default()
			spec.Mode = redirect.TPROXY
			var wg sync.WaitGroup
			for range 6 {
				wg.Go(func() {
					if _, err := n.Apply(t.Context(), spec, redirection.Reconcile); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if r, err := n.Verify(t.Context(), spec); err != nil || !r.Clean() {
				t.Errorf("after it: %v, %v %v", err, r.Diffs, r.Routing)
			}
		})
	}
}

// A tool whose parent was killed must have ended when the next run begins. The tool here is a script that takes a second; the
// parent is a process of this test binary.
func TestNoToolOfAKilledRunRunsOn(t *testing.T) {
	if os.Getenv("PODNET_TEST_APPLY") != "" {
		n := redirection.Namespace{NetNS: netnstest.Open(t, os.Getenv("PODNET_TEST_APPLY")), Backend: redirect.Tools, Tools: iptables.Host{Path: os.Getenv("PODNET_TEST_PATH")}, Log: slog.New(slog.DiscardHandler)}
		_, _ = n.Apply(t.Context(), redirect.Default(), redirection.Reconcile)
		return
	}
	t.Parallel()
	n, started := newPod(t, "10.1.0.2/24").namespace(iptables.NFT), filepath.Join(t.TempDir(), "started")
	slow := newToolbox(t).add(t, iptables.NFT, multi(t, iptables.NFT), "case $name in *-restore) touch "+started+"; sleep 1;; esac", "iptables-")
	first := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestNoToolOfAKilledRunRunsOn$")
	first.Env = append(os.Environ(), "PODNET_TEST_APPLY="+n.NetNS.Path(), "PODNET_TEST_PATH="+slow.dir)
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	for _, err := os.Stat(started); err != nil; _, err = os.Stat(started) {
		if t.Context().Err() != nil {
			t.Fatal("the tool was never started")
		}
		time.Sleep(time.Millisecond)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	if _, err := n.Apply(t.Context(), redirect.Default(), redirection.Reconcile); err != nil {
		t.Fatal(err)
	}
	// Long enough for an orphaned tool to write its rules now.
	time.Sleep(1500 * time.Millisecond)
	err := n.NetNS.Do(func() error {
		out, err := exec.CommandContext(t.Context(), "iptables-nft-save").Output()
		if jumps := strings.Count(string(out), "-A OUTPUT -j ISTIO_OUTPUT"); jumps != 1 {
			t.Errorf("%d jumps:\n%s", jumps, out)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
