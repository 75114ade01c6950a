// Package nodetest is a node that exists only for a test: its own root directory with a host's files for its container
// runtime, a network namespace, an API server, a kubelet's projected directories, a runtime that loads and runs CNI
// configurations through libcni, and node agents as real processes in a container's view of the node.
//
// It promises that all paths are a real node's, for the runtime, the plugins and the agents; that it writes only to the
// test's own temporary directory (the machine's programs are read-only); and that every process
// ends with the test, also if the test is killed.
//
// It never touches the machine's own directories, its network namespace or other processes.
//
// Start reading at [New]; view.go has the mount namespace, agent.go the processes, runtime.go the pods.
package nodetest

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Directories of the host, for [Node.Put] and its like.
const (
	NetDir   = "/etc/cni/net.d"
	BinDir   = "/opt/cni/bin"
	RunDir   = "/run/istio-cni"
	CacheDir = "/var/lib/cni/results"

	netnsDir = "/run/netns"
)

// Names by which the agent knows its cluster.
const (
	Namespace = "istio-system"
	DaemonSet = "istio-cni-node"
	NodeName  = "node-1"
	PodName   = "istio-cni-node-x7k2p"
)

// Paths of the API server's objects.
const (
	DaemonSetPath = "/apis/apps/v1/namespaces/" + Namespace + "/daemonsets/" + DaemonSet
	// APIAddress is the API server's address in the node's network namespace.
	APIAddress = "127.0.0.1:6443"
)

// ServiceAccountDir is the container's directory of the credentials that the kubelet writes.
const ServiceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

const (
	dirMode  = 0o755
	fileMode = 0o644
)

// Node is one node. A new node is empty: no CNI configuration, no API server and no service account.
type Node struct {
	tb testing.TB
	// Netns is the node's network namespace.
	Netns string
	// API is nil until [Node.StartAPI].
	API *kubetest.Server

	// host and container are root directories; mounts below them are visible in the mount namespace only.
	host, container string
	mounts          *os.File
	// immutable makes the root read-only except for writable directories, without programs.
	immutable bool

	projections atomic.Int64
}

// New creates a node whose container image has the program. It skips a test that does not run as root.
func New(tb testing.TB, program string) *Node {
	tb.Helper()
	return create(tb, program, false)
}

// NewImmutable creates a node of an immutable operating system, such as Talos or Bottlerocket: its root is read-only except /var, /run,
// /etc/cni and the directory of plugins, and of the machine's programs it has only the primary CNI's, with their libraries.
func NewImmutable(tb testing.TB, program string) *Node {
	tb.Helper()
	return create(tb, program, true)
}

func writable() []string { return []string{"/var", "/run", "/etc/cni", BinDir} }

func create(tb testing.TB, program string, immutable bool) *Node {
	tb.Helper()
	n := &Node{tb: tb, Netns: netnstest.New(tb), immutable: immutable}
	dir := tb.TempDir()
	n.host, n.container = filepath.Join(dir, "host"), filepath.Join(dir, "container")
	check.OK(tb, errors.Join(n.makeHost(), n.makeContainer()), "making a node")
	netnstest.Run(tb, n.Netns, "ip", "link", "set", "lo", "up")
	check.OK(tb, n.mount(program), "mounting a node's directories")
	tb.Cleanup(func() { _ = n.mounts.Close() })
	return n
}

// makeHost creates the host's directories and links.
func (n *Node) makeHost() error {
	var errs []error
	for _, dir := range []string{
		NetDir, BinDir, RunDir, netnsDir, CacheDir, "/usr/lib", "/usr/lib64", "/proc", "/dev", "/tmp", "/etc/alternatives",
	} {
		errs = append(errs, os.MkdirAll(n.Path(dir), dirMode))
	}
	errs = append(errs, os.Symlink("/run", n.Path("/var/run")))
	for _, link := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
		errs = append(errs, os.Symlink("usr"+link, n.Path(link)))
	}
	return errors.Join(append(errs, makeDevices(n.host))...)
}

// makeContainer creates the container's directories, as the DaemonSet mounts them.
func (n *Node) makeContainer() error {
	var errs []error
	for _, dir := range []string{
		"/host" + NetDir, "/host" + BinDir, "/host/var/lib/cni", "/host/var" + netnsDir, "/var" + RunDir, ServiceAccountDir,
		"/usr/local/bin", "/proc", "/dev", "/tmp", "/etc",
	} {
		errs = append(errs, os.MkdirAll(n.inside(dir), dirMode))
	}
	const hosts = "127.0.0.1\tlocalhost\n" // the kubelet writes it for each pod
	errs = append(errs,
		replace(n.inside("/etc/hosts"), hosts),
		replace(n.inside(imageProgram), ""),
		os.Symlink(filepath.Base(imageProgram), n.inside(imageAgent)),
		makeDevices(n.container))
	return errors.Join(errs...)
}

