package sandbox_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// crowd gives a few namespaces many names: mounts, lines of the mount table, and processes.
func (n *fixture) crowd(namespaces []string, mounts, processes int) {
	n.Helper()
	var table strings.Builder
	for i := range mounts {
		at := fmt.Sprintf("%s/cni-%d", n.Netns[0], i)
		n.Do(os.Symlink(namespaces[i%len(namespaces)], at))
		inode := sandboxtest.Inode(n.T, at)
		fmt.Fprintf(&table, "9 1 %d:%d net:[%d] %s rw - nsfs nsfs rw\n", unix.Major(inode.Dev), unix.Minor(inode.Dev), inode.Ino, at)
	}
	n.Do(os.WriteFile(n.Proc+"/1/mountinfo", []byte(table.String()), 0o600))
	for i := range processes {
		n.Process(fmt.Sprint(100+i), namespaces[i%len(namespaces)])
	}
}

// TestFind_EntersEachNamespaceOnce: a search must enter each namespace, so the number of entries shows that it enters none twice.
func TestFind_EntersEachNamespaceOnce(t *testing.T) { //nolint:paralleltest // it counts the entries of the process
	namespaces := make([]string, 20)
	for i := range namespaces {
		namespaces[i] = namespace(t, fmt.Sprintf("10.78.0.%d/32", i))
	}
	n := newFixture(t)
	n.crowd(namespaces, 500, 2000)
	before := netns.Entries()
	n.finds(podOf("10.78.0.7"), namespaces[7], sandbox.FromMount)
	check.Equal(t, netns.Entries()-before, uint64(len(namespaces)), "entries")
	n.fails(podOf("10.78.0.77"), sandbox.ErrNotFound, "entries 500", "entries 2001")
	check.Equal(t, netns.Entries()-before, uint64(2*len(namespaces)+1), "entries of both searches and of the node's own namespace")
}

// TestFind_ReportedSandbox: a search reads one entry of the cache, or all entries if the first leads elsewhere.
func TestFind_ReportedSandbox(t *testing.T) { //nolint:paralleltest // it counts what the process reads
	n := newFixture(t)
	const entries, size = 200, 4 << 10
	pod := podOf("10.78.2.1")
	for i := range entries {
		other := sandbox.Pod{Namespace: pod.Namespace, Name: fmt.Sprint("other-", i), UID: fmt.Sprint("u", i)}
		n.Cached(fmt.Sprint("sandbox", i), other, "/nowhere", func(entry map[string]any) { entry["more"] = strings.Repeat("x", size) })
	}
	n.Cached("old", pod, n.Kept(namespace(t, "10.78.2.2/32"), "old"))
	n.Cached("stale", pod, n.Kept(namespace(t, "10.78.2.1/32"), "stale"))
	current := n.Kept(namespace(t, "10.78.2.1/32"), "current")
	n.Cached("current", pod, current)
	for reported, want := range map[string]struct {
		cause error
		most  int // bytes
	}{
		"current": {nil, 32 << 10},
		"old":     {sandbox.ErrAmbiguous, entries * 2 * size},
		"gone":    {sandbox.ErrAmbiguous, entries * 2 * size},
		"":        {sandbox.ErrAmbiguous, entries * 2 * size},
	} {
		pod.Sandbox = reported
		before := hostfstest.BytesRead(t)
		found, err := n.Find(t.Context(), pod)
		if got := hostfstest.BytesRead(t) - before; got > want.most || !errors.Is(err, want.cause) {
			t.Errorf("sandbox %q: %d bytes were read, %v", reported, got, err)
		}
		if err == nil {
			if found.Inode() != sandboxtest.Inode(t, current) || found.Source != sandbox.FromCache {
				t.Errorf("sandbox %q: found %s", reported, found.Place)
			}
			found.Close()
		}
	}
}
