package podns_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/podns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

const uid = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"

// node is a node of which only the places are made up: namespaces, mounts and processes are real.
type node struct {
	t *testing.T
	podns.Places
	dir string
	// wires is how many interfaces lead to the node.
	wires int
	// table is what the first process has mounted.
	table []string
}

// newNode is a node whose own namespace is another than this process's.
func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, dir: dir, Places: podns.Places{
		Cache: filepath.Join(dir, "results"), Netns: []string{filepath.Join(dir, "netns")}, Proc: filepath.Join(dir, "proc"),
	}}
	for _, dir := range []string{n.Cache, n.Netns[0], n.Proc} {
		n.do(os.Mkdir(dir, 0o700))
	}
	n.process("1", netnstest.New(t))
	n.do(os.WriteFile(n.Proc+"/1/mountinfo", nil, 0o600))
	return n
}

func (n *node) do(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// process makes a process known, as far as it is looked at.
func (n *node) process(pid, path string) {
	n.t.Helper()
	n.do(os.MkdirAll(filepath.Join(n.Proc, pid, "ns"), 0o700))
	n.do(os.Symlink(path, filepath.Join(n.Proc, pid, "ns/net")))
}

// withoutFirst leaves no first process to look at, and a second one in a namespace.
func (n *node) withoutFirst(path, stat string) {
	n.t.Helper()
	n.do(os.Remove(n.Proc + "/1/ns/net"))
	n.process("2", path)
	n.do(os.WriteFile(n.Proc+"/2/stat", []byte(stat), 0o600))
}

// runs makes a real process known.
func (n *node) runs(process *exec.Cmd) string {
	n.t.Helper()
	pid := strconv.Itoa(process.Process.Pid)
	n.do(os.Symlink("/proc/"+pid, filepath.Join(n.Proc, pid)))
	return "/proc/" + pid + "/ns/net"
}

// mount mounts a namespace as a container runtime does and gives the place.
func (n *node) mount(path, name string) string {
	n.t.Helper()
	return n.mountAt(path, filepath.Join(n.Netns[0], name))
}

func (n *node) mountAt(path, at string) string {
	n.t.Helper()
	n.do(os.MkdirAll(filepath.Dir(at), 0o700))
	n.do(os.WriteFile(at, nil, 0o600))
	n.do(unix.Mount(path, at, "", unix.MS_BIND, ""))
	n.t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	return at
}

// tell puts into the first process's mount table that a namespace is mounted at a place of the node.
func (n *node) tell(path, at string) {
	n.t.Helper()
	var stat unix.Stat_t
	n.do(unix.Stat(path, &stat))
	n.table = append(n.table, fmt.Sprintf("90 25 %d:%d net:[%d] %s rw shared:7 - nsfs nsfs rw",
		unix.Major(stat.Dev), unix.Minor(stat.Dev), stat.Ino, at))
	n.do(os.WriteFile(n.Proc+"/1/mountinfo", []byte(strings.Join(n.table, "\n")+"\n"), 0o600))
}

// cached puts an entry into the cache as libcni writes it. Change may be nil.
func (n *node) cached(name string, pod podns.Pod, path string, change func(entry map[string]any)) {
	n.t.Helper()
	entry := map[string]any{
		"kind": "cniCacheV1", "containerId": name, "config": []byte(`{"name":"net","plugins":[{"type":"bridge"}]}`),
		"ifName": "eth0", "networkName": "net", "netns": path, "cniArgs": [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", pod.Namespace}, {"K8S_POD_NAME", pod.Name}, {"K8S_POD_UID", pod.UID},
		},
	}
	if change != nil {
		change(entry)
	}
	data, err := json.Marshal(entry)
	n.do(err)
	n.write(name, string(data))
}

func (n *node) write(name, text string) {
	n.t.Helper()
	n.do(os.WriteFile(filepath.Join(n.Cache, "net-"+name+"-eth0"), []byte(text), 0o600))
}

// finds wants a namespace, from a source.
func (n *node) finds(pod podns.Pod, path string, from podns.Source) {
	n.t.Helper()
	got, err := n.Find(n.t.Context(), pod)
	if err != nil {
		n.t.Fatalf("got error %v", err)
	}
	defer got.Close()
	same, err := netnstest.Same(got.Path(), path)
	if err != nil || !same || got.Source != from {
		n.t.Errorf("got %s of %s (same: %v, %v), want %s of %s", got.Inode(), got.Source, same, err, path, from)
	}
}

// unmount unmounts what a runtime mounted.
func (n *node) unmount(name string) {
	n.t.Helper()
	at := filepath.Join(n.Netns[0], name)
	_ = unix.Unmount(at, unix.MNT_DETACH) // perhaps it was never mounted
	n.do(os.RemoveAll(at))
}

// fails wants an error of a cause, or of any, that says some things.
func (n *node) fails(pod podns.Pod, cause error, says ...string) {
	n.t.Helper()
	got, err := n.Find(n.t.Context(), pod)
	if err == nil {
		n.t.Fatalf("got %s of %s, want the error %q", got.Inode(), got.Source, cause)
	}
	if cause != nil && !errors.Is(err, cause) || strings.Contains(err.Error(), "\n") {
		n.t.Errorf("got error %v, want one line of %q", err, cause)
	}
	for _, text := range append(says, pod.Namespace+"/"+pod.Name, pod.UID) {
		if !strings.Contains(err.Error(), text) {
			n.t.Errorf("error %q does not say %q", err, text)
		}
	}
}

// namespace is a network namespace with addresses on an interface of its own.
func namespace(t *testing.T, addresses ...string) string {
	t.Helper()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "add", "eth0", "up", "type", "veth", "peer", "name", "peer0")
	addressed(t, path, "eth0", addresses...)
	return path
}

