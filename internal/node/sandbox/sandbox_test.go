package sandbox_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/route"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const uid = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"

// fixture is a node with pods to search.
type fixture struct{ *sandboxtest.Node }

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return &fixture{sandboxtest.New(t)}
}

// onFixtures runs each test on its own prepared node.
func onFixtures(t *testing.T, tests map[string]func(n *fixture), prepare ...func(*fixture)) {
	t.Helper()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t)
			for _, p := range prepare {
				p(n)
			}
			test(n)
		})
	}
}

// withoutFirst makes the first process unreadable, and puts a second process into a namespace.
func (n *fixture) withoutFirst(path, stat string) {
	n.Helper()
	n.Do(os.Remove(n.Proc + "/1/ns/net"))
	n.Process("2", path)
	n.Do(os.WriteFile(n.Proc+"/2/stat", []byte(stat), 0o600))
}

// mountedAt adds the mount of a namespace at a path of the node to the first process's mount table.
func (n *fixture) mountedAt(path, at string) {
	n.Helper()
	i := sandboxtest.Inode(n.T, path)
	line := fmt.Sprintf("90 25 %d:%d net:[%d] %s rw shared:7 - nsfs nsfs rw\n", unix.Major(i.Dev), unix.Minor(i.Dev), i.Ino, at)
	n.Do(os.WriteFile(n.Proc+"/1/mountinfo", []byte(line), 0o600))
}

// finds checks that a search returns a namespace from a source.
func (n *fixture) finds(pod sandbox.Pod, path string, from sandbox.Source) {
	n.Helper()
	got, err := n.Find(n.Context(), pod)
	check.OK(n, err, "got error")
	defer got.Close()
	if sandboxtest.Inode(n.T, got.Path()) != sandboxtest.Inode(n.T, path) || got.Source != from {
		n.Errorf("got %s of %s, want %s of %s", got.Inode(), got.Source, path, from)
	}
}

// failure checks that a search fails with a cause (nil: any) and some texts, and returns the error.
func (n *fixture) failure(pod sandbox.Pod, cause error, texts ...string) *sandbox.Error {
	n.Helper()
	got, err := n.Find(n.Context(), pod)
	if err == nil {
		n.Fatalf("got %s of %s, want the error %q", got.Inode(), got.Source, cause)
	}
	failed, ok := errors.AsType[*sandbox.Error](err)
	if !ok || cause != nil && !errors.Is(err, cause) || strings.Contains(err.Error(), "\n") {
		n.Fatalf("got error %v, want one line of %q", err, cause)
	}
	for _, text := range append(texts, pod.Namespace+"/"+pod.Name, pod.UID) {
		if !strings.Contains(err.Error(), text) {
			n.Errorf("error %q lacks %q", err, text)
		}
	}
	return failed
}

// fails is failure without a result.
func (n *fixture) fails(pod sandbox.Pod, cause error, texts ...string) {
	n.Helper()
	_ = n.failure(pod, cause, texts...)
}

// namespace returns a network namespace with addresses on its own interface.
func namespace(t *testing.T, addresses ...string) string {
	t.Helper()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "add", "eth0", "up", "type", "veth", "peer", "name", "peer0")
	for _, address := range addresses {
		netnstest.Run(t, path, "ip", "address", "add", address, "dev", "eth0")
	}
	return path
}

func podOf(addresses ...string) sandbox.Pod {
	pod := sandbox.Pod{Namespace: "shop", Name: "web-1", UID: uid}
	for _, a := range addresses {
		pod.Addresses = append(pod.Addresses, netip.MustParseAddr(a))
	}
	return pod
}

func withUID(pod sandbox.Pod, uid string) sandbox.Pod {
	pod.UID = uid
	return pod
}