// Path returns the test's path of a file of the host.
func (n *Node) Path(name string) string { return filepath.Join(n.host, name) }

// inside returns the test's path of a file of the container.
func (n *Node) inside(name string) string { return filepath.Join(n.container, name) }

// Put creates or replaces a file of the host atomically.
func (n *Node) Put(name, text string) {
	n.tb.Helper()
	check.OK(n.tb, replace(n.Path(name), text))
}

func replace(file, text string) error {
	const aside = ".new" // not an extension that a runtime reads
	if err := os.MkdirAll(filepath.Dir(file), dirMode); err != nil {
		return err
	}
	if err := os.WriteFile(file+aside, []byte(text), fileMode); err != nil { //nolint:forbidigo // a file of the test
		return err
	}
	return os.Rename(file+aside, file)
}

// Read returns the content of a file of the host.
func (n *Node) Read(name string) string {
	n.tb.Helper()
	text, err := os.ReadFile(n.Path(name))
	check.OK(n.tb, err)
	return string(text)
}

// Tree returns the files below a directory of the host: the mode of each file with its content or target.
func (n *Node) Tree(dir string) map[string]string {
	n.tb.Helper()
	tree, root := map[string]string{}, n.Path(dir)
	err := filepath.WalkDir(root, func(file string, _ fs.DirEntry, err error) error {
		if err != nil || file == root {
			return err
		}
		info, err := os.Lstat(file)
		if err != nil {
			return err
		}
		var content []byte
		target, _ := os.Readlink(file) // only for a link
		if info.Mode().IsRegular() {
			content, err = os.ReadFile(file) //nolint:gosec // the test's own path
		}
		tree[strings.TrimPrefix(file, root+"/")] = fmt.Sprintf("%s %s%s", info.Mode(), target, content)
		return err
	})
	check.OK(n.tb, err)
	return tree
}

// StartAPI starts the API server with the agent's DaemonSet and this node. After a stop, it starts with another
// authority.
func (n *Node) StartAPI() {
	n.tb.Helper()
	Await(n.tb, "the API server's port", n.portIsFree)
	err := netns.Do(n.Netns, func() error {
		n.API = kubetest.NewServerAt(n.tb, APIAddress)
		return nil
	})
	check.OK(n.tb, err)
	n.API.Set(kubetest.DaemonSet(Namespace, DaemonSet, ""))
	n.API.Set(kubetest.Node(NodeName, nil, ""))
	n.API.SetPod(kubetest.Pod{Namespace: Namespace, Name: PodName, UID: "00000000-0000-4000-8000-00000000a9e7"})
}

// portIsFree returns an error while a process that was just started still has the port of a stopped server: between
// fork and exec it has all files of the test. No process is started during the check.
func (n *Node) portIsFree() error {
	return n.inNetns(func() error {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		listener, err := (&net.ListenConfig{}).Listen(n.tb.Context(), "tcp", APIAddress)
		if err != nil {
			return err
		}
		return listener.Close()
	})
}

// GrantAccess writes the credentials that the API server accepts now into the container.
func (n *Node) GrantAccess() {
	n.tb.Helper()
	n.Project(ServiceAccountDir, map[string]string{
		"token": n.API.Token(), "ca.crt": string(n.API.CA()), "namespace": Namespace,
	})
}

// Project replaces the files of a directory of the container as the kubelet does for projected volumes: a new hidden directory,
// and an atomic exchange of the link "..data" to it.
func (n *Node) Project(dir string, files map[string]string) {
	n.tb.Helper()
	const current, next = "..data", "..data_tmp"
	in := func(names ...string) string { return filepath.Join(append([]string{n.inside(dir)}, names...)...) }
	name := "..2026_" + strconv.FormatInt(n.projections.Add(1), 10)
	before, err := os.Readlink(in(current))
	first := errors.Is(err, fs.ErrNotExist)
	errs := []error{os.MkdirAll(in(name), dirMode)}
	for key, text := range files {
		errs = append(errs, os.WriteFile(in(name, key), []byte(text), fileMode)) //nolint:forbidigo // a file of the test
	}
	errs = append(errs, os.Symlink(name, in(next)), os.Rename(in(next), in(current)))
	// The links that users of the directory see.
	for key := range files {
		if err := os.Symlink(filepath.Join(current, key), in(key)); !errors.Is(err, fs.ErrExist) {
			errs = append(errs, err)
		}
	}
	if !first {
		old, err := os.ReadDir(in(before))
		errs = append(errs, err)
		for _, entry := range old {
			if _, still := files[entry.Name()]; !still {
				errs = append(errs, os.Remove(in(entry.Name())))
			}
		}
		errs = append(errs, os.RemoveAll(in(before)))
	}
	check.OK(n.tb, errors.Join(errs...), "projecting into", dir)
}