func addressed(t *testing.T, path, link string, addresses ...string) {
	t.Helper()
	for _, address := range addresses {
		netnstest.Run(t, path, "ip", "address", "add", address, "dev", link)
	}
}

func podOf(addresses ...string) podns.Pod {
	pod := podns.Pod{Namespace: "shop", Name: "web-1", UID: uid}
	for _, a := range addresses {
		pod.Addresses = append(pod.Addresses, netip.MustParseAddr(a))
	}
	return pod
}

// sleeper is a process in a namespace. It ends with the test.
func sleeper(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	process := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := netns.Do(path, process.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(process) })
	return process
}

func end(process *exec.Cmd) {
	_ = process.Process.Kill()
	_ = process.Wait()
}

func TestFindByEachSource(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "10.77.1.5/32", "fd77:1::5/128")
	pod := podOf("10.77.1.5", "fd77:1::5")
	for _, tc := range []struct {
		name string
		from podns.Source
		set  func(*node)
	}{
		{"libcni's cache before all others", podns.FromCache, func(n *node) {
			at := n.mount(ns, "cni-1")
			n.cached("c1", pod, at, nil)
			n.process("77", ns)
		}},
		{"a mount of the runtime before processes", podns.FromMount, func(n *node) {
			n.mount(ns, "cni-1")
			n.process("77", ns)
		}},
		{"a process", podns.FromProc, func(n *node) { n.process("77", ns) }},
		{"no cache directory", podns.FromProc, func(n *node) {
			n.do(os.Remove(n.Cache))
			n.process("77", ns)
		}},
		{"no cache and no directory of mounts", podns.FromProc, func(n *node) {
			n.Cache, n.Netns = "", nil
			n.process("77", ns)
		}},
		{"the process is gone and the mount is left", podns.FromMount, func(n *node) {
			process := sleeper(t, ns)
			n.runs(process)
			n.mount(ns, "cni-1")
			end(process)
		}},
		{"a mount that only the node's first process has, under a root of the node", podns.FromMount, func(n *node) {
			n.Roots = []string{filepath.Join(n.dir, "host")}
			n.mountAt(ns, filepath.Join(n.Roots[0], "/run/elsewhere/my ns"))
			n.tell(ns, `/run/elsewhere/my\040ns`)
		}},
		{"the same through the first process's root", podns.FromMount, func(n *node) {
			root := filepath.Join(n.dir, "root")
			n.mountAt(ns, filepath.Join(root, "/run/elsewhere/x"))
			n.do(os.Symlink(root, n.Proc+"/1/root"))
			n.Roots = []string{filepath.Join(n.dir, "host")}
			n.tell(ns, "/run/elsewhere/x")
		}},
		{"the cache's path under a root of the node", podns.FromCache, func(n *node) {
			n.Roots = []string{filepath.Join(n.dir, "host")}
			n.mountAt(ns, filepath.Join(n.Roots[0], "/run/netns/cni-1"))
			n.do(os.MkdirAll(n.Roots[0]+"/var", 0o700))
			n.do(os.Symlink("/run", n.Roots[0]+"/var/run"))
			n.cached("c1", pod, "/var/run/netns/cni-1", nil)
		}},
		{"the cache's path under a root with /var/run mounted", podns.FromCache, func(n *node) {
			n.Roots = []string{filepath.Join(n.dir, "none"), filepath.Join(n.dir, "host")}
			n.mountAt(ns, filepath.Join(n.Roots[1], "/var/run/netns/cni-1"))
			n.cached("c1", pod, "/var/run/netns/cni-1", nil)
		}},
		{"the cache's path where the mount is not passed on to this process", podns.FromCache, func(n *node) {
			n.Roots = []string{filepath.Join(n.dir, "host")}
			n.do(os.MkdirAll(n.Roots[0]+"/run/netns", 0o700))
			n.do(os.WriteFile(n.Roots[0]+"/run/netns/cni-1", nil, 0o600))
			n.mountAt(ns, filepath.Join(n.Proc, "1/root/run/netns/cni-1"))
			n.cached("c1", pod, "/var/run/netns/cni-1", nil)
		}},
		{"the cache's path of a process", podns.FromCache, func(n *node) {
			n.process("77", ns)
			n.cached("c1", pod, "/proc/77/ns/net", nil)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			tc.set(n)
			n.finds(pod, ns, tc.from)
		})
	}
}

