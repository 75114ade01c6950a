package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest/trace"
)

// host is a node whose /run is its own, so that its iptables lock is.
type host struct {
	*chaintest.Node

	run string
}

func newHost(t *testing.T) host {
	t.Helper()
	h := host{Node: chaintest.New(t, program(t)), run: t.TempDir()}
	if err := os.WriteFile(h.lock(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h host) lock() string { return filepath.Join(h.run, "xtables.lock") }

// do runs something as the node's processes do: in its network, with its /run.
func (h host) do(t *testing.T, fn func() error) error {
	t.Helper()
	isolation, err := netnstest.Isolated(h.Netns, []netns.Bind{{Source: h.run, Target: "/run"}}, fn)
	if isolation != nil {
		t.Fatal(isolation)
	}
	return err
}

// TestTheHostsLockIsNotWaitedFor: somebody who holds the iptables lock of the node for good holds up no pod.
func TestTheHostsLockIsNotWaitedFor(t *testing.T) {
	h := newHost(t)
	file, err := os.Open(h.lock())
	if err == nil {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // it is the lock
	const resource = 4 // the exit code of iptables without its lock
	err = h.do(t, func() error {
		return exec.CommandContext(t.Context(), "iptables-legacy", "--wait", "1", "-A", "INPUT", "-j", "ACCEPT").Run()
	})
	if exit, ended := errors.AsType[*exec.ExitError](err); !ended || exit.ExitCode() != resource {
		t.Fatalf("iptables of the node ends with %v although its lock is held", err)
	}
	for _, backend := range []string{"auto", "netlink", "native"} {
		pod := h.NewPod("shop", "web", chaintest.Sidecar)
		addressed(t, pod)
		input, err := chaintest.Input(h.Chain("1.0.0", chaintest.Stanza{"backend": backend}), nil)
		if err != nil {
			t.Fatal(err)
		}
		var r *trace.Record
		if err := h.do(t, func() (err error) {
			r, err = trace.Run(h.Command("ADD", pod, input))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if r.Status.ExitStatus() != 0 || !strings.Contains(strings.ToLower(everyRule(t, pod.Netns)), "istio") {
			t.Errorf("%s: ADD ends with %v", backend, r.Status)
		}
		if asked := r.Under("xtables.lock"); len(asked) > 0 {
			t.Errorf("%s: ADD asks for %q", backend, asked)
		}
	}
}

// rewrite writes the node's rules again and again, as kube-proxy or a firewall does, until ctx ends, and gives how often.
func (h host) rewrite(ctx context.Context, t *testing.T) (rounds int, err error) {
	t.Helper()
	var text strings.Builder
	text.WriteString("*nat\n:CHURN - [0:0]\n-F PREROUTING\n-A PREROUTING -j CHURN\n")
	for i := range 200 {
		fmt.Fprintf(&text, "-A CHURN -p tcp -d 10.96.%d.%d/32 --dport 80 -j RETURN\n", i/250, i%250)
	}
	text.WriteString("COMMIT\n")
	err = h.do(t, func() error {
		for ; ctx.Err() == nil; rounds++ {
			for _, variant := range []string{"nft", "legacy"} {
				cmd := exec.Command("iptables-"+variant+"-restore", "--noflush", "--wait", "60") //nolint:noctx // a round is ended in full
				cmd.Stdin = strings.NewReader(text.String())
				if out, wrong := cmd.CombinedOutput(); wrong != nil {
					return fmt.Errorf("iptables-%s-restore: %w: %s", variant, wrong, out)
				}
			}
		}
		return nil
	})
	return rounds, err
}

// TestFiftyPodsWhileTheHostsRulesAreRewritten: all are captured, all alike.
func TestFiftyPodsWhileTheHostsRulesAreRewritten(t *testing.T) {
	h := newHost(t)
	ctx, cancel := context.WithCancel(t.Context())
	var churn sync.WaitGroup
	var rounds int
	var failed error
	churn.Go(func() { rounds, failed = h.rewrite(ctx, t) })
	pods := make([]chaintest.Pod, 50)
	for i := range pods {
		pods[i] = h.NewPod("shop", fmt.Sprintf("web-%d", i), chaintest.Sidecar)
		addressed(t, pods[i])
	}
	input, err := chaintest.Input(h.Chain("1.0.0", nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	var adds sync.WaitGroup
	for _, pod := range pods {
		adds.Go(func() {
			if err := h.do(t, func() error { return h.Command("ADD", pod, input).Run() }); err != nil {
				t.Errorf("ADD of %s: %v", pod.Name, err)
			}
		})
	}
	adds.Wait()
	cancel()
	churn.Wait()
	if failed != nil || rounds == 0 {
		t.Errorf("the rules of the node were rewritten %d times, then: %v", rounds, failed)
	}
	want := withoutComments(rules(t, pods[0]))
	if !strings.Contains(want, "-A OUTPUT -j ISTIO_OUTPUT") {
		t.Errorf("not captured:\n%s", want)
	}
	for _, pod := range pods[1:] {
		if diff := cmp.Diff(want, withoutComments(rules(t, pod))); diff != "" {
			t.Errorf("%s is not as the first (-first +this):\n%s", pod.Name, diff)
		}
	}
}
