package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// numbered returns a pod of a node with many pods.
func numbered(i int, addresses ...string) sandbox.Pod {
	pod := podOf(addresses...)
	pod.Name, pod.UID = fmt.Sprint("web-", i), fmt.Sprintf("0f5d3a52-4d64-4b2b-9d5a-%012x", i)
	return pod
}

func addressOf(i int) string { return fmt.Sprintf("10.79.%d.%d", i/200, i%200+1) }

// populate fills a node with pods of which each source knows some, and some have problems. It returns the pods and the namespace of
// each pod that has one.
func (n *fixture) populate(count int) (pods []sandbox.Pod, want map[string]string) {
	n.Helper()
	want = map[string]string{}
	for i := range count {
		pod := numbered(i, addressOf(i))
		path := n.Sandbox(addressOf(i) + "/16")
		want[pod.UID] = path
		process, _ := n.startIn(path)
		switch i % 10 {
		case 0, 1, 2, 3: // by libcni's cache, one of them without addresses
			n.Cached(fmt.Sprint("c", i), pod, n.Kept(path, fmt.Sprint("cni-", i)))
			n.Contain(process, pod.UID, "0123")
			if i%10 == 3 {
				pod.Addresses = nil
			}
		case 4, 5: // by a mount
			n.Mount(path, fmt.Sprint("cni-", i))
			n.Contain(process, pod.UID, "0123")
		case 6: // by a process alone
			n.Contain(process, pod.UID, "0123")
		case 7: // another pod's by its process
			n.Contain(process, theirUID, "0123")
			delete(want, pod.UID)
		case 8: // another pod's by the cache
			n.Cached(fmt.Sprint("c", i), withUID(numbered(i+1000), theirUID), n.Mount(path, fmt.Sprint("cni-", i)))
			delete(want, pod.UID)
		case 9: // two namespaces
			n.Mount(path, fmt.Sprint("cni-", i))
			n.Mount(n.Sandbox(addressOf(i)+"/16"), fmt.Sprint("too-", i))
			delete(want, pod.UID)
		}
		pods = append(pods, pod)
	}
	shared := n.Sandbox(addressOf(count)+"/16", addressOf(count+1)+"/16") // two pods that claim one namespace
	n.Mount(shared, "shared")
	for i := count; i < count+2; i++ {
		pods = append(pods, numbered(i, addressOf(i)))
		want[pods[i].UID] = shared
	}
	n.IP(n.Host, "address add "+addressOf(count+2)+"/32 dev lo")
	return append(pods, numbered(count+2, addressOf(count+2)), numbered(count+3, addressOf(count+3))), want
}

// startIn starts a real process in a namespace, which the procfs of the test lacks.
func (n *fixture) startIn(path string) (pid int, end func()) {
	n.Helper()
	process, end := n.Start(path)
	n.Do(os.Remove(filepath.Join(n.Proc, strconv.Itoa(process.Process.Pid))))
	return process.Process.Pid, end
}

// TestFindAll_AsFind: for each pod of a node, FindAll has the result of Find, with the same cause of an error. It enters each
// namespace once, and leaves only its results open.
func TestFindAll_AsFind(t *testing.T) { //nolint:paralleltest // it counts the entries and files of the process
	n := newFixture(t)
	pods, want := n.populate(60)
	namespaces := len(pods) - 4 + 6 + 1 // one of each pod, a second one of six pods, and the shared one
	files, entries := netnstest.OpenFiles(t), netns.Entries()
	all := n.FindAll(t.Context(), pods)
	if got := netns.Entries() - entries; got > uint64(namespaces+1) {
		t.Errorf("%d entries into %d namespaces and the node's own", got, namespaces)
	}
	check.Equal(t, netnstest.OpenFiles(t)-files, len(want), "open files")
	check.Equal(t, len(all), len(pods), "results")
	var errs []error
	for _, pod := range pods {
		got := all[pod.UID]
		alone, err := n.Find(t.Context(), pod)
		errs = append(errs, err)
		switch {
		case err != nil:
			check.Equal(t, fmt.Sprint(errors.Unwrap(got.Err)), errors.Unwrap(err).Error(), pod.Name)
		case got.Err != nil:
			t.Errorf("%s: %v", pod.Name, got.Err)
		default:
			if got.Namespace.Inode() != sandboxtest.Inode(t, want[pod.UID]) || got.Namespace.Source != alone.Source || got.Namespace.Place != alone.Place {
				t.Errorf("%s: got %s of %+v, want %+v", pod.Name, got.Namespace.Inode(), got.Namespace, alone)
			}
			alone.Close()
			got.Namespace.Close()
		}
	}
	for _, cause := range []error{sandbox.ErrClaimed, sandbox.ErrAmbiguous, sandbox.ErrHost, sandbox.ErrNotFound} {
		if !errors.Is(errors.Join(errs...), cause) {
			t.Errorf("no pod has the error %q", cause)
		}
	}
	check.Equal(t, netnstest.OpenFiles(t), files, "open files")
}