func TestFindByTheCache(t *testing.T) {
	t.Parallel()
	ns, other := namespace(t, "10.77.2.5/32"), namespace(t, "10.77.2.6/32")
	pod := podOf("10.77.2.5")
	unaddressed := podOf()
	without := func(key string) func(map[string]any) { return func(e map[string]any) { delete(e, key) } }
	for _, tc := range []struct {
		name string
		pod  podns.Pod
		set  func(n *node, at, elsewhere string)
	}{
		{"a pod without addresses", unaddressed, func(n *node, at, _ string) { n.cached("c1", pod, at, nil) }},
		{"several interfaces of one sandbox", pod, func(n *node, at, _ string) {
			n.cached("c1", pod, at, nil)
			n.cached("c2", pod, at, nil)
		}},
		{"sandboxes of earlier attempts, whose namespaces are gone", unaddressed, func(n *node, at, _ string) {
			n.cached("c0", pod, n.dir+"/netns/cni-0", nil)
			n.cached("c1", pod, at, nil)
			n.do(os.WriteFile(n.dir+"/netns/cni-9", nil, 0o600)) // unmounted, but not removed
			n.cached("c9", pod, n.dir+"/netns/cni-9", nil)
		}},
		{"a sandbox of an earlier attempt that lives on", pod, func(n *node, at, elsewhere string) {
			n.cached("c0", pod, elsewhere, nil)
			n.cached("c1", pod, at, nil)
		}},
		{"the pod that had the name before lives on", unaddressed, func(n *node, at, elsewhere string) {
			before := pod
			before.UID = "before"
			n.cached("c0", before, elsewhere, nil)
			n.cached("c1", pod, at, nil)
		}},
		{"a pod of that name in another namespace", unaddressed, func(n *node, at, elsewhere string) {
			n.cached("c0", podns.Pod{Namespace: "other", Name: pod.Name, UID: uid}, elsewhere, nil)
			n.cached("c1", pod, at, nil)
		}},
		{"another pod with that UID", unaddressed, func(n *node, at, elsewhere string) {
			n.cached("c0", podns.Pod{Namespace: pod.Namespace, Name: pod.Name + "0", UID: uid}, elsewhere, nil)
			n.cached("c1", pod, at, nil)
		}},
		{"an entry that has the namespace in its result only", pod, func(n *node, at, _ string) {
			n.cached("c1", pod, "", func(e map[string]any) {
				delete(e, "netns")
				e["result"] = map[string]any{"interfaces": []any{map[string]any{"name": "br"}, map[string]any{"sandbox": at}}}
			})
		}},
		{"a runtime that gives no UID, by the addresses", pod, func(n *node, at, elsewhere string) {
			nameless := pod
			nameless.UID = ""
			n.cached("c0", nameless, elsewhere, nil)
			n.cached("c1", nameless, at, nil)
		}},
		{"among what is no entry", unaddressed, func(n *node, at, elsewhere string) {
			n.write("a", "")
			n.write("b", "\x00\xffweb-1")
			n.write("c", `{"kind":"cniCacheV1","netns":"`+elsewhere+`","cniArgs":[["K8S_POD_NAME","web-1"`)
			n.write("d", `["web-1"]`)
			n.write("e", `{"kind":"cniCacheV1","config":"%%%","cniArgs":"web-1"}`)
			n.cached("f", pod, elsewhere, func(e map[string]any) { e["kind"] = "cniCacheV2" })
			n.cached("g", pod, elsewhere, without("kind"))
			n.cached("h", pod, elsewhere, without("cniArgs"))
			n.cached("i", pod, elsewhere, func(e map[string]any) { e["cniArgs"] = map[string]any{"K8S_POD_NAME": "web-1"} })
			n.do(os.Mkdir(n.Cache+"/web-1", 0o700))
			n.do(os.Symlink(n.Cache, n.Cache+"/link"))
			n.do(os.Symlink("/nowhere", n.Cache+"/dangling"))
			n.do(unix.Mkfifo(n.Cache+"/fifo", 0o600))
			n.write("z", `{"a":"web-1`+strings.Repeat(" ", 5<<20))
			n.cached("c1", pod, at, nil)
		}},
		{"an entry without a namespace beside one with", unaddressed, func(n *node, at, _ string) {
			n.cached("c0", pod, "", without("netns"))
			n.cached("c1", pod, at, nil)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			// Neither place is among the mounts that are looked through.
			at, elsewhere := n.mountAt(ns, n.dir+"/kept/cni-1"), n.mountAt(other, n.dir+"/kept/cni-2")
			tc.set(n, at, elsewhere)
			n.finds(tc.pod, ns, podns.FromCache)
		})
	}
}