func TestFind_Sources(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "10.77.1.5/32", "fd77:1::5/128")
	pod := podOf("10.77.1.5", "fd77:1::5")
	for _, tc := range []struct {
		name string
		from sandbox.Source
		set  func(*fixture)
	}{
		{"libcni's cache before all others", sandbox.FromCache, func(n *fixture) {
			n.Cached("c1", pod, n.Mount(ns, "cni-1"))
			n.Process("77", ns)
		}},
		{"a mount of the runtime before processes", sandbox.FromMount, func(n *fixture) {
			n.Mount(ns, "cni-1")
			n.Process("77", ns)
		}},
		{"a process, without cache and directory of mounts", sandbox.FromProc, func(n *fixture) {
			n.Do(os.Remove(n.Cache))
			n.Netns = nil
			n.Process("77", ns)
		}},
		{"the process is gone and the mount is left", sandbox.FromMount, func(n *fixture) {
			_, end := n.Start(ns)
			n.Mount(ns, "cni-1")
			end()
		}},
		{"a mount that only the node's first process has, under a root of the node", sandbox.FromMount, func(n *fixture) {
			n.Roots = []string{filepath.Join(n.Dir, "host")}
			n.MountAt(ns, filepath.Join(n.Roots[0], "/run/elsewhere/my ns"))
			n.mountedAt(ns, `/run/elsewhere/my\040ns`)
		}},
		{"the same through the first process's root", sandbox.FromMount, func(n *fixture) {
			root := filepath.Join(n.Dir, "root")
			n.MountAt(ns, filepath.Join(root, "/run/elsewhere/x"))
			n.Do(os.Symlink(root, n.Proc+"/1/root"))
			n.mountedAt(ns, "/run/elsewhere/x")
		}},
		{"the cache's path under a root, where the mount is not passed on to this process", sandbox.FromCache, func(n *fixture) {
			n.Roots = []string{filepath.Join(n.Dir, "host")}
			n.Do(os.MkdirAll(n.Roots[0]+"/run/netns", 0o700))
			n.Write(n.Roots[0]+"/run/netns/cni-1", nil)
			n.MountAt(ns, filepath.Join(n.Proc, "1/root/run/netns/cni-1"))
			n.Cached("c1", pod, "/var/run/netns/cni-1")
		}},
		{"the cache's path of a process", sandbox.FromCache, func(n *fixture) {
			n.Process("77", ns)
			n.Cached("c1", pod, "/proc/77/ns/net")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t)
			tc.set(n)
			n.finds(pod, ns, tc.from)
		})
	}
}

// TestFind_SomeAddresses: a process of the pod decides for a namespace that lacks an address of the pod's status, but not for another
// pod's.
func TestFind_SomeAddresses(t *testing.T) {
	t.Parallel()
	pod := podOf("10.77.1.6", "fd77:1::6")
	for _, address := range []string{"10.77.1.6/32", "fd77:1::6/128"} {
		n := newFixture(t)
		ns := namespace(t, address)
		n.Process("77", ns, uid)
		n.Process("78", namespace(t, "10.77.1.7/32"), uid)
		n.finds(pod, ns, sandbox.FromProc)
		n.Mount(ns, "cni-1")
		n.finds(pod, ns, sandbox.FromMount)
		n.Process("79", namespace(t, "10.77.1.6/32", "fd77:1::6/128"), theirUID)
		n.finds(pod, ns, sandbox.FromMount)
	}
}

// TestFind_Oldest: of two namespaces with the pod's addresses and processes, the sandbox's process began first.
func TestFind_Oldest(t *testing.T) {
	t.Parallel()
	n := newFixture(t)
	pod, sandboxed, made := podOf("10.77.1.8"), namespace(t, "10.77.1.8/32"), namespace(t, "10.77.1.8/32")
	n.Process("90", sandboxed, uid)
	n.Process("80", made, uid) // process IDs wrap
	n.fails(pod, sandbox.ErrAmbiguous)
	for pid, began := range map[string]int{"90": 500, "80": 1000} {
		text := fmt.Sprintf("%s (a) b) S 1%s %d 1 2 3", pid, strings.Repeat(" 0", 17), began)
		n.Do(os.WriteFile(filepath.Join(n.Proc, pid, "stat"), []byte(text), 0o600))
	}
	n.finds(pod, sandboxed, sandbox.FromProc)
}

