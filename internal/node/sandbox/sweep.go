package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// sweep is one reading of the node for some searches. It is used by one goroutine.
type sweep struct {
	places Places
	view   hostpath.View
	// self is the UID of this process's own pod, or "".
	self string
	host *space // the node's own
	// spaces has each known namespace, and each file that could not be opened as one. If a namespace ends during the sweep and the
	// kernel reuses its number, the sweep misses the new namespace, as if it were created a moment later.
	spaces map[netns.Inode]*space
	// searches are those without a result. addresses are those of all pods; byAddress has the searches by theirs.
	searches  []*search
	addresses []netip.Addr
	byAddress map[netip.Addr][]*search

	// walked is set once the processes have been read. owners has the pods with a process in a namespace.
	walked    *Searched
	inhabited []inhabited
	owners    map[netns.Inode][]owner
}

// space is a network namespace. It is open while a search may return it.
type space struct {
	*netns.Namespace // nil if it could not be opened

	host    bool // the node's own or this process's: it matches no pod
	offered bool // to all searches
	// has is the attachment of the searched addresses once looked is set, unless that failed with err.
	looked bool
	has    map[netip.Addr]route.Attachment
	err    error
	// refs counts the searches with this candidate.
	refs int
}

// owner is a pod with a process in a namespace.
type owner struct{ uid, process string }

// run returns the results by UID.
func (w *sweep) run(ctx context.Context, pods []Pod) map[string]Result {
	results := make(map[string]Result, len(pods))
	all := w.start(pods)
	w.searches = slices.Clone(all)
	if err := w.openHost(); err != nil {
		for _, s := range all {
			results[s.pod.UID] = Result{Err: s.failed(fmt.Errorf("%w: %w", ErrNoHost, err))}
		}
		return results
	}
	stages := []func(context.Context){w.searchSandboxes, w.searchCache, w.searchMounts, w.searchProcesses}
	const cache = 1 // the last one for a pod without addresses
	for i, stage := range stages {
		if len(w.searches) == 0 {
			break
		}
		stage(ctx)
		w.dropForeign(ctx)
		if ctx.Err() != nil {
			break
		}
		w.searches = slices.DeleteFunc(w.searches, func(s *search) bool {
			return s.decide(i == len(stages)-1 || i == cache && len(s.pod.Addresses) == 0)
		})
	}
	for _, s := range all {
		if results[s.pod.UID] = s.result; !s.done {
			results[s.pod.UID] = Result{Err: ctx.Err()}
		}
	}
	return results
}

// start returns a search for each UID.
func (w *sweep) start(pods []Pod) (all []*search) {
	uids := map[string]bool{}
	for _, pod := range pods {
		if uids[pod.UID] {
			continue
		}
		uids[pod.UID] = true
		s := &search{sweep: w, pod: pod, foreign: map[*space]string{}}
		s.pod.Addresses = nil // each once and in one spelling: IPv4 as IPv4, IPv6 without a zone
		for _, address := range pod.Addresses {
			if address = address.Unmap().WithZone(""); !address.IsValid() || slices.Contains(s.pod.Addresses, address) {
				continue
			}
			s.pod.Addresses = append(s.pod.Addresses, address)
			if w.byAddress[address] == nil {
				w.addresses = append(w.addresses, address)
			}
			w.byAddress[address] = append(w.byAddress[address], s)
		}
		all = append(all, s)
	}
	return all
}

// openHost opens the node's namespace, and marks it and this process's namespace so that neither matches a pod.
func (w *sweep) openHost() error {
	path, err := w.hostNamespace()
	if err != nil {
		return err
	}
	own, err := netns.InodeOf("/proc/self/ns/net")
	if err != nil {
		return err
	}
	host, err := netns.Open(path)
	if err != nil {
		return err
	}
	w.host = &space{Namespace: host, host: true}
	w.spaces[own], w.spaces[host.Inode()] = &space{host: true}, w.host
	return nil
}

func (w *sweep) close() {
	for _, sp := range w.spaces {
		sp.release()
	}
}

// open returns the namespace at a path of this process. Only the first call for a file fails because the file cannot be opened.
func (w *sweep) open(path string) (*space, error) {
	inode, err := netns.InodeOf(path)
	if err != nil {
		return nil, err
	}
	if known := w.spaces[inode]; known != nil {
		return known, nil
	}
	n, err := netns.Open(path)
	if err != nil {
		w.spaces[inode] = &space{looked: true, err: err}
		return nil, err
	}
	if known := w.spaces[n.Inode()]; known != nil { // a known namespace was mounted there just now
		n.Close()
		return known, nil
	}
	sp := &space{Namespace: n}
	w.spaces[n.Inode()] = sp
	return sp, nil
}

// openFirst opens the first of the paths that leads to a namespace. If none does, the error is about a path to another kind
// of file, if any.
func openFirst[T any](paths []string, open func(string) (*T, error)) (opened *T, path string, err error) {
	for _, path = range paths {
		opened, failed := open(path)
		if failed == nil {
			return opened, path, nil
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = failed
		}
	}
	return nil, "", err
}

// look enters a namespace, unless the sweep has entered it before, and reads how the searched addresses are attached there.
func (w *sweep) look(sp *space) error {
	if sp.looked {
		return sp.err
	}
	sp.looked = true
	var attached []route.Attachment
	attached, sp.err = netns.In(sp.Namespace, func() ([]route.Attachment, error) { return route.Attachments(w.addresses, w.host.FD()) })
	for i, a := range attached {
		if a != route.Absent {
			if sp.has == nil {
				sp.has = map[netip.Addr]route.Attachment{}
			}
			sp.has[w.addresses[i]] = a
		}
	}
	return sp.err
}

// offer makes the namespace at the first of the paths a candidate of each search for addresses that it has.
func (w *sweep) offer(paths []string, from Source) error {
	sp, path, err := openFirst(paths, w.open)
	if err != nil || !sp.isOpen() {
		return err
	}
	sp.offered = true
	if !sp.looked { // else the error is known
		err = w.look(sp)
	}
	for address := range sp.has {
		for _, s := range w.byAddress[address] {
			s.consider(sp, path, from)
		}
	}
	if sp.refs == 0 {
		sp.release()
	}
	return err
}

// offerAny offers a path that may lead to a namespace. A missing file or another kind of file is not a failure.
func (w *sweep) offerAny(path string, from Source, place *Searched) {
	if err := w.offer([]string{path}, from); err != nil && !gone(err) && !errors.Is(err, netns.ErrNotNetwork) {
		place.fail(err)
	}
}

// gone reports whether a file or its process has ended.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// searchedBy adds a place to every search.
func (w *sweep) searchedBy(place Searched) {
	for _, s := range w.searches {
		s.searched = append(s.searched, place)
	}
}

// isOpen reports whether a search may still return the namespace.
func (sp *space) isOpen() bool { return sp.Namespace != nil && !sp.host && sp.FD() >= 0 }

// release closes the namespace.
func (sp *space) release() {
	if sp.Namespace != nil {
		sp.Close()
	}
}
