// Package sandbox finds the network namespace of a running pod in the records of a node: libcni's cache, the mounts of the
// container runtime, and the processes.
//
// It promises that the returned namespace is a network namespace, is neither the node's nor this process's, has every
// address of the pod, is assigned to no other pod by any record, and stays the checked namespace while it is open. If two
// namespaces fit, Find returns neither and names both. A search enters no namespace twice however many names it has, leaves
// no thread in a namespace, and keeps only the returned namespace open.
//
// It never changes anything in a namespace or on the node, and accepts no name as proof: a stale entry, or an entry whose path
// now belongs to another pod, does not override the addresses.
//
// Start reading at [Places.Find]. cache.go, mount.go and proc.go search one kind of place each. record.go determines the
// owner of a namespace from records.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
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
	// Place is a path to it, or "" if the path is a process's: another process may have the number later.
	Place string
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
	var addresses []netip.Addr // each once and in one spelling: IPv4 as IPv4, IPv6 without a zone
	for _, address := range pod.Addresses {
		if address = address.Unmap().WithZone(""); address.IsValid() && !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	pod.Addresses = addresses
	s := &search{
		places: p, view: hostpath.Detect(p.Roots, p.Proc), pod: pod, self: podOfProcess("/proc/self"),
		verdicts: map[netns.Inode]verdict{}, owned: map[netns.Inode]bool{}, foreign: map[netns.Inode]string{},
	}
	return s.run(ctx)
}

// verdict is the result of checking a namespace.
type verdict string

const (
	ofHost   verdict = "it is the node's own"
	unlike   verdict = "it does not have the pod's addresses"
	matching verdict = "it has the pod's addresses" // also if the pod has none
	unusable verdict = "it cannot be looked into"
)

// search is one search. It is used by one goroutine.
type search struct {
	places Places
	view   hostpath.View
	pod    Pod
	// self is the UID of this process's own pod, or "".
	self string
	// verdicts has the verdict about each namespace. If a namespace ends during the search and the kernel reuses its number,
	// the search misses the new namespace, as if it were created a moment later.
	verdicts map[netns.Inode]verdict
	// owned has the namespaces that a record assigns to the pod, foreign other pods' namespaces with the record.
	owned   map[netns.Inode]bool
	foreign map[netns.Inode]string
	// processes has the paths of namespaces that are known only from a process, once walked is set.
	processes []string
	walked    *Searched

	searched      []Searched
	candidates    []candidate
	host          *netns.Namespace // the node's own
	cacheSaysHost bool             // the cache assigns the node's namespace to the pod
	cacheDenies   bool             // the cache assigns a namespace without the pod's addresses to the pod's UID
	claim         string           // the record that assigns the last candidate to another pod
}

// candidate is a namespace that may be the pod's.
type candidate struct {
	*Namespace

	path     string
	attached route.Attachment // the worst attachment of the pod's addresses
}

func (c candidate) String() string { return fmt.Sprintf("%s (%s)", c.Inode(), c.path) }

func (s *search) run(ctx context.Context) (found *Namespace, err error) {
	if err := s.openHost(); err != nil {
		return nil, s.failed(fmt.Errorf("%w: %w", ErrNoHost, err))
	}
	defer s.host.Close()
	defer func() { s.drop(func(c candidate) bool { return c.Namespace != found }) }()
	stages := []func(context.Context) error{s.searchCache}
	if s.pod.Sandbox != "" {
		stages = slices.Insert(stages, 0, s.searchSandbox)
	}
	if len(s.pod.Addresses) > 0 {
		stages = append(stages, s.searchMounts, s.searchProcesses)
	}
	for _, stage := range stages {
		if err := stage(ctx); err != nil {
			return nil, err
		}
		if err := s.dropForeign(ctx); err != nil {
			return nil, err
		}
		switch best := s.best(); {
		case len(best) == 1 && s.eligible(best[0]):
			return best[0].Namespace, nil
		case len(best) > 1 && s.eligible(best[0]), s.cacheDenies: // the namespace with the addresses is not the pod's
			return nil, s.fail(best)
		}
	}
	return nil, s.fail(s.best())
}

// best returns the candidates that a record assigns to the pod, or all candidates without such a record, and of these only
// those with the best attachment.
func (s *search) best() []candidate {
	rank := func(c candidate) route.Attachment {
		if s.owned[c.Inode()] {
			return c.attached + route.Outside + 1
		}
		return c.attached
	}
	highest := route.Absent
	for _, c := range s.candidates {
		highest = max(highest, rank(c))
	}
	return slices.DeleteFunc(slices.Clone(s.candidates), func(c candidate) bool { return rank(c) < highest })
}

