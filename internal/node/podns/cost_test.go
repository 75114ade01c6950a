package podns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// crowd is a node with many names for few namespaces: mounts, lines of the mount table, and processes.
func crowd(tb testing.TB, namespaces []string, mounts, processes int) Places {
	tb.Helper()
	dir := tb.TempDir()
	p := Places{Netns: []string{filepath.Join(dir, "netns")}, Proc: filepath.Join(dir, "proc")}
	link := func(target, at string) {
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.Symlink(target, at)); err != nil {
			tb.Fatal(err)
		}
	}
	link("/proc/self/ns/net", p.Proc+"/1/ns/net")
	var table strings.Builder
	for i := range mounts {
		at := fmt.Sprintf("%s/cni-%d", p.Netns[0], i)
		link(namespaces[i%len(namespaces)], at)
		inode, err := netns.InodeOf(at)
		if err != nil {
			tb.Fatal(err)
		}
		fmt.Fprintf(&table, "9 1 %d:%d net:[%d] %s rw - nsfs nsfs rw\n", unix.Major(inode.Dev), unix.Minor(inode.Dev), inode.Ino, at)
	}
	if err := os.WriteFile(p.Proc+"/1/mountinfo", []byte(table.String()), 0o600); err != nil {
		tb.Fatal(err)
	}
	for i := range processes {
		link(namespaces[i%len(namespaces)], fmt.Sprintf("%s/%d/ns/net", p.Proc, 100+i))
	}
	return p
}

func pod(address string) Pod {
	return Pod{Namespace: "shop", Name: "web-1", UID: "u", Addresses: []netip.Addr{netip.MustParseAddr(address)}}
}

// counts are how often each namespace is opened and entered.
type counts struct{ opened, entered map[netns.Inode]int }

// counted searches and counts.
func counted(t *testing.T, p Places, of Pod) (counts, *Namespace, error) {
	t.Helper()
	c := counts{opened: map[netns.Inode]int{}, entered: map[netns.Inode]int{}}
	count := func(in map[netns.Inode]int, path string) {
		inode, err := netns.InodeOf(path)
		if err != nil {
			t.Error(err)
		}
		in[inode]++
	}
	s := newSearch(p, of)
	s.open = func(path string) (*netns.Namespace, error) {
		count(c.opened, path)
		return netns.Open(path)
	}
	s.enter = func(n *netns.Namespace, of []netip.Addr, node int) ([]route.Attachment, error) {
		count(c.entered, n.Path())
		return attachments(n, of, node)
	}
	found, err := s.run(t.Context())
	return c, found, err
}

func TestEachNamespaceIsEnteredOnce(t *testing.T) {
	t.Parallel()
	namespaces := make([]string, 20)
	for i := range namespaces {
		namespaces[i] = netnstest.New(t)
		address(t, namespaces[i], fmt.Sprintf("10.78.0.%d/32", i))
	}
	p := crowd(t, namespaces, 500, 2000)
	want := func(what string, got map[netns.Inode]int, number int) {
		t.Helper()
		if len(got) != number {
			t.Errorf("%d namespaces were %s, want %d", len(got), what, number)
		}
		for inode, times := range got {
			if times != 1 {
				t.Errorf("%s was %s %d times", inode, what, times)
			}
		}
	}
	c, found, err := counted(t, p, pod("10.78.0.7"))
	if err != nil {
		t.Fatal(err)
	}
	found.Close()
	const andTheNodesOwn = 1
	want("opened", c.opened, len(namespaces)+andTheNodesOwn)
	want("entered", c.entered, len(namespaces))

	c, _, err = counted(t, p, pod("10.78.0.77"))
	if !errors.Is(err, ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	want("opened", c.opened, len(namespaces)+andTheNodesOwn)
	want("entered", c.entered, len(namespaces)+andTheNodesOwn)
	for _, says := range []string{"entries 500", "entries 2001"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("error %q does not say %q", err, says)
		}
	}
}

// Whatever a search ends with, the only thing that it leaves is what it gives.
func TestFindLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	one, two, other := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	for _, path := range []string{one, two} {
		address(t, path, "10.78.1.1/32")
	}
	address(t, other, "10.78.1.2/32")
	p := crowd(t, []string{one, two, other}, 30, 30)
	all := []string{one, two, other}
	before := held(t, all)
	ctx := t.Context()
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 10 {
				found, err := p.Find(ctx, pod("10.78.1.2"))
				if err != nil {
					t.Error(err)
					return
				}
				found.Close()
				for cause, err := range map[error]error{
					ErrAmbiguous: second(p.Find(ctx, pod("10.78.1.1"))), ErrNotFound: second(p.Find(ctx, pod("10.78.1.3"))),
					context.Canceled: second(p.Find(canceled, pod("10.78.1.1"))),
				} {
					if !errors.Is(err, cause) {
						t.Errorf("got %v, want %v", err, cause)
					}
				}
			}
		})
	}
	work.Wait()
	if after := held(t, all); after != before {
		t.Errorf("%d open files are of the namespaces, want %d", after, before)
	}
	found, err := p.Find(t.Context(), pod("10.78.1.2"))
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	if after := held(t, all); after != before+1 {
		t.Errorf("%d open files are of the namespaces, want one more than %d", after, before)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(tasks) == 0 {
		t.Fatal(tasks, err)
	}
	for _, task := range tasks {
		inode, err := netns.InodeOf(task)
		if err != nil {
			continue // a thread that has ended
		}
		for _, path := range all {
			if of, err := netns.InodeOf(path); err != nil || of == inode {
				t.Errorf("%s is in %s (%v)", task, path, err)
			}
		}
	}
}