func TestFind_Cache(t *testing.T) {
	t.Parallel()
	ns, other := namespace(t, "10.77.2.5/32"), namespace(t, "10.77.2.6/32")
	pod, unaddressed := podOf("10.77.2.5"), podOf()
	without := func(key string) func(map[string]any) { return func(e map[string]any) { delete(e, key) } }
	for _, tc := range []struct {
		name string
		pod  sandbox.Pod
		set  func(n *fixture, at, elsewhere string)
	}{
		{"several interfaces of one sandbox", unaddressed, func(n *fixture, at, _ string) {
			n.Cached("c1", pod, at)
			n.Cached("c2", pod, at)
		}},
		{"sandboxes of earlier attempts, whose namespaces are gone", unaddressed, func(n *fixture, at, _ string) {
			n.Cached("c0", pod, n.Dir+"/netns/cni-0")
			n.Cached("c1", pod, at)
			n.Write(n.Dir+"/netns/cni-9", nil) // unmounted, but not removed
			n.Cached("c9", pod, n.Dir+"/netns/cni-9")
			n.Cached("c10", pod, "", without("netns"))
		}},
		{"a sandbox of an earlier attempt that lives on", pod, func(n *fixture, at, elsewhere string) {
			n.Cached("c0", pod, elsewhere)
			n.Cached("c1", pod, at)
		}},
		{"pods of the name, of the UID, and of the name in another namespace", unaddressed, func(n *fixture, at, elsewhere string) {
			n.Cached("c0", withUID(pod, "before"), elsewhere)
			n.Cached("c2", sandbox.Pod{Namespace: "other", Name: pod.Name, UID: uid}, elsewhere)
			n.Cached("c3", sandbox.Pod{Namespace: pod.Namespace, Name: pod.Name + "0", UID: uid}, elsewhere)
			n.Cached("c1", pod, at)
		}},
		{"a runtime that gives no UID, by the addresses", pod, func(n *fixture, at, elsewhere string) {
			n.Cached("c0", withUID(pod, ""), elsewhere)
			n.Cached("c1", withUID(pod, ""), at)
		}},
		{"among files that are no entry", unaddressed, func(n *fixture, at, elsewhere string) {
			n.Write(n.Cache+"/b", []byte("\x00\xffweb-1"))
			n.Write(n.Cache+"/e", []byte(`{"kind":"cniCacheV1","config":"%%%","cniArgs":"web-1"}`))
			n.Cached("f", pod, elsewhere, func(e map[string]any) { e["kind"] = "cniCacheV2" })
			n.Cached("h", pod, elsewhere, without("cniArgs"))
			n.Do(os.Mkdir(n.Cache+"/web-1", 0o700))
			n.Do(os.Symlink(n.Cache, n.Cache+"/link"))
			n.Do(unix.Mkfifo(n.Cache+"/fifo", 0o600))
			n.Write(n.Cache+"/z", []byte(`{"a":"web-1`+strings.Repeat(" ", 5<<20)))
			n.Cached("c1", pod, at)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t)
			tc.set(n, n.Kept(ns, "cni-1"), n.Kept(other, "cni-2"))
			n.finds(tc.pod, ns, sandbox.FromCache)
		})
	}
}

