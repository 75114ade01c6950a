// Package sandboxtest makes a node for searches of pods. The places are directories of the test; the namespaces, mounts and
// processes are real.
package sandboxtest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Node is a node. Its own network namespace differs from this process's.
type Node struct {
	*testing.T
	sandbox.Places

	// Dir holds the places, and anything else that a test needs. Host is the node's own namespace.
	Dir, Host string

	wires int
}

// New makes a node without pods. It ends with the test.
func New(t *testing.T) *Node {
	t.Helper()
	dir := t.TempDir()
	n := &Node{T: t, Dir: dir, Host: netnstest.New(t), Places: sandbox.Places{
		Cache: filepath.Join(dir, "results"), Netns: []string{filepath.Join(dir, "netns")}, Proc: filepath.Join(dir, "proc"),
	}}
	for _, dir := range []string{n.Cache, n.Netns[0], n.Proc} {
		n.Do(os.Mkdir(dir, 0o700))
	}
	n.Process("1", n.Host)
	n.Write(n.Proc+"/1/mountinfo", nil)
	return n
}

// Do fails the test at an error.
func (n *Node) Do(err error) {
	n.Helper()
	check.OK(n, err)
}

// Inode returns the inode of the namespace at a path.
func Inode(t *testing.T, path string) netns.Inode {
	t.Helper()
	inode, err := netns.InodeOf(path)
	check.OK(t, err)
	return inode
}

// Write writes a file.
func (n *Node) Write(file string, data []byte) {
	n.Helper()
	n.Do(os.WriteFile(file, data, 0o600)) //nolint:forbidigo // a file of the test
}

// Process adds a process in a namespace to the procfs. With the UID of a pod, the process is in that pod's cgroup.
func (n *Node) Process(pid, path string, uid ...string) {
	n.Helper()
	n.Do(os.MkdirAll(filepath.Join(n.Proc, pid, "ns"), 0o700))
	n.Do(os.Symlink(path, filepath.Join(n.Proc, pid, "ns/net")))
	for _, one := range uid {
		n.Cgroup(pid, "0::/kubepods/burstable/pod"+one+"/0123\n")
	}
}

// Cgroup puts a process into a cgroup. text has the format of proc_pid_cgroup(5).
func (n *Node) Cgroup(pid, text string) {
	n.Helper()
	n.Write(filepath.Join(n.Proc, pid, "cgroup"), []byte(text))
}

// Start starts a real process in a namespace and adds it to the procfs. The process ends with the test, or with end.
func (n *Node) Start(path string) (process *exec.Cmd, end func()) {
	n.Helper()
	process = exec.CommandContext(n.Context(), "sleep", "1000")
	n.Do(netns.Do(path, process.Start))
	return process, n.Adopt(process)
}

// Adopt adds a real process to the procfs.
func (n *Node) Adopt(process *exec.Cmd) (end func()) {
	n.Helper()
	pid := strconv.Itoa(process.Process.Pid)
	n.Do(os.Symlink("/proc/"+pid, filepath.Join(n.Proc, pid)))
	end = sync.OnceFunc(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	})
	n.Cleanup(end)
	return end
}

// StartAs starts a real process of this machine's network namespace in a container of a pod. It ends with the test.
func (n *Node) StartAs(attr syscall.SysProcAttr, uid, container string) {
	n.Helper()
	process := exec.CommandContext(n.Context(), "sleep", "1000")
	process.SysProcAttr = &attr
	n.Do(process.Start())
	n.Cleanup(func() { _ = process.Wait() })
	n.Contain(process.Process.Pid, uid, container)
}

// Contain adds a real process to the procfs, in a container of a pod.
func (n *Node) Contain(pid int, uid, container string) {
	n.Helper()
	name := strconv.Itoa(pid)
	n.Do(os.Mkdir(filepath.Join(n.Proc, name), 0o700))
	for _, file := range []string{"ns", "status", "task", "uid_map", "gid_map"} {
		n.Do(os.Symlink(filepath.Join("/proc", name, file), filepath.Join(n.Proc, name, file)))
	}
	n.Cgroup(name, "0::/kubepods/burstable/pod"+uid+"/"+container+"\n")
}

// Mount mounts a namespace in the runtime's directory.
func (n *Node) Mount(path, name string) string {
	n.Helper()
	return n.MountAt(path, filepath.Join(n.Netns[0], name))
}

// MountAt mounts a namespace at a path of its own.
func (n *Node) MountAt(path, at string) string {
	n.Helper()
	n.Do(os.MkdirAll(filepath.Dir(at), 0o700))
	netnstest.Mount(n.T, path, at)
	return at
}

// Kept mounts a namespace at a path that only an entry of the cache can name.
func (n *Node) Kept(path, name string) string {
	n.Helper()
	return n.MountAt(path, filepath.Join(n.Dir, "kept", name))
}

// Cached writes an entry of libcni's cache with the test's changes, and returns its file.
func (n *Node) Cached(name string, pod sandbox.Pod, path string, changes ...func(entry map[string]any)) string {
	n.Helper()
	entry := map[string]any{
		"kind": "cniCacheV1", "containerId": name, "config": []byte(`{"name":"net","plugins":[{"type":"bridge"}]}`),
		"ifName": "eth0", "networkName": "net", "netns": path, "cniArgs": [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", pod.Namespace}, {"K8S_POD_NAME", pod.Name}, {"K8S_POD_UID", pod.UID},
		},
	}
	for _, change := range changes {
		change(entry)
	}
	data, err := json.Marshal(entry)
	n.Do(err)
	file := filepath.Join(n.Cache, "net-"+name+"-eth0")
	n.Write(file, data)
	return file
}

// Sandbox returns a pod's namespace like nearly all CNI plugins make it: its interface has the other end in the node's
// namespace.
func (n *Node) Sandbox(addresses ...string) string {
	n.Helper()
	path := netnstest.New(n.T)
	n.wires++
	netnstest.Run(n.T, n.Host, "ip", "link", "add", fmt.Sprintf("veth%d", n.wires), "up", "type", "veth", "peer", "name", "eth0", "netns", path)
	n.IP(path, "link set lo up", "link set eth0 up")
	for _, address := range addresses {
		n.IP(path, "address add "+address+" dev eth0")
	}
	return path
}

// IP runs ip(8) in a namespace with the words of each line, and returns the namespace.
func (n *Node) IP(path string, lines ...string) string {
	n.Helper()
	for _, line := range lines {
		netnstest.Run(n.T, path, "ip", strings.Fields(line)...)
	}
	return path
}