// libcni itself writes the entry, so that its form is not just what this package thinks it is.
func TestFindReadsWhatLibcniWrites(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ns, pod := namespace(t, "10.77.3.5/32"), podOf("10.77.3.5")
	at := n.mountAt(ns, n.dir+"/kept/cni-1")
	cni := libcni.NewCNIConfigWithCacheDir(nil, n.dir, answering(`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[]}`))
	list, err := libcni.NetworkConfFromBytes([]byte(`{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"a"},{"type":"b"}]}`))
	n.do(err)
	_, err = cni.AddNetworkList(t.Context(), list, &libcni.RuntimeConf{
		ContainerID: "c1", NetNS: at, IfName: "eth0", Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", "shop"},
			{"K8S_POD_NAME", "web-1"},
			{"K8S_POD_INFRA_CONTAINER_ID", "c1"},
			{"K8S_POD_UID", uid},
		},
	})
	n.do(err)
	n.finds(pod, ns, podns.FromCache)

	data, err := os.ReadFile(n.Cache + "/net-c1-eth0")
	n.do(err)
	box, ok := cnicache.Parse(data)
	want := cnicache.Entry{
		Kind: cnicache.Kind, Plugins: []string{"a", "b"}, NetNS: at, Namespace: "shop", Name: "web-1", UID: uid,
	}
	if diff := cmp.Diff(want, box); diff != "" || !ok {
		t.Errorf("%v (-want +got):\n%s", ok, diff)
	}
}

