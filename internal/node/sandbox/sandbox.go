// Package sandbox finds the network namespace of a running pod in the records of a node: libcni's cache, the mounts of the
// container runtime, and the processes.
//
// It promises that the returned namespace is a network namespace, is neither the node's nor this process's, has every
// address of the pod, is assigned to no other pod by any record, and stays the checked namespace while it is open. If two
// namespaces fit, Find returns neither and names both. A search for one pod or for many enters no namespace twice however many
// names it has, leaves no thread in a namespace, and keeps only the returned namespaces open.
//
// It never changes anything in a namespace or on the node, and accepts no name as proof: a stale entry, or an entry whose path
// now belongs to another pod, does not override the addresses.
//
// Start reading at [Places.FindAll]. sweep.go reads the node once for all searches, search.go decides about one pod. cache.go,
// mount.go and proc.go search one kind of place each. record.go determines the owner of a namespace from records.
package sandbox

import (
	"context"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// Pod is the pod whose namespace Find searches.
type Pod struct {
	Namespace, Name, UID string
	// Addresses has status.podIPs. Without addresses only libcni's cache can identify the pod's namespace.
	Addresses []netip.Addr
	// Sandbox is the ID of the pod's sandbox from the plugin's report, or "". Find first reads the entries of libcni's cache about it,
	// and no other entries if they lead to the pod's namespace.
	Sandbox string
}

// Places are the places to search. All but Roots are paths of the node. Each search resolves them because a runtime
// makes its directories with the node's first pod.
type Places struct {
	// Cache is the directory of libcni's cache, or empty; Proc the procfs.
	Cache, Proc string
	// Netns has the directories in which container runtimes mount namespaces: /var/run/netns, /run/docker/netns.
	Netns []string
	// Roots has the prefixes under which this process may see the node's paths, best first.
	Roots []string
}

// Reachable reports whether a search can succeed: it needs the node's processes to distinguish a namespace from the node's
// own.
func (p Places) Reachable() bool { return hostpath.Detect(p.Roots, p.Proc).Proc != "" }

// Source is the kind of place where a namespace was found. The set is closed.
type Source string

// The sources, in the order of the search.
const (
	FromCache Source = "cache"
	FromMount Source = "mount"
	FromProc  Source = "proc"
)

// Namespace is the result of a search. The caller closes it.
type Namespace struct {
	*netns.Namespace

	Source Source
	// Inhabited: a process is in it, or a record assigns it to the pod. Otherwise it can be that of another pod in creation, which
	// has the address by now: the runtime starts the first process, and libcni writes its record, after the plugins.
	Inhabited bool
	// Place is a path to it, or "" if the path is a process's: another process may have the number later.
	Place string
}

// Result is a pod's namespace, which the caller closes, or an error: an [Error] or the context's.
type Result struct {
	Namespace *Namespace
	Err       error
}

// Find searches the network namespace of a pod: in libcni's cache by the pod's UID, then in the mounted namespaces and the
// processes' namespaces by the pod's addresses. A namespace from the cache must also have the pod's addresses, unless the pod
// has none.
//
// An address alone proves little: root in a namespace can add any. So Find drops a namespace with the pod's addresses if a
// record, libcni's cache or the cgroup of a process in the namespace, assigns it to another pod. It prefers a namespace that
// a record assigns to this pod, then the best attachment of the addresses (see route.Attachment). It never returns a
// namespace without a record that has the addresses only on loopback.
//
// The caller closes the result. The error is an [Error] or ctx's.
func (p Places) Find(ctx context.Context, pod Pod) (*Namespace, error) {
	result := p.FindAll(ctx, []Pod{pod})[pod.UID]
	return result.Namespace, result.Err
}

// FindAll is Find for some pods, by UID. It reads each place once for all of them, and libcni's cache again after a place where
// addresses alone identify a namespace. If two pods are found in one namespace, each gets its own file of it.
func (p Places) FindAll(ctx context.Context, pods []Pod) map[string]Result {
	w := &sweep{
		places: p, view: hostpath.Detect(p.Roots, p.Proc), self: podOfProcess("/proc/self"),
		spaces: map[netns.Inode]*space{}, byAddress: map[netip.Addr][]*search{},
	}
	defer w.close()
	return w.run(ctx, pods)
}

// Open opens the network namespace at a path of the node, as the runtime names it. It does not check whose it is.
func (p Places) Open(path string) (*netns.Namespace, error) {
	n, _, err := openFirst(hostpath.Detect(p.Roots, p.Proc).Candidates(path), netns.Open)
	return n, err
}
