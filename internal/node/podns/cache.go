package podns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/cnicache"
)

// cacheDir is libcni's cache as it is seen here.
func (s *search) cacheDir() string {
	if seen := s.view.Existing(s.places.Cache); len(seen) > 0 {
		return seen[0]
	}
	return s.places.Cache // so that the error names it
}

// cache goes through libcni's cache. Nothing that is wrong with it ends the search.
func (s *search) cache(ctx context.Context) error {
	if s.places.Cache == "" {
		return nil
	}
	look := Look{Source: FromCache, Place: s.cacheDir()}
	files, err := cnicache.Walk(look.Place, func(name string, data []byte, err error) error {
		s.entry(name, data, err, &look)
		return ctx.Err()
	})
	if look.Entries = files; err != nil {
		look.Err = err
	}
	s.looked = append(s.looked, look)
	return ctx.Err()
}

// entry looks at one entry of the cache.
func (s *search) entry(name string, data []byte, err error, look *Look) {
	switch {
	case err != nil:
		look.fail(err)
		return
	case !bytes.Contains(data, []byte(s.pod.Name)): // which saves reading the entries of all the other pods
		return
	}
	box, ok := cnicache.Parse(data)
	switch {
	case !ok:
		look.fail(fmt.Errorf("entry %q cannot be read", name))
		return
	case box.Kind != cnicache.Kind || box.Namespace != s.pod.Namespace || box.Name != s.pod.Name:
		return
	}
	look.Of++
	if why := s.sandbox(box); why != "" {
		look.Notes = append(look.Notes, why)
	}
}

// sandbox looks at the namespace of an entry that has the pod's name. It says what is wrong with it.
func (s *search) sandbox(box cnicache.Entry) string {
	named := strings.HasPrefix(box.NetNS, "/proc/")
	switch {
	case box.UID != "" && box.UID != s.pod.UID:
		return fmt.Sprintf("one of UID %q", box.UID)
	case box.NetNS == "":
		return "one without a namespace"
	case box.UID == "" && len(s.pod.Addresses) == 0:
		return "one without the pod's UID"
	case named && len(s.pod.Addresses) == 0:
		return box.NetNS + ": another process may have the number by now"
	}
	paths := s.view.Candidates(box.NetNS)
	if named {
		if other := podOfProcess(strings.TrimSuffix(paths[0], "/ns/net")); other != "" && other != s.self && other != s.pod.UID {
			return fmt.Sprintf("%s: the process is of the pod with UID %s", box.NetNS, other)
		}
	}
	judged, err := s.firstOf(paths, FromCache)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return box.NetNS + ": there is no such namespace any more"
	case err != nil:
		return err.Error()
	case judged == ofHost:
		s.hostSaid = s.hostSaid || box.UID == s.pod.UID
	case judged == matching || judged == unchecked:
		return ""
	case judged == unlike && box.UID == s.pod.UID && !named:
		s.denied = true
	}
	return fmt.Sprintf("%s: %s", box.NetNS, judged)
}

// firstOf looks at the first of the paths that leads to a namespace. The error is that of a path at which there is
// something, if there is any.
func (s *search) firstOf(paths []string, from Source) (verdict, error) {
	var failed error
	for _, path := range paths {
		judged, err := s.consider(path, from)
		if err == nil {
			return judged, nil
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = err
		}
	}
	return unusable, failed
}