// answering stands in for plugins.
type answering string

func (a answering) ExecPlugin(context.Context, string, []byte, []string) ([]byte, error) {
	return []byte(a), nil
}

func (a answering) FindInPath(plugin string, _ []string) (string, error) { return "/" + plugin, nil }

func (a answering) Decode(data []byte) (version.PluginInfo, error) {
	return new(version.PluginDecoder).Decode(data)
}

func TestFindRefuses(t *testing.T) {
	t.Parallel()
	ns, other := namespace(t, "10.77.4.5/32"), namespace(t, "10.77.4.6/32", "10.77.4.7/32")
	pod, unaddressed := podOf("10.77.4.5"), podOf()
	for _, tc := range []struct {
		name  string
		pod   podns.Pod
		cause error
		says  []string
		set   func(*node)
	}{
		{"a pod that is nowhere", pod, podns.ErrNotFound, []string{"10.77.4.5", "entries 0"}, func(*node) {}},
		{"places that are not there", pod, podns.ErrNotFound, []string{"/none/cache", "/none/netns", "no such file"}, func(n *node) {
			n.Cache, n.Netns = n.dir+"/none/cache", []string{n.dir + "/none/netns"}
		}},
		{
			"a stale entry whose path is another pod's by now", pod, podns.ErrNotFound,
			[]string{"does not have the pod's addresses"},
			func(n *node) { n.cached("c1", pod, n.mount(other, "cni-1"), nil) },
		},
		{
			"an entry whose namespace is gone", unaddressed, podns.ErrNotFound,
			[]string{"no such namespace any more", "entries 1"},
			func(n *node) { n.cached("c1", pod, n.dir+"/netns/cni-1", nil) },
		},
		{"an entry that is no namespace", unaddressed, podns.ErrNotFound, []string{"not a network namespace"}, func(n *node) {
			n.do(os.WriteFile(n.dir+"/file", nil, 0o600))
			n.cached("c1", pod, n.dir+"/file", nil)
		}},
		{
			"an entry of another kind of namespace", unaddressed, podns.ErrNotFound,
			[]string{"a namespace of another kind (0x4000000), not a network namespace"},
			func(n *node) { n.cached("c1", pod, n.mountAt("/proc/self/ns/uts", n.dir+"/kept/uts"), nil) },
		},
		{
			"an entry without a namespace", unaddressed, podns.ErrNotFound,
			[]string{"without a namespace"},
			func(n *node) { n.cached("c1", pod, "", nil) },
		},
		{
			"a new pod of the name of the one in the cache", unaddressed, podns.ErrNotFound,
			[]string{`one of UID "before"`},
			func(n *node) {
				before := pod
				before.UID = "before"
				n.cached("c1", before, n.mount(ns, "cni-1"), nil)
			},
		},
		{"no addresses and an entry without UID", unaddressed, podns.ErrNotFound, []string{"without the pod's UID"}, func(n *node) {
			nameless := pod
			nameless.UID = ""
			n.cached("c1", nameless, n.mount(ns, "cni-1"), nil)
		}},
		{"no addresses and an entry that names a process", unaddressed, podns.ErrNotFound, []string{"another process"}, func(n *node) {
			n.process("77", ns)
			n.cached("c1", pod, "/proc/77/ns/net", nil)
		}},
		{"no addresses and no cache", unaddressed, podns.ErrNotFound, []string{"addresses []"}, func(n *node) {
			n.mount(ns, "cni-1")
			n.process("77", ns)
		}},
		{"no addresses and two sandboxes that live", unaddressed, podns.ErrAmbiguous, []string{"net:["}, func(n *node) {
			n.cached("c1", pod, n.mount(ns, "cni-1"), nil)
			n.cached("c2", pod, n.mount(other, "cni-2"), nil)
		}},
		{"a namespace with one of two addresses", podOf("10.77.4.5", "10.77.4.8"), podns.ErrNotFound, nil, func(n *node) {
			n.mount(ns, "cni-1")
			n.process("77", ns)
		}},
		{"entries that cannot be read", pod, podns.ErrNotFound, []string{"2 not readable", "cannot be read"}, func(n *node) {
			n.write("a", `{"web-1"`)
			n.write("b", `"web-1"`)
		}},
		{
			"a mount of the node's first process that nothing leads to", pod, podns.ErrNotFound,
			[]string{"entries 1, 1 not readable", "/run/elsewhere/x"},
			func(n *node) { n.tell(ns, "/run/elsewhere/x") },
		},
		{
			"a second process that is not the kernel's by its name", pod, podns.ErrNoHost,
			[]string{"/proc/1/ns/net"},
			func(n *node) { n.withoutFirst(ns, "2 (systemd) S 0 0 0") },
		},
		{
			"a second process that is not the kernel's by its parent", pod, podns.ErrNoHost,
			[]string{"/proc/1/ns/net"},
			func(n *node) { n.withoutFirst(ns, "2 (kthreadd) S 1 0 0") },
		},
		{
			"a second process of which nothing is told", pod, podns.ErrNoHost,
			[]string{"/proc/1/ns/net"},
			func(n *node) { n.withoutFirst(ns, "") },
		},
		{"a node that cannot be looked at", pod, podns.ErrNoHost, []string{"no procfs of the node", "/proc"}, func(n *node) {
			n.do(os.RemoveAll(n.Proc))
			n.mount(ns, "cni-1")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			tc.set(n)
			n.fails(tc.pod, tc.cause, tc.says...)
		})
	}
}