func TestFind_Refusals(t *testing.T) {
	t.Parallel()
	ns, other := namespace(t, "10.77.4.5/32"), namespace(t, "10.77.4.6/32", "10.77.4.7/32")
	pod, unaddressed := podOf("10.77.4.5"), podOf()
	for _, tc := range []struct {
		name  string
		pod   sandbox.Pod
		cause error
		texts []string
		set   func(*fixture)
	}{
		{"a pod that is nowhere", pod, sandbox.ErrNotFound, []string{"10.77.4.5", "entries 0"}, func(*fixture) {}},
		{"places that are not there", pod, sandbox.ErrNotFound, []string{"/none/cache", "/none/netns", "no such file"}, func(n *fixture) {
			n.Cache, n.Netns = n.Dir+"/none/cache", []string{n.Dir + "/none/netns"}
		}},
		{"a stale entry whose path is another pod's by now", pod, sandbox.ErrNotFound, []string{"does not have the pod's addresses"}, func(n *fixture) {
			n.Cached("c1", pod, n.Mount(other, "cni-1"))
		}},
		{"an entry whose namespace is gone", unaddressed, sandbox.ErrNotFound, []string{"no such namespace any more", "entries 1"}, func(n *fixture) {
			n.Cached("c1", pod, n.Dir+"/netns/cni-1")
		}},
		{"an entry that is no namespace", unaddressed, sandbox.ErrNotFound, []string{"not a network namespace"}, func(n *fixture) {
			n.Write(n.Dir+"/file", nil)
			n.Cached("c1", pod, n.Dir+"/file")
		}},
		{"an entry of another kind of namespace", unaddressed, sandbox.ErrNotFound, []string{"a namespace of another kind (0x4000000), not a network namespace"}, func(n *fixture) {
			n.Cached("c1", pod, n.Kept("/proc/self/ns/uts", "uts"))
		}},
		{"an entry without a namespace", unaddressed, sandbox.ErrNotFound, []string{"without a namespace"}, func(n *fixture) { n.Cached("c1", pod, "") }},
		{"a new pod of the name of the one in the cache", unaddressed, sandbox.ErrNotFound, []string{`one of UID "before"`}, func(n *fixture) {
			n.Cached("c1", withUID(pod, "before"), n.Mount(ns, "cni-1"))
		}},
		{"no addresses and an entry without UID", unaddressed, sandbox.ErrNotFound, []string{"without the pod's UID"}, func(n *fixture) {
			n.Cached("c1", withUID(pod, ""), n.Mount(ns, "cni-1"))
		}},
		{"no addresses and an entry that names a process", unaddressed, sandbox.ErrNotFound, []string{"another process"}, func(n *fixture) {
			n.Process("77", ns)
			n.Cached("c1", pod, "/proc/77/ns/net")
		}},
		{"no addresses and no cache", unaddressed, sandbox.ErrNotFound, []string{"addresses []"}, func(n *fixture) {
			n.Mount(ns, "cni-1")
			n.Process("77", ns)
		}},
		{"no addresses and two sandboxes that live", unaddressed, sandbox.ErrAmbiguous, []string{"net:["}, func(n *fixture) {
			n.Cached("c1", pod, n.Mount(ns, "cni-1"))
			n.Cached("c2", pod, n.Mount(other, "cni-2"))
		}},
		{"a namespace with one of two addresses", podOf("10.77.4.5", "10.77.4.8"), sandbox.ErrLoopback, []string{"lacks some"}, func(n *fixture) {
			n.Mount(ns, "cni-1")
			n.Process("77", ns)
		}},
		{"entries that cannot be read", pod, sandbox.ErrNotFound, []string{"2 not readable", "cannot be read"}, func(n *fixture) {
			n.Write(n.Cache+"/a", []byte(`{"web-1"`))
			n.Write(n.Cache+"/b", []byte(`"web-1"`))
		}},
		{"a mount that no path leads to", pod, sandbox.ErrNotFound, []string{"entries 1, 1 not readable", "/run/elsewhere/x"}, func(n *fixture) {
			n.mountedAt(ns, "/run/elsewhere/x")
		}},
		{"a second process that is not the kernel's by its name", pod, sandbox.ErrNoHost, []string{"/proc/1/ns/net"}, func(n *fixture) {
			n.withoutFirst(ns, "2 (systemd) S 0 0 0")
		}},
		{"a second process that is not the kernel's by its parent", pod, sandbox.ErrNoHost, []string{"/proc/1/ns/net"}, func(n *fixture) {
			n.withoutFirst(ns, "2 (kthreadd) S 1 0 0")
		}},
		{"a second process of which nothing is known", pod, sandbox.ErrNoHost, []string{"/proc/1/ns/net"}, func(n *fixture) { n.withoutFirst(ns, "") }},
		{"a node whose procfs is not seen", pod, sandbox.ErrNoHost, []string{"no procfs of the node", "/proc"}, func(n *fixture) {
			n.Do(os.RemoveAll(n.Proc))
			n.Mount(ns, "cni-1")
			if n.Reachable() {
				n.Error("a search could succeed")
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t)
			tc.set(n)
			n.fails(tc.pod, tc.cause, tc.texts...)
		})
	}
}

