// Package podns finds the network namespace of a running pod from what a node has: libcni's cache, the mounts of the
// container runtime, and the processes.
//
// It promises that a namespace it gives is a network namespace, is not the node's and not this process's, holds every
// address that the pod has, is no other pod's by any record, and stays the one that was checked for as long as it is
// held. Where two could be meant it gives neither, and names them. A search enters no namespace twice however many names it has, leaves no thread in one, and keeps
// none open but the one it gives.
//
// It never changes anything in a namespace or on the node, and never takes a name for proof: an entry that was left
// behind, or whose path belongs to another pod by now, does not win over the addresses.
//
// Start reading at [Places.Find]. cache.go has what libcni writes, mount.go and proc.go where else namespaces are
// named, record.go whose a namespace is by a record.
package podns

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Pod is whose namespace is looked for.
type Pod struct {
	Namespace, Name, UID string
	// Addresses are those of status.podIPs. Without any only libcni's cache can tell which namespace is the pod's.
	Addresses []netip.Addr
}

// Places are where to look. All but Roots are paths of the node, which are found anew by each search: a runtime makes its
// directories with the node's first pod.
type Places struct {
	// Cache is the directory of libcni's results, empty for none; Proc the procfs.
	Cache, Proc string
	// Netns are directories in which container runtimes mount namespaces: /var/run/netns, /run/docker/netns.
	Netns []string
	// Roots are prefixes under which this process may see paths of the node, best first.
	Roots []string
}

// Reachable reports whether namespaces can be looked for: without the processes of the node none can be told from the
// node's own.
func (p Places) Reachable() bool { return hostpath.Detect(p.Roots, p.Proc).Proc != "" }

// Source is where a namespace was found. It is a closed set.
type Source string

// The sources, in the order in which they are asked.
const (
	FromCache Source = "cache"
	FromMount Source = "mount"
	FromProc  Source = "proc"
)

// Find looks for the network namespace of a pod: in libcni's cache by the pod's UID, then among the mounted namespaces
// and then among those of the processes by the pod's addresses. A namespace of the cache must have the pod's addresses as
// well, unless the pod has none.
//
// An address alone proves little: whoever is root in a namespace can add any. So of the namespaces that have the pod's
// addresses those are left out that a record gives to another pod: libcni's cache, or the cgroup of a process that is in
// it. One that the record gives to this pod wins; else the one whose addresses are on the interface that takes most to
// make (see route.Attachment). One with addresses on loopback alone, and no record, is never the pod's.
//
// The caller closes what it is given. An error is an [Error], or that of ctx.
func (p Places) Find(ctx context.Context, pod Pod) (*Namespace, error) {
	s := newSearch(p, pod)
	return s.run(ctx)
}

func newSearch(p Places, pod Pod) *search {
	return &search{
		places: p, view: hostpath.Detect(p.Roots, p.Proc), pod: normal(pod), hold: netns.Open, look: attachments, self: podOfProcess("/proc/self"),
		seen: map[netns.Inode]verdict{}, own: map[netns.Inode]bool{}, others: map[netns.Inode]string{},
	}
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
	view   hostpath.View
	pod    Pod
	// self is the UID of the pod that this process is of, if it is of one.
	self string
	// hold opens a namespace, look gives how the pod's addresses are attached inside: it is what enters one.
	hold func(path string) (*netns.Namespace, error)
	look func(n *netns.Namespace, of []netip.Addr, node int) ([]route.Attachment, error)
	// seen is what was found out about each namespace. A number may be given anew when its namespace ends while the search
	// goes on: the new one is overlooked then, as if it were made a moment later.
	seen map[netns.Inode]verdict
	// own are the namespaces that a record gives to the pod, others those that one gives to another, and to which.
	own    map[netns.Inode]bool
	others map[netns.Inode]string

	looked   []Look
	found    []candidate
	host     *netns.Namespace // the node's own
	hostSaid bool             // the cache says that the pod's namespace is the node's
	denied   bool             // the cache has a namespace of the pod's UID, which does not have its addresses
	claimed  string           // whose the last candidate is that a record gives to another pod
}

// candidate is a namespace that may be the pod's.
type candidate struct {
	*Namespace

	place    string
	attached route.Attachment // that of the address that is attached worst
}

func (c candidate) String() string { return fmt.Sprintf("%s (%s)", c.Inode(), c.place) }

func (s *search) run(ctx context.Context) (*Namespace, error) {
	if err := s.markHost(); err != nil {
		return nil, s.failed(err)
	}
	defer s.host.Close()
	stages := []func(context.Context) error{s.cache}
	if len(s.pod.Addresses) > 0 {
		stages = append(stages, s.mounts, s.processes)
	}
	for _, stage := range stages {
		err := stage(ctx)
		if err == nil {
			err = s.disown(ctx)
		}
		if err != nil {
			s.drop(func(candidate) bool { return true })
			return nil, err
		}
		if best := s.best(); len(best) == 1 && s.sound(best[0]) {
			s.drop(func(c candidate) bool { return c != best[0] })
			return best[0].Namespace, nil
		} else if len(best) > 1 && s.sound(best[0]) {
			return nil, s.giveUp(best)
		}
		if s.denied {
			break // the record decides: another namespace that has the addresses is not the pod's
		}
	}
	return nil, s.giveUp(s.best())
}