// eligible reports whether the best candidate may be the pod's.
func (s *search) eligible(c candidate) bool {
	return s.owned[c.Inode()] || c.attached > route.OnLoopback
}

// drop closes candidates.
func (s *search) drop(which func(candidate) bool) {
	s.candidates = slices.DeleteFunc(s.candidates, func(c candidate) bool {
		if which(c) {
			c.Close()
			return true
		}
		return false
	})
}

// maxNamed bounds the candidates that an error names: a tenant can make many.
const maxNamed = 4

// fail returns the error for the best candidates.
func (s *search) fail(best []candidate) *Error {
	switch {
	case len(best) > 1:
		var names []string
		for _, c := range best {
			names = append(names, c.String())
		}
		return s.failed(fmt.Errorf("%w: %s", ErrAmbiguous, printable.Some(names, maxNamed)))
	case len(best) == 1:
		return s.failed(fmt.Errorf("%w: %s", ErrLoopback, best[0]))
	case s.claim != "":
		return s.failed(fmt.Errorf("%w: %s", ErrClaimed, s.claim))
	case s.cacheSaysHost || s.hostHas():
		return s.failed(ErrHost)
	}
	return s.failed(ErrNotFound)
}

// openHost opens the node's namespace, and marks it and this process's namespace so that neither matches a pod.
func (s *search) openHost() error {
	path, err := s.hostNamespace()
	if err != nil {
		return err
	}
	own, err := netns.InodeOf("/proc/self/ns/net")
	if err != nil {
		return err
	}
	if s.host, err = netns.Open(path); err != nil {
		return err
	}
	s.verdicts[own], s.verdicts[s.host.Inode()] = ofHost, ofHost
	return nil
}

// hostHas reports whether the node has the pod's addresses: then the pod is on the node's network.
func (s *search) hostHas() bool {
	if len(s.pod.Addresses) == 0 {
		return false
	}
	has, err := s.enter(s.host)
	return err == nil && !slices.Contains(has, route.Absent)
}

// maxOpen bounds the open candidates from processes: a tenant can create many. The search keeps the candidates with the best
// attachment, and the candidates that a record assigns to the pod.
const maxOpen = 16

// check checks the namespace at a path of this process, and keeps it open if it may be the pod's.
func (s *search) check(path string, from Source) (verdict, error) {
	inode, err := netns.InodeOf(path)
	if err != nil {
		return unusable, err
	}
	if known, there := s.verdicts[inode]; there {
		return known, nil
	}
	n, err := netns.Open(path)
	if err != nil {
		s.verdicts[inode] = unusable
		return unusable, err
	}
	if known, there := s.verdicts[n.Inode()]; there { // a known namespace was mounted there just now
		n.Close()
		return known, nil
	}
	result, attached, err := s.compare(n)
	s.verdicts[n.Inode()] = result
	if result != matching {
		n.Close()
		return result, err
	}
	s.owned[n.Inode()] = s.owned[n.Inode()] || from == FromCache
	s.candidates = append(s.candidates, candidate{&Namespace{n, from, lasting(path)}, path, attached})
	many := slices.DeleteFunc(slices.Clone(s.candidates), func(c candidate) bool { return c.Source != FromProc || s.owned[c.Inode()] })
	if len(many) > maxOpen {
		worst := slices.MinFunc(many, func(a, b candidate) int { return int(a.attached) - int(b.attached) })
		s.drop(func(c candidate) bool { return c == worst })
	}
	return result, nil
}

// lasting returns path, or "" for a path below a process.
func lasting(path string) string {
	if strings.Contains(path, "/ns/net") {
		return ""
	}
	return path
}

// enter returns how the pod's addresses are attached to the interfaces of a namespace.
func (s *search) enter(n *netns.Namespace) ([]route.Attachment, error) {
	return netns.In(n, func() ([]route.Attachment, error) { return route.Attachments(s.pod.Addresses, s.host.FD()) })
}

// compare enters a namespace and compares its addresses with the pod's.
func (s *search) compare(n *netns.Namespace) (verdict, route.Attachment, error) {
	if len(s.pod.Addresses) == 0 {
		return matching, route.Absent, nil
	}
	has, err := s.enter(n)
	switch {
	case err != nil:
		return unusable, route.Absent, err
	case slices.Contains(has, route.Absent):
		return unlike, route.Absent, nil
	}
	return matching, slices.Min(has), nil
}

// Open opens the network namespace at a path of the node, as the runtime names it. It does not check whose it is.
func (p Places) Open(path string) (*netns.Namespace, error) {
	var failed error
	for _, seen := range hostpath.Detect(p.Roots, p.Proc).Candidates(path) {
		n, err := netns.Open(seen)
		if err == nil {
			return n, nil
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = err
		}
	}
	return nil, failed
}