// A search reports no problem for a path that is not a namespace, or for another name of a known namespace.
func TestFind_Silent(t *testing.T) {
	t.Parallel()
	n := newFixture(t)
	other := namespace(t, "10.77.9.6/32")
	n.Mount(other, "cni-1")
	n.mountedAt(other, "/run/elsewhere/x")
	n.Mount("/proc/self/ns/uts", "uts")
	n.Write(n.Netns[0]+"/left-behind", nil)
	n.Do(unix.Mkfifo(n.Netns[0]+"/fifo", 0o600))
	n.Do(os.Symlink("/nowhere", n.Netns[0]+"/dangling"))
	n.Do(os.Mkdir(n.Netns[0]+"/directory", 0o700))
	n.Process("77", other)
	n.Do(os.Mkdir(n.Proc+"/78", 0o700))
	n.Cached("c1", sandbox.Pod{Namespace: "shop", Name: "web-1-other", UID: "v"}, n.Netns[0]+"/cni-1")
	want := []sandbox.Searched{
		{Source: sandbox.FromCache, Place: n.Cache, Entries: 1},
		{Source: sandbox.FromMount, Place: n.Netns[0], Entries: 5},
		{Source: sandbox.FromMount, Place: n.Proc + "/1/mountinfo", Entries: 1},
		{Source: sandbox.FromProc, Place: n.Proc, Entries: 3},
	}
	check.Diff(t, "searched", want, n.failure(podOf("10.77.9.5"), sandbox.ErrNotFound).Searched)
}

func TestFind_NodesOwn(t *testing.T) {
	t.Parallel()
	pod := podOf("10.77.6.1")
	onFixtures(t, map[string]func(n *fixture){
		"a pod with its address": func(n *fixture) { n.fails(pod, sandbox.ErrHost) },
		"an entry of the cache": func(n *fixture) {
			n.Cached("c1", podOf(), n.Netns[0]+"/default")
			n.fails(pod, sandbox.ErrHost, "the node's own")
			n.fails(podOf(), sandbox.ErrHost, "the node's own")
		},
		"an entry of the cache, and a namespace with another address": func(n *fixture) {
			n.Cached("c1", podOf(), n.Netns[0]+"/default")
			ns := namespace(n.T, "10.77.6.2/32")
			n.Process("78", ns)
			n.finds(podOf("10.77.6.2"), ns, sandbox.FromProc)
		},
		"a pod with the same address": func(n *fixture) {
			ns := namespace(n.T, "10.77.6.1/32")
			n.Process("78", ns)
			n.finds(pod, ns, sandbox.FromProc)
		},
		"this process's own": func(n *fixture) {
			n.Process("78", "/proc/self/ns/net")
			n.Cached("c1", podOf(), n.Mount("/proc/self/ns/net", "own"))
			own, err := route.Addresses()
			n.Do(err)
			if len(own) == 0 {
				n.Fatal("this process has no address")
			}
			n.fails(podOf(own[0].WithZone("").String()), sandbox.ErrHost)
			n.fails(podOf(), sandbox.ErrHost)
		},
		"known by the kernel's threads": func(n *fixture) {
			n.withoutFirst(n.Host, "2 (kthreadd) S 0 0 0 0 -1 2129984")
			n.fails(pod, sandbox.ErrHost)
		},
	}, func(n *fixture) {
		n.IP(n.Host, "address add 10.77.6.1/32 dev lo")
		n.Mount(n.Host, "default")
		n.Process("77", n.Host)
	})
}