// What is no namespace, or was looked at by another name, is no trouble to report.
func TestFindIsSilentAboutWhatIsInOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other := namespace(t, "10.77.9.6/32")
	n.mount(other, "cni-1")
	n.tell(other, "/run/elsewhere/x")
	n.mountAt("/proc/self/ns/uts", n.Netns[0]+"/uts")
	n.do(os.WriteFile(n.Netns[0]+"/left-behind", nil, 0o600))
	n.do(unix.Mkfifo(n.Netns[0]+"/fifo", 0o600))
	n.do(os.Symlink("/nowhere", n.Netns[0]+"/dangling"))
	n.do(os.Mkdir(n.Netns[0]+"/directory", 0o700))
	n.process("77", other)
	n.do(os.Mkdir(n.Proc+"/78", 0o700))
	n.cached("c1", podns.Pod{Namespace: "shop", Name: "web-1-other", UID: "v"}, n.Netns[0]+"/cni-1", nil)
	_, err := n.Find(t.Context(), podOf("10.77.9.5"))
	failed, ok := errors.AsType[*podns.Error](err)
	if !ok || !errors.Is(err, podns.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	want := []podns.Searched{
		{Source: podns.FromCache, Place: n.Cache, Entries: 1},
		{Source: podns.FromMount, Place: n.Netns[0], Entries: 5},
		{Source: podns.FromMount, Place: n.Proc + "/1/mountinfo", Entries: 1},
		{Source: podns.FromProc, Place: n.Proc, Entries: 3},
	}
	if diff := cmp.Diff(want, failed.Searched); diff != "" {
		t.Errorf("searched (-want +got):\n%s", diff)
	}
}

func TestFindNamesBothThatCouldBeMeant(t *testing.T) {
	t.Parallel()
	for _, from := range []podns.Source{podns.FromMount, podns.FromProc} {
		t.Run(string(from), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			var want []netns.Inode
			for i := range 2 {
				ns := namespace(t, "10.77.5.5/32")
				if from == podns.FromMount {
					n.mount(ns, strconv.Itoa(i))
				}
				n.process(strconv.Itoa(100+i), ns)
				n.process(strconv.Itoa(200+i), ns)
				want = append(want, inode(t, ns))
			}
			_, err := n.Find(t.Context(), podOf("10.77.5.5"))
			failed, ok := errors.AsType[*podns.Error](err)
			if !ok || !errors.Is(err, podns.ErrAmbiguous) {
				t.Fatalf("got %v", err)
			}
			for _, one := range want {
				if !slices.Contains(failed.Inodes, one) || !strings.Contains(err.Error(), one.String()) || len(failed.Inodes) != 2 {
					t.Errorf("%s is not among %v of %q", one, failed.Inodes, err)
				}
			}
		})
	}
}

