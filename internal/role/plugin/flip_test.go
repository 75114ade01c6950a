package plugin_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// flip changes the target of a path repeatedly: the pod's namespace and the node's own in turns.
type flip struct {
	name string
	adds int // how many are tried
	// start makes the path lead to the pod, and gives one change there and back.
	start func(t *testing.T, path, pod, node string) (change func() error)
}

func flips() []flip {
	return []flip{
		{"a symbolic link", 200, func(t *testing.T, path, pod, node string) func() error {
			t.Helper()
			link := func(target string) error {
				return errors.Join(os.Symlink(target, path+".new"), os.Rename(path+".new", path))
			}
			check.OK(t, link(pod))
			return func() error { return errors.Join(link(node), link(pod)) }
		}},
		{"a bind mount", 60, func(t *testing.T, path, pod, node string) func() error {
			t.Helper()
			check.OK(t, errors.Join(os.WriteFile(path, nil, 0o600), unix.Mount(pod, path, "", unix.MS_BIND, "")))
			t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
			return func() error {
				err := unix.Mount(node, path, "", unix.MS_BIND, "")
				time.Sleep(time.Millisecond) // as long as the path leads to the pod otherwise, more or less
				return errors.Join(err, unix.Unmount(path, unix.MNT_DETACH))
			}
		}},
	}
}

// flipping changes a path until the test is over, and gives the path.
func (f flip) flipping(t *testing.T, pod, node string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	change := f.start(t, path, pod, node)
	ctx, cancel := context.WithCancel(t.Context())
	var changing sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		changing.Wait()
	})
	changing.Go(func() {
		for ctx.Err() == nil {
			if err := change(); err != nil {
				t.Errorf("changing the path: %v", err)
				return
			}
		}
	})
	return path
}

// TestAdd_FlippingPath: the checked namespace is the programmed one, so the rules of a pod never get into the
// namespace of the caller, whatever its path leads to at which moment.
func TestAdd_FlippingPath(t *testing.T) {
	t.Parallel()
	const others = 20 // calls of each other kind
	for _, f := range flips() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			list := n.Chain("1.0.0", nil)
			pod := n.NewPod("shop", "web", chaintest.Sidecar)
			addressed(t, pod)
			addressed(t, chaintest.Pod{Netns: n.Netns}) // with which it could be programmed
			input, err := chaintest.Input(list, nil)
			check.OK(t, err)
			node, before := n.Netns, everyRule(t, n.Netns)
			pod.Netns = f.flipping(t, pod.Netns, node)
			programmed, refused := 0, 0
			for i := 0; i < f.adds || programmed == 0 || refused == 0; i++ { // both, or the path did not flip
				out, err := n.Exec("ADD", pod, input)
				switch {
				case err == nil:
					programmed++
				case strings.Contains(string(out), "namespace") || strings.Contains(string(out), "netns"):
					refused++
				default:
					t.Errorf("ADD: %v", err)
				}
			}
			t.Logf("ADD: %d programmed the pod, %d were refused", programmed, refused)
			// CHECK compares the pod's namespace or reports that it is the node's; it never compares the node's.
			for range others {
				out, err := n.Exec("CHECK", pod, input)
				if err != nil && !strings.Contains(string(out), "the node's own network namespace") {
					t.Errorf("CHECK: %v", err)
				}
				if out, err := n.Exec("DEL", pod, input); err != nil {
					t.Errorf("DEL: %v: %s", err, out)
				}
			}
			for _, mode := range []string{"REDIRECT", "TPROXY"} {
				byHand(t, n, others, pod.Netns, mode)
			}
			check.Equal(t, everyRule(t, node), before, "the node's own namespace was programmed")
		})
	}
}

// byHand runs the command "istio-cni iptables" for a path, so often.
func byHand(t *testing.T, n *chaintest.Node, calls int, path, mode string) {
	t.Helper()
	for range calls {
		err := netns.Do(n.Netns, func() error {
			out, err := exec.CommandContext(t.Context(), chaintest.Program(t), "iptables", "--reconcile", "-b", "*", "-m", mode,
				"--network-namespace", path).CombinedOutput()
			if err != nil && !strings.Contains(string(out), "is the network namespace of this command") {
				t.Errorf("%v: %s", err, out)
			}
			return nil
		})
		check.OK(t, err)
	}
}

// TestAdd_NetnsResolvedOnce: whatever the backend, one call of the kernel is given the path, and all else is done through
// the open file. The library looks at it once more after ADD, where the runtime does not allow the plugin's own namespace.
func TestAdd_NetnsResolvedOnce(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"auto", "netlink", "native", "iptables"} {
		n := chaintest.New(t, chaintest.Program(t))
		pod := n.NewPod("shop", "web", chaintest.Sidecar)
		addressed(t, pod)
		link := filepath.Join(t.TempDir(), "resolved-once")
		check.OK(t, os.Symlink(pod.Netns, link))
		pod.Netns = link
		input, err := chaintest.Input(n.Chain("1.0.0", chaintest.Stanza{"backend": backend}), nil)
		check.OK(t, err)
		for _, call := range []string{"ADD", "CHECK", "DEL"} {
			r, out := n.Traced(call, pod, input, "CNI_NETNS_OVERRIDE=1")
			if r.Status.ExitStatus() != 0 {
				t.Fatalf("%s, %s: %s", backend, call, out)
			}
			want := map[string]int{"ADD": 1, "CHECK": 1}[call]
			if uses := r.Under("resolved-once"); len(uses) != want {
				t.Errorf("%s, %s: the path is resolved %d times, want %d", backend, call, len(uses), want)
			}
		}
	}
}