func TestFind_Addresses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		addresses []string // of the namespace
		pod       []string
	}{
		{"IPv6 spelled at length", []string{"fd77:7::5/64"}, []string{"fd77:0007:0:0:0:0:0:0005"}},
		{"both families, in the other order", []string{"10.77.7.5/24", "fd77:7::5/64"}, []string{"fd77:7::5", "10.77.7.5"}},
		{"IPv4 in hexadecimal", []string{"10.77.7.5/24"}, []string{"::ffff:0a4d:0705"}},
		{"one address twice", []string{"10.77.7.5/24"}, []string{"10.77.7.5", "::ffff:10.77.7.5"}},
		{"link-local with a zone", []string{"fe80::77:5/64"}, []string{"fe80::77:5%eth0"}},
		{"more addresses than the pod knows", []string{"10.77.7.4/24", "10.77.7.5/24", "fd77:7::5/64"}, []string{"10.77.7.5"}},
		{"of a second interface", []string{"10.77.7.4/24"}, []string{"10.77.7.99"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t)
			ns := namespace(t, tc.addresses...)
			n.IP(ns, "link add net1 up type veth peer name net1-peer", "address add 10.77.7.99/24 dev net1")
			n.Process("76", namespace(t, "10.77.7.15/24", "fd77:7::15/64"))
			n.Process("77", ns)
			n.finds(podOf(tc.pod...), ns, sandbox.FromProc)
		})
	}
}

func TestFind_RealProcesses(t *testing.T) {
	t.Parallel()
	ns, pod := namespace(t, "10.77.8.5/32"), podOf("10.77.8.5")
	onFixtures(t, map[string]func(n *fixture){
		"on the machine as it is": func(n *fixture) {
			alone, other := namespace(n.T, "198.51.100.77/32"), podOf("198.51.100.77")
			_, end := n.Start(alone)
			n.Proc = "/proc"
			n.finds(other, alone, sandbox.FromProc)
			n.Kept(alone, "elsewhere")
			end()
			table, err := os.ReadFile("/proc/1/mountinfo")
			n.Do(err)
			if strings.Contains(string(table), n.Dir) {
				n.finds(other, alone, sandbox.FromMount)
			} else { // the first process is in another mount namespace without the mount
				n.fails(other, sandbox.ErrNotFound)
			}
		},
		"a process that has ended": func(n *fixture) {
			process, _ := n.Start(ns)
			n.Do(process.Process.Kill())
			n.Do(unix.Waitid(unix.P_PID, process.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)) // a zombie
			n.fails(pod, sandbox.ErrNotFound, "entries 2")
		},
		"beside some that may not be read": func(n *fixture) {
			n.Process("77", ns)
			n.Do(os.MkdirAll(n.Proc+"/78/ns", 0o700))
			n.Do(os.Symlink("loop", n.Proc+"/78/ns/loop"))
			n.Do(os.Symlink("loop", n.Proc+"/78/ns/net")) // an error other than the end of a process
			n.Do(os.Mkdir(n.Proc+"/79", 0o700))
			n.Write(n.Proc+"/80", nil)
			n.Do(os.Mkdir(n.Proc+"/sys", 0o700))
			n.finds(pod, ns, sandbox.FromProc)
			n.fails(podOf("10.77.8.6"), sandbox.ErrNotFound, "not readable", "entries 5")
		},
		"in a user namespace of the pod": func(n *fixture) {
			path := n.unshared(100000, 65536)
			n.IP(path, "link add eth0 up type veth peer name peer0", "address add 10.77.8.9/32 dev eth0")
			n.finds(podOf("10.77.8.9"), path, sandbox.FromProc)
			n.Mount(path, "cni-1")
			n.finds(podOf("10.77.8.9"), path, sandbox.FromMount)
		},
		"beside a container's own network inside of the pod": func(n *fixture) {
			inner := namespace(n.T, "172.17.77.2/32")
			n.Start(inner)
			n.Start(ns)
			n.finds(pod, ns, sandbox.FromProc)
			n.finds(podOf("172.17.77.2"), inner, sandbox.FromProc)
		},
	})
}

// unshared returns the network namespace of a process with its own user namespace. A runtime makes one for a pod; with one user ID,
// any user in a container can: "unshare --user --net".
func (n *fixture) unshared(host, size int) string {
	n.Helper()
	process, path := netnstest.Unshared(n.T, host, size)
	n.Adopt(process)
	return path
}