func inode(t *testing.T, path string) netns.Inode {
	t.Helper()
	inode, err := netns.InodeOf(path)
	if err != nil {
		t.Fatal(err)
	}
	return inode
}

func TestFindNeverGivesTheNodesOwn(t *testing.T) {
	t.Parallel()
	set := func(t *testing.T) (*node, string) {
		n := newNode(t)
		host := n.Proc + "/1/ns/net"
		addressed(t, host, "lo", "10.77.6.1/32")
		n.mount(host, "default")
		n.process("77", host)
		return n, host
	}
	t.Run("a pod with its address", func(t *testing.T) {
		t.Parallel()
		n, _ := set(t)
		n.fails(podOf("10.77.6.1"), podns.ErrHost)
	})
	t.Run("an entry of the cache that says so", func(t *testing.T) {
		t.Parallel()
		n, _ := set(t)
		n.cached("c1", podOf(), n.Netns[0]+"/default", nil)
		n.fails(podOf("10.77.6.1"), podns.ErrHost, "the node's own")
		n.fails(podOf(), podns.ErrHost, "the node's own")
	})
	t.Run("an entry of the cache that says so wrongly", func(t *testing.T) {
		t.Parallel()
		n, _ := set(t)
		n.cached("c1", podOf(), n.Netns[0]+"/default", nil)
		ns := namespace(t, "10.77.6.2/32")
		n.process("78", ns)
		n.finds(podOf("10.77.6.2"), ns, podns.FromProc)
	})
	t.Run("a pod beside it", func(t *testing.T) {
		t.Parallel()
		n, _ := set(t)
		ns := namespace(t, "10.77.6.1/32")
		n.process("78", ns)
		n.finds(podOf("10.77.6.1"), ns, podns.FromProc)
	})
	t.Run("this process's own", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.process("78", "/proc/self/ns/net")
		n.mount("/proc/self/ns/net", "own")
		n.cached("c1", podOf(), n.Netns[0]+"/own", nil)
		own, err := route.Addresses()
		n.do(err)
		if len(own) == 0 {
			t.Fatal("this process has no address")
		}
		n.fails(podOf(own[0].WithZone("").String()), podns.ErrHost)
		n.fails(podOf(), podns.ErrHost)
	})
	t.Run("known by the kernel's threads", func(t *testing.T) {
		t.Parallel()
		n, host := set(t)
		target, err := os.Readlink(host)
		n.do(err)
		n.withoutFirst(target, "2 (kthreadd) S 0 0 0 0 -1 2129984")
		n.fails(podOf("10.77.6.1"), podns.ErrHost)
	})
}

func TestFindComparesAddresses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		addresses []string // of the namespace
		pod       []string
	}{
		{"IPv6", []string{"fd77:7::5/64"}, []string{"fd77:7::5"}},
		{"IPv6 spelled at length", []string{"fd77:7::5/64"}, []string{"fd77:0007:0:0:0:0:0:0005"}},
		{"both families, in the other order", []string{"10.77.7.5/24", "fd77:7::5/64"}, []string{"fd77:7::5", "10.77.7.5"}},
		{"IPv4 in IPv6 form", []string{"10.77.7.5/24"}, []string{"::ffff:10.77.7.5"}},
		{"IPv4 in hexadecimal", []string{"10.77.7.5/24"}, []string{"::ffff:0a4d:0705"}},
		{"one address twice", []string{"10.77.7.5/24"}, []string{"10.77.7.5", "::ffff:10.77.7.5"}},
		{"link-local with a zone", []string{"fe80::77:5/64"}, []string{"fe80::77:5%eth0"}},
		{"more addresses than the pod knows", []string{"10.77.7.4/24", "10.77.7.5/24", "fd77:7::5/64"}, []string{"10.77.7.5"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			ns := namespace(t, tc.addresses...)
			n.process("76", namespace(t, "10.77.7.15/24", "fd77:7::15/64"))
			n.process("77", ns)
			n.finds(podOf(tc.pod...), ns, podns.FromProc)
		})
	}
	t.Run("of a second interface", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		ns := namespace(t, "10.77.7.4/24")
		netnstest.Run(t, ns, "ip", "link", "add", "net1", "up", "type", "veth", "peer", "name", "net1-peer")
		addressed(t, ns, "net1", "10.77.7.5/24")
		n.process("77", ns)
		n.finds(podOf("10.77.7.5"), ns, podns.FromProc)
	})
}

