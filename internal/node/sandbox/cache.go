package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
)

// searchSandbox searches only the entries of the reported sandbox and checks them like any entry. If they do not lead to the pod's
// namespace, the search continues as without a report.
func (s *search) searchSandbox(ctx context.Context) error {
	err := s.searchEntries(ctx, func(name string) bool { return cnicache.Of(name, s.pod.Sandbox) })
	s.searched, s.cacheDenies = nil, false // the next stage reads these entries again, and newer ones
	return err
}

// searchCache searches libcni's cache for the pod's name. A failure does not end the search.
func (s *search) searchCache(ctx context.Context) error { return s.searchEntries(ctx, nil) }

func (s *search) searchEntries(ctx context.Context, which func(name string) bool) error {
	if s.places.Cache == "" {
		return nil
	}
	place := Searched{Source: FromCache, Place: s.view.Existing(s.places.Cache)[0]}
	files, err := cnicache.Walk(place.Place, which, func(name string, data []byte, err error) error {
		switch {
		case err != nil:
			place.fail(err)
		case bytes.Contains(data, []byte(s.pod.Name)): // saves parsing the entries of all other pods
			s.checkEntry(name, data, &place)
		}
		return ctx.Err()
	})
	if place.Entries = files; err != nil {
		place.Err = err
	}
	s.searched = append(s.searched, place)
	return ctx.Err()
}

// checkEntry checks the namespace of an entry if it is about the pod.
func (s *search) checkEntry(name string, data []byte, place *Searched) {
	entry, ok := cnicache.Parse(data)
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

// checkSandbox checks the namespace of an entry with the pod's name. It returns a problem, or "" if the entry may be the pod's.
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
	result, err := s.checkFirst(paths, FromCache)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return entry.NetNS + ": there is no such namespace any more"
	case err != nil:
		return err.Error()
	case result == ofHost:
		s.cacheSaysHost = s.cacheSaysHost || entry.UID == s.pod.UID
	case result == matching:
		return ""
	case result == unlike && entry.UID == s.pod.UID && !byProcess:
		s.cacheDenies = true
	}
	return fmt.Sprintf("%s: %s", entry.NetNS, result)
}

// checkFirst checks the first of the paths that leads to a namespace. If none does, the error is about a path to another kind
// of file, if any.
func (s *search) checkFirst(paths []string, from Source) (verdict, error) {
	var failed error
	for _, path := range paths {
		result, err := s.check(path, from)
		if err == nil {
			return result, nil
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = err
		}
	}
	return unusable, failed
}