// best are the candidates that nothing tells apart: those that a record gives to the pod, if there are any, and of these
// those whose addresses are attached best.
func (s *search) best() []candidate {
	rank := func(c candidate) route.Attachment {
		if s.own[c.Inode()] {
			return c.attached + route.Outside + 1
		}
		return c.attached
	}
	var best []candidate
	for _, c := range s.found {
		switch {
		case len(best) == 0 || rank(c) > rank(best[0]):
			best = []candidate{c}
		case rank(c) == rank(best[0]):
			best = append(best, c)
		}
	}
	return best
}

// sound reports whether a candidate may be the pod's if it is the best.
func (s *search) sound(c candidate) bool { return s.own[c.Inode()] || c.attached > route.Loopback }

// drop closes candidates.
func (s *search) drop(which func(candidate) bool) {
	s.found = slices.DeleteFunc(s.found, func(c candidate) bool {
		if which(c) {
			c.Close()
			return true
		}
		return false
	})
}

// giveUp lets go what was found, and says why it is not enough.
func (s *search) giveUp(best []candidate) error {
	defer s.drop(func(candidate) bool { return true })
	switch {
	case len(best) > 1:
		return s.ambiguous(best)
	case len(best) == 1:
		return s.failed(fmt.Errorf("%w: %s", ErrLoopback, best[0]))
	case s.claimed != "":
		return s.failed(fmt.Errorf("%w: %s", ErrClaimed, s.claimed))
	case s.hostSaid || s.hostHas():
		return s.failed(ErrHost)
	}
	return s.failed(ErrNotFound)
}

// mostNamed is how many candidates an error names: whoever can make one can make many.
const mostNamed = 4

func (s *search) ambiguous(best []candidate) *Error {
	names := make([]string, 0, mostNamed)
	for _, c := range best[:min(mostNamed, len(best))] {
		names = append(names, c.String())
	}
	if more := len(best) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	failed := s.failed(fmt.Errorf("%w: %s", ErrAmbiguous, strings.Join(names, ", ")))
	for _, c := range best {
		failed.Inodes = append(failed.Inodes, c.Inode())
	}
	return failed
}

// markHost makes sure that the node's namespace, and this process's, are never taken for a pod's.
func (s *search) markHost() error {
	path, err := s.hostNamespace()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoHost, err)
	}
	own, err := netns.InodeOf("/proc/self/ns/net")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoHost, err)
	}
	if s.host, err = s.hold(path); err != nil {
		return fmt.Errorf("%w: %w", ErrNoHost, err)
	}
	s.seen[own], s.seen[s.host.Inode()] = ofHost, ofHost
	return nil
}

// hostHas tells whether the pod's addresses are the node's, as those of a pod on the node's network are.
func (s *search) hostHas() bool {
	if len(s.pod.Addresses) == 0 {
		return false
	}
	has, err := s.look(s.host, s.pod.Addresses, s.host.FD())
	return err == nil && !slices.Contains(has, route.Absent)
}

// mostHeld bounds how many candidates among those of processes are held open, of which anyone can make many. The best
// attached ones stay, and those that a record gives to the pod.
const mostHeld = 16

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
	judged, attached, err := s.judge(n)
	s.seen[n.Inode()] = judged
	if judged != matching && judged != unchecked {
		n.Close()
		return judged, err
	}
	s.found = append(s.found, candidate{&Namespace{n, from}, path, attached})
	s.thinOut()
	return judged, nil
}

func (s *search) thinOut() {
	var many []candidate
	for _, c := range s.found {
		if c.source == FromProc && !s.own[c.Inode()] {
			many = append(many, c)
		}
	}
	if len(many) > mostHeld {
		worst := slices.MinFunc(many, func(a, b candidate) int { return int(a.attached) - int(b.attached) })
		s.drop(func(c candidate) bool { return c == worst })
	}
}

func (s *search) judge(n *netns.Namespace) (verdict, route.Attachment, error) {
	if len(s.pod.Addresses) == 0 {
		return unchecked, route.Absent, nil
	}
	has, err := s.look(n, s.pod.Addresses, s.host.FD())
	switch {
	case err != nil:
		return unusable, route.Absent, err
	case slices.Contains(has, route.Absent):
		return unlike, route.Absent, nil
	}
	return matching, slices.Min(has), nil
}

// attachments enters a namespace and looks at the interfaces with the addresses.
func attachments(n *netns.Namespace, of []netip.Addr, node int) (has []route.Attachment, err error) {
	err = n.Do(func() (err error) {
		has, err = route.Attachments(of, node)
		return err
	})
	return has, err
}
