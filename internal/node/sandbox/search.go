package sandbox

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// search is the search for one pod.
type search struct {
	*sweep

	pod Pod
	// foreign has candidates that libcni's cache assigns to other pods, with the record.
	foreign map[*space]string

	searched      []Searched
	candidates    []candidate
	cacheSaysHost bool   // the cache assigns the node's namespace to the pod
	cacheDenies   bool   // the cache assigns a namespace without the pod's addresses to the pod's UID
	claim         string // the record that assigns the last candidate to another pod

	result Result
	done   bool
}

// candidate is a namespace that may be the pod's.
type candidate struct {
	*space

	source   Source
	path     string
	attached route.Attachment // the worst attachment of the pod's addresses
}

func (c candidate) String() string { return fmt.Sprintf("%s (%s)", c.Inode(), c.path) }

// decide ends the search if its result is known, or if this stage was the last one.
func (s *search) decide(last bool) bool {
	best := s.oldest(s.best())
	switch fits := len(best) > 0 && s.eligible(best[0]); {
	case fits && len(best) == 1:
		s.result = s.found(best[0])
	case fits, s.cacheDenies, last: // with several, or if the cache denies it, the namespace with the addresses is not the pod's
		s.result = Result{Err: s.fail(best)}
	default:
		return false
	}
	s.done = true
	return true
}

func (s *search) found(c candidate) Result {
	n, err := c.Duplicate()
	if err != nil {
		return Result{Err: s.failed(err)}
	}
	inhabited := s.owns(c) || slices.ContainsFunc(s.inhabited, func(in inhabited) bool { return in.inode == c.Inode() })
	return Result{Namespace: &Namespace{n, c.source, inhabited, lasting(c.path)}}
}

// lasting returns path, or "" for a path below a process.
func lasting(path string) string {
	if strings.Contains(path, "/ns/net") {
		return ""
	}
	return path
}

// best returns the candidates that a record assigns to the pod, or all candidates without such a record, and of these only
// those with the best attachment.
func (s *search) best() []candidate {
	rank := func(c candidate) route.Attachment {
		if s.owns(c) {
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

// oldest returns, of several namespaces with processes of the pod, the one of the process that began first, as Istio's agent does: it
// is the sandbox, and a container can make others. It returns all if one has no such process.
func (s *search) oldest(all []candidate) []candidate {
	if len(all) < 2 {
		return all
	}
	first, earliest := all, uint64(math.MaxUint64)
	for i, c := range all {
		began, known := uint64(0), false
		for _, o := range s.owners[c.Inode()] {
			if o.uid == s.pod.UID {
				began, known = s.began(o.process)
			}
		}
		switch {
		case !known || began == earliest:
			return all
		case began < earliest:
			first, earliest = all[i:i+1], began
		}
	}
	return first
}

// eligible reports whether the best candidate may be the pod's.
func (s *search) eligible(c candidate) bool { return s.owns(c) || c.attached > route.OnLoopback }

// drop removes candidates, and closes those that no other search has.
func (s *search) drop(which func(candidate) bool) {
	s.candidates = slices.DeleteFunc(s.candidates, func(c candidate) bool {
		if !which(c) {
			return false
		}
		if c.refs--; c.refs == 0 {
			c.release()
		}
		return true
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

// hostHas reports whether the node has the pod's addresses: then the pod is on the node's network.
func (s *search) hostHas() bool {
	if len(s.pod.Addresses) == 0 || s.look(s.host) != nil {
		return false
	}
	return s.attachment(s.host) != route.Absent
}

// attachment returns the worst attachment of the pod's addresses in a namespace: Absent if all are missing, and OnLoopback if some
// are. Then, as on loopback, only a record makes the namespace the pod's: a second address can be one that the pod never gets.
func (s *search) attachment(sp *space) route.Attachment {
	worst, best := route.Outside, route.Absent
	for _, address := range s.pod.Addresses {
		worst, best = min(worst, sp.has[address]), max(best, sp.has[address])
	}
	if best != route.Absent {
		return max(worst, route.OnLoopback)
	}
	return worst
}

// consider makes a namespace a candidate if it has the pod's addresses and no known record assigns it to another pod alone.
func (s *search) consider(sp *space, path string, from Source) {
	attached := s.attachment(sp)
	if c := (candidate{sp, from, path, attached}); !s.done && attached != route.Absent && (s.record(sp) == "" || s.owns(c)) {
		s.add(c)
	}
}

// maxOpen bounds the open candidates from processes: a tenant can create many. The search keeps the candidates with the best
// attachment, and the candidates that a record assigns to the pod.
const maxOpen = 16

// add adds a candidate once, with the source that is searched first.
func (s *search) add(added candidate) {
	if s.candidate(added.space) {
		return
	}
	added.refs++
	s.candidates = append(s.candidates, added)
	many := slices.DeleteFunc(slices.Clone(s.candidates), func(c candidate) bool { return c.source != FromProc || s.owns(c) })
	if len(many) > maxOpen {
		worst := slices.MinFunc(many, func(a, b candidate) int { return int(a.attached) - int(b.attached) })
		s.drop(func(c candidate) bool { return c == worst })
	}
}

// candidate reports whether a namespace is a candidate.
func (s *search) candidate(sp *space) bool {
	return slices.ContainsFunc(s.candidates, func(c candidate) bool { return c.space == sp })
}