// address gives a namespace an address on an interface of its own.
func address(tb testing.TB, path, address string) {
	tb.Helper()
	netnstest.Run(tb, path, "ip", "link", "add", "eth0", "up", "type", "veth", "peer", "name", "peer0")
	netnstest.Run(tb, path, "ip", "address", "add", address, "dev", "eth0")
}

func second(_ *Namespace, err error) error { return err }

// held counts this process's open files of namespaces.
func held(t *testing.T, paths []string) int {
	t.Helper()
	of := map[netns.Inode]bool{}
	for _, path := range paths {
		inode, err := netns.InodeOf(path)
		if err != nil {
			t.Fatal(err)
		}
		of[inode] = true
	}
	files, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for _, file := range files {
		if inode, err := netns.InodeOf(file); err == nil && of[inode] {
			count++
		}
	}
	return count
}

func TestANamespaceStaysTheSameUntilItIsClosed(t *testing.T) {
	t.Parallel()
	one, two := netnstest.New(t), netnstest.New(t)
	at := filepath.Join(t.TempDir(), "cni-1")
	mount := func(path string) {
		if err := errors.Join(os.WriteFile(at, nil, 0o600), unix.Mount(path, at, "", unix.MS_BIND, "")); err != nil {
			t.Fatal(err)
		}
	}
	unmount := func() {
		if err := errors.Join(unix.Unmount(at, unix.MNT_DETACH), os.Remove(at)); err != nil {
			t.Fatal(err)
		}
	}
	mount(one)
	n, err := netns.Open(at)
	if err != nil {
		t.Fatal(err)
	}
	unmount()
	mount(two)
	defer unmount()
	same, err := netnstest.Same(n.Path(), one)
	if err != nil || !same {
		t.Errorf("it became another one: %v, %v", same, err)
	}
	if inode, err := netns.InodeOf(n.Path()); err != nil || inode != n.Inode() {
		t.Errorf("%s is %s (%v), want %s", n.Path(), inode, err, n.Inode())
	}
	n.Close()
	n.Close()
	if _, err := os.Stat(n.Path()); err == nil {
		t.Errorf("it is closed and has the path %q", n.Path())
	}
}

func TestNetworkNamespacesAmongMounts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		mount hostpath.Mount
		want  netns.Inode
	}{
		{hostpath.Mount{Device: "0:4", Root: "net:[4026532281]", Type: "nsfs"}, netns.Inode{Dev: unix.Mkdev(0, 4), Ino: 4026532281}},
		{hostpath.Mount{Device: "0:4", Root: "uts:[4026532281]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:4", Root: "net:[x]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "zero", Root: "net:[1]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:31", Root: "net:[1]", Type: "tmpfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:21", Root: "/", Type: "proc"}, netns.Inode{}},
	} {
		if inode, is := mountedNetNS(tc.mount); inode != tc.want || is != (tc.want != netns.Inode{}) {
			t.Errorf("%+v: got %+v, %v", tc.mount, inode, is)
		}
	}
}

// BenchmarkFind looks for one pod among 250, of which each has a mount, an entry in the cache and four processes.
func BenchmarkFind(b *testing.B) {
	const pods = 250
	namespaces := make([]string, pods)
	for i := range namespaces {
		namespaces[i] = netnstest.New(b)
		address(b, namespaces[i], fmt.Sprintf("10.79.0.%d/32", i))
	}
	p := crowd(b, namespaces, pods, 4*pods)
	p.Cache = b.TempDir()
	for i := range namespaces {
		path := fmt.Sprintf("%s/cni-%d", p.Netns[0], i)
		entry := fmt.Sprintf(`{"kind":"cniCacheV1","containerId":"c%d","config":"%s","ifName":"eth0","networkName":"net","netns":%q,`+
			`"cniArgs":[["IgnoreUnknown","1"],["K8S_POD_NAMESPACE","shop"],["K8S_POD_NAME","web-%d"],["K8S_POD_UID","u%d"]],`+
			`"result":{"cniVersion":"1.0.0","interfaces":[],"ips":[],"padding":%q}}`, i, "e30=", path, i, i, strings.Repeat("x", 2000))
		if err := os.WriteFile(fmt.Sprintf("%s/net-c%d-eth0", p.Cache, i), []byte(entry), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	without := func(drop func(*Places)) Places {
		q := p
		drop(&q)
		return q
	}
	const last = pods - 1
	wanted := pod(fmt.Sprintf("10.79.0.%d", last))
	wanted.Name, wanted.UID = fmt.Sprintf("web-%d", last), fmt.Sprintf("u%d", last)
	for _, way := range []struct {
		from Source
		in   Places
	}{
		{FromCache, p},
		{FromMount, without(func(q *Places) { q.Cache = "" })},
		{FromProc, without(func(q *Places) { q.Cache, q.Netns = "", nil })},
	} {
		if way.from == FromProc { // which comes last
			if err := os.WriteFile(p.Proc+"/1/mountinfo", nil, 0o600); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(string(way.from), func(b *testing.B) {
			for b.Loop() {
				found, err := way.in.Find(b.Context(), wanted)
				if err != nil || found.Source != way.from {
					b.Fatal(found, err)
				}
				found.Close()
			}
		})
	}
}