func TestFindAmongRealProcesses(t *testing.T) {
	t.Parallel()
	ns, pod := namespace(t, "10.77.8.5/32"), podOf("10.77.8.5")
	t.Run("a process", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.finds(pod, n.runs(sleeper(t, ns)), podns.FromProc)
	})
	t.Run("on the machine as it is", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.Proc = "/proc"
		alone := namespace(t, "198.51.100.77/32")
		process := sleeper(t, alone)
		n.finds(podOf("198.51.100.77"), alone, podns.FromProc)
		n.mountAt(alone, n.dir+"/elsewhere")
		end(process)
		table, err := os.ReadFile("/proc/1/mountinfo")
		n.do(err)
		if strings.Contains(string(table), n.dir) {
			n.finds(podOf("198.51.100.77"), alone, podns.FromMount)
		} else { // the first process is in another mount namespace, and does not have it
			n.fails(podOf("198.51.100.77"), podns.ErrNotFound)
		}
	})
	t.Run("none that has ended", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		process := sleeper(t, ns)
		n.runs(process)
		n.do(process.Process.Kill())
		awaitZombie(t, process.Process.Pid)
		n.fails(pod, podns.ErrNotFound, "entries 2")
	})
	t.Run("beside some that may not be looked at", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.process("77", ns)
		n.do(os.MkdirAll(n.Proc+"/78/ns", 0o700))
		n.do(os.Symlink("loop", n.Proc+"/78/ns/loop"))
		n.do(os.Symlink("loop", n.Proc+"/78/ns/net")) // an error that is no process's end
		n.do(os.Mkdir(n.Proc+"/79", 0o700))
		n.do(os.WriteFile(n.Proc+"/80", nil, 0o600))
		n.do(os.Mkdir(n.Proc+"/sys", 0o700))
		n.finds(pod, ns, podns.FromProc)
		n.fails(podOf("10.77.8.6"), podns.ErrNotFound, "not readable", "entries 5")
	})
	t.Run("in a user namespace of the pod", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		process := ofUser(t)
		path := n.runs(process)
		netnstest.Run(t, path, "ip", "link", "add", "eth0", "up", "type", "veth", "peer", "name", "peer0")
		addressed(t, path, "eth0", "10.77.8.9/32")
		n.finds(podOf("10.77.8.9"), path, podns.FromProc)
		n.mount(path, "cni-1")
		n.finds(podOf("10.77.8.9"), path, podns.FromMount)
	})
	t.Run("beside a container's own network inside of the pod", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		inner := namespace(t, "172.17.77.2/32")
		n.runs(sleeper(t, inner))
		n.runs(sleeper(t, ns))
		n.finds(pod, ns, podns.FromProc)
		n.finds(podOf("172.17.77.2"), inner, podns.FromProc)
	})
}

// ofUser is a process in a network namespace that belongs to a user namespace of its own.
func ofUser(t *testing.T) *exec.Cmd {
	t.Helper()
	process := exec.CommandContext(t.Context(), "sleep", "1000")
	process.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}},
	}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(process) })
	return process
}

// awaitZombie waits until a process has ended, without telling the kernel that anybody has heard.
func awaitZombie(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(stat), ") Z ") {
			return
		}
	}
	t.Fatalf("process %d does not end", pid)
}
