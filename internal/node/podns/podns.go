// Package podns finds the network namespace of a running pod from what a node has: libcni's cache, the mounts of the
// container runtime, and the processes.
//
// It promises that a namespace it gives is a network namespace, is not the node's and not this process's, holds every
// address that the pod has, and stays the one that was checked for as long as it is held. Where two could be meant it
// gives neither. A search enters no namespace twice however many names it has, leaves no thread in one, and keeps
// none open but the one it gives.
//
// It never changes anything in a namespace or on the node, and never takes a name for proof: an entry that was left
// behind, or whose path belongs to another pod by now, does not win over the addresses.
//
// Start reading at [Places.Find]. cache.go has what libcni writes, mount.go and proc.go where else namespaces are
// named, namespace.go how one is held.
package podns

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Pod is whose namespace is looked for.
type Pod struct {
	Namespace, Name, UID string
	// Addresses are those of status.podIPs. Without any only libcni's cache can tell which namespace is the pod's.
	Addresses []netip.Addr
}

// Places are where to look, as this process sees them.
type Places struct {
	// Cache is the directory of libcni's results, empty for none.
	Cache string
	// Mounts are directories in which container runtimes mount namespaces: /var/run/netns, /run/docker/netns.
	Mounts []string
	// Proc is the procfs of the node: "/proc" of a process in the node's pid namespace, or a mount of it.
	Proc string
	// HostRoots are prefixes under which paths of the node are seen. Without any they are seen as they are.
	HostRoots []string
}

// Source is where a namespace was found. It is a closed set.
type Source string

// The sources, in the order in which they are asked.
const (
	FromCache Source = "cache"
	FromMount Source = "mount"
	FromProc  Source = "proc"
)

// Find looks for the network namespace of a pod: in libcni's cache by the pod's UID, then among the mounted namespaces
// and then among those of the processes by the pod's addresses. The first source that knows exactly one has the last
// word. A namespace of the cache must have the pod's addresses as well, unless the pod has none.
//
// The caller closes what it is given. An error is an [Error], or that of ctx.
func (p Places) Find(ctx context.Context, pod Pod) (*Namespace, error) {
	s := search{places: p, pod: normal(pod), hold: netns.Open, look: addresses, seen: map[netns.Inode]verdict{}}
	return s.run(ctx)
}

// normal gives each address once and in one spelling: IPv4 as IPv4, IPv6 without a zone.
func normal(pod Pod) Pod {
	var list []netip.Addr
	for _, address := range pod.Addresses {
		if address = address.Unmap().WithZone(""); address.IsValid() && !slices.Contains(list, address) {
			list = append(list, address)
		}
	}
	pod.Addresses = list
	return pod
}

// verdict is what was found out about a namespace.
type verdict string

const (
	ofHost    verdict = "it is the node's own"
	unlike    verdict = "it does not have the pod's addresses"
	matching  verdict = "it has the pod's addresses"
	unusable  verdict = "it cannot be looked into"
	unchecked verdict = "" // the pod has no addresses
)

// search is one search. It is used by one goroutine.
type search struct {
	places Places
	pod    Pod
	// hold opens a namespace, look gives the addresses inside: it is what enters one.
	hold func(path string) (*netns.Namespace, error)
	look func(n *netns.Namespace) ([]netip.Addr, error)
	// seen is what was found out about each namespace. A number may be given anew when its namespace ends while the search
	// goes on: the new one is overlooked then, as if it were made a moment later.
	seen map[netns.Inode]verdict

	looked   []Look
	found    []*Namespace
	hostPath string // the node's own namespace
	hostSaid bool   // the cache says that the pod's namespace is the node's
}

func (s *search) run(ctx context.Context) (*Namespace, error) {
	if err := s.markHost(); err != nil {
		return nil, s.failed(err)
	}
	stages := []func(context.Context) error{s.cache}
	if len(s.pod.Addresses) > 0 {
		stages = append(stages, s.mounts, s.processes)
	}
	for _, stage := range stages {
		err := stage(ctx)
		if err == nil && len(s.found) == 1 {
			return s.found[0], nil
		}
		if err != nil || len(s.found) > 1 {
			return nil, s.giveUp(err)
		}
	}
	if s.hostSaid || s.hostHas() {
		return nil, s.failed(ErrHost)
	}
	return nil, s.failed(ErrNotFound)
}

// giveUp lets go what was found.
func (s *search) giveUp(err error) error {
	inodes := make([]netns.Inode, 0, len(s.found))
	for _, n := range s.found {
		inodes = append(inodes, n.Inode())
		n.Close()
	}
	if err != nil {
		return err
	}
	failed := s.failed(ErrAmbiguous)
	failed.Inodes = inodes
	return failed
}

// markHost makes sure that the node's namespace, and this process's, are never taken for a pod's.
func (s *search) markHost() error {
	var err error
	if s.hostPath, err = s.places.host(); err != nil {
		return fmt.Errorf("%w: %w", ErrNoHost, err)
	}
	for _, path := range []string{s.hostPath, "/proc/self/ns/net"} {
		inode, err := netns.InodeOf(path)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNoHost, err)
		}
		s.seen[inode] = ofHost
	}
	return nil
}

// hostHas tells whether the pod's addresses are the node's, as those of a pod on the node's network are.
func (s *search) hostHas() bool {
	if len(s.pod.Addresses) == 0 {
		return false
	}
	host, err := s.hold(s.hostPath)
	if err != nil {
		return false
	}
	defer host.Close()
	has, err := s.look(host)
	return err == nil && s.matches(has)
}

func (s *search) matches(has []netip.Addr) bool {
	return !slices.ContainsFunc(s.pod.Addresses, func(a netip.Addr) bool { return !slices.Contains(has, a) })
}

// consider looks at the namespace at a path that is visible here, and keeps it if it may be the pod's.
func (s *search) consider(path string, from Source) (verdict, error) {
	inode, err := netns.InodeOf(path)
	if err != nil {
		return unusable, err
	}
	if known, there := s.seen[inode]; there {
		return known, nil
	}
	n, err := s.hold(path)
	if err != nil {
		s.seen[inode] = unusable
		return unusable, err
	}
	if known, there := s.seen[n.Inode()]; there { // another one was mounted there meanwhile
		n.Close()
		return known, nil
	}
	judged, err := s.judge(n)
	s.seen[n.Inode()] = judged
	if judged != matching && judged != unchecked {
		n.Close()
		return judged, err
	}
	s.found = append(s.found, &Namespace{n, from})
	return judged, nil
}

func (s *search) judge(n *netns.Namespace) (verdict, error) {
	if len(s.pod.Addresses) == 0 {
		return unchecked, nil
	}
	has, err := s.look(n)
	switch {
	case err != nil:
		return unusable, err
	case s.matches(has):
		return matching, nil
	}
	return unlike, nil
}

// addresses enters a namespace and gives all addresses of all its interfaces.
func addresses(n *netns.Namespace) ([]netip.Addr, error) {
	var all []netip.Addr
	err := n.Do(func() error {
		list, err := route.Addresses()
		for _, one := range list {
			all = append(all, one.Addr().Unmap().WithZone(""))
		}
		return err
	})
	return all, err
}
