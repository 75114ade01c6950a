package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// searchSandboxes searches only the entries of the reported sandboxes and checks them like any entry. If they do not lead to a pod's
// namespace, its search continues as without a report.
func (w *sweep) searchSandboxes(ctx context.Context) {
	reported := slices.DeleteFunc(slices.Clone(w.searches), func(s *search) bool { return s.pod.Sandbox == "" })
	if len(reported) == 0 {
		return
	}
	w.searchEntries(ctx, reported, func(s *search, name string) bool { return cnicache.Of(name, s.pod.Sandbox) })
	for _, s := range reported {
		s.searched, s.cacheDenies = nil, false // the next stage reads these entries again, and newer ones
	}
}

// searchCache searches libcni's cache for the pods' names. A failure does not end the search.
func (w *sweep) searchCache(ctx context.Context) {
	w.searchEntries(ctx, w.searches, func(*search, string) bool { return true })
}

func (w *sweep) searchEntries(ctx context.Context, searches []*search, which func(s *search, name string) bool) {
	if w.places.Cache == "" {
		return
	}
	dir := w.view.Existing(w.places.Cache)[0]
	places := make([]Searched, len(searches))
	files, err := cnicache.Walk(dir, func(name string) bool {
		return slices.ContainsFunc(searches, func(s *search) bool { return which(s, name) })
	}, func(name string, data []byte, err error) error {
		parse := sync.OnceValues(func() (cnicache.Entry, bool) { return cnicache.Parse(data) })
		for i, s := range searches {
			if which(s, name) {
				s.readEntry(name, data, err, parse, &places[i])
			}
		}
		return ctx.Err()
	})
	for i, s := range searches {
		place := places[i]
		place.Source, place.Place, place.Entries = FromCache, dir, files
		if err != nil {
			place.Err = err
		}
		s.searched = append(s.searched, place)
	}
}

// readEntry checks the namespace of an entry if it is about the pod.
func (s *search) readEntry(name string, data []byte, err error, parse func() (cnicache.Entry, bool), place *Searched) {
	if err != nil {
		place.fail(err)
		return
	}
	if !bytes.Contains(data, []byte(s.pod.Name)) { // saves parsing the entries of all other pods
		return
	}
	entry, ok := parse()
	switch {
	case !ok:
		place.fail(fmt.Errorf("entry %q cannot be read", name))
	case entry.Kind != cnicache.Kind || entry.Namespace != s.pod.Namespace || entry.Name != s.pod.Name:
	default:
		if problem := s.checkSandbox(entry); problem != "" {
			place.Notes = append(place.Notes, problem)
		}
	}
}

// checkSandbox checks the namespace of an entry with the pod's name, and makes it a candidate if it may be the pod's. Otherwise it returns
// a problem.
func (s *search) checkSandbox(entry cnicache.Entry) string {
	byProcess := strings.HasPrefix(entry.NetNS, "/proc/")
	switch {
	case entry.UID != "" && entry.UID != s.pod.UID:
		return fmt.Sprintf("one of UID %q", entry.UID)
	case entry.NetNS == "":
		return "one without a namespace"
	case entry.UID == "" && len(s.pod.Addresses) == 0:
		return "one without the pod's UID"
	case byProcess && len(s.pod.Addresses) == 0:
		return entry.NetNS + ": another process may have the number by now"
	}
	paths := s.view.Candidates(entry.NetNS)
	if byProcess {
		if other := podOfProcess(strings.TrimSuffix(paths[0], "/ns/net")); other != "" && other != s.self && other != s.pod.UID {
			return fmt.Sprintf("%s: the process is of the pod with UID %s", entry.NetNS, other)
		}
	}
	sp, path, err := openFirst(paths, s.open)
	attached, addressed := route.Absent, len(s.pod.Addresses) > 0
	switch {
	case err != nil || sp.host:
	case sp.Namespace == nil:
		err = sp.err
	case addressed:
		err = s.look(sp)
		attached = s.attachment(sp)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return entry.NetNS + ": there is no such namespace any more"
	case err != nil:
		return err.Error()
	case sp.host:
		s.cacheSaysHost = s.cacheSaysHost || entry.UID == s.pod.UID
		return entry.NetNS + ": it is the node's own"
	case addressed && attached == route.Absent:
		s.cacheDenies = s.cacheDenies || entry.UID == s.pod.UID && !byProcess
		return entry.NetNS + ": it does not have the pod's addresses"
	}
	s.add(candidate{sp, FromCache, path, attached})
	return ""
}