// TestFindAll_ReadsOnce: what FindAll reads of a node does not grow with the number of searched pods.
func TestFindAll_ReadsOnce(t *testing.T) { //nolint:paralleltest // it counts what the process reads
	n := newFixture(t)
	var pods []sandbox.Pod
	for i := range 50 {
		pods = append(pods, numbered(i, addressOf(i)))
		n.Cached(fmt.Sprint("c", i), pods[i], n.Dir+"/gone", func(entry map[string]any) { entry["more"] = strings.Repeat("x", 4<<10) })
		n.Process(fmt.Sprint(100+i), n.Host, pods[i].UID)
	}
	read := func(pods []sandbox.Pod) int {
		before := hostfstest.BytesRead(t)
		for _, result := range n.FindAll(t.Context(), pods) {
			if !errors.Is(result.Err, sandbox.ErrNotFound) {
				t.Error(result)
			}
		}
		return hostfstest.BytesRead(t) - before
	}
	one := read(pods[:1])
	if all := read(pods); all > one+one/10 {
		t.Errorf("%d bytes for one pod, %d for %d", one, all, len(pods))
	}
}

// TestFindAll_Interrupted: each pod has a result, and nothing stays open.
func TestFindAll_Interrupted(t *testing.T) { //nolint:paralleltest // it counts the files of the process
	n := newFixture(t)
	pods, _ := n.populate(10)
	before := netnstest.OpenFiles(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	all := n.FindAll(ctx, append(pods, pods...))
	check.Equal(t, len(all), len(pods), "results")
	for name, result := range all {
		if result.Namespace != nil || !errors.Is(result.Err, context.Canceled) {
			t.Errorf("%s: %+v", name, result)
		}
	}
	n.Do(os.Remove(n.Proc + "/1/ns/net"))
	for name, result := range n.FindAll(t.Context(), pods) {
		if !errors.Is(result.Err, sandbox.ErrNoHost) {
			t.Errorf("%s: %+v", name, result)
		}
	}
	check.Equal(t, netnstest.OpenFiles(t), before, "open files")
	check.Equal(t, len(n.FindAll(t.Context(), nil)), 0, "results")
}

// TestFindAll_ForeignProcess: a pod's process in another pod's namespace or in the node's, newer or older than the pod's own, makes
// it neither pod's but the one with the addresses (istio/istio#61211, #55139).
func TestFindAll_ForeignProcess(t *testing.T) {
	t.Parallel()
	for _, pids := range [][]string{{"200", "300"}, {"300", "200"}} {
		n := newFixture(t)
		agent, web, away := numbered(1, "10.79.9.1"), numbered(2, "10.79.9.2"), numbered(3, "10.79.9.3")
		own := map[string]string{agent.UID: n.Sandbox("10.79.9.1/16"), web.UID: n.Sandbox("10.79.9.2/16")}
		n.Process(pids[0], own[agent.UID], agent.UID)
		n.Process(pids[1], own[web.UID], agent.UID) // a node agent's CNI plugin, nsenter
		n.Process("400", own[web.UID], web.UID)
		n.Process("100", n.Host, web.UID)
		n.Process("500", n.Host, away.UID) // the only process of the pod that is seen
		all := n.FindAll(t.Context(), []sandbox.Pod{agent, web, away})
		for uid, path := range own {
			n.Do(all[uid].Err)
			check.Equal(t, all[uid].Namespace.Inode(), sandboxtest.Inode(t, path), uid)
			all[uid].Namespace.Close()
		}
		if err := all[away.UID].Err; !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("got %v", err)
		}
	}
}
