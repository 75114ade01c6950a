package sandbox

import (
	"errors"
	"fmt"
	"strings"
)

// The causes of an [Error].
var (
	// ErrNotFound means that no place has the pod's namespace: the pod may have ended, or not have started.
	ErrNotFound = errors.New("its network namespace was not found")
	// ErrAmbiguous means that several namespaces have the pod's addresses.
	ErrAmbiguous = errors.New("several network namespaces could be its own")
	// ErrLoopback means that the only namespace with the pod's addresses lacks some, or has them where any tenant may put them.
	ErrLoopback = errors.New("the only network namespace with its addresses lacks some, or has them on loopback, or on an interface that is down")
	// ErrClaimed means that a record assigns the namespace with the pod's addresses to another pod. The API server shows the
	// addresses of a sandbox for some time after its end, above all after a restart of the node, when other pods get the same
	// addresses. Root in a pod can also add them.
	ErrClaimed = errors.New("the network namespace with its addresses may be another pod's")
	// ErrHost means that the pod is on the node's own network, according to libcni's cache or the addresses.
	ErrHost = errors.New("it is on the node's own network")
	// ErrNoHost means that the node's own namespace is unknown. Then no search runs because it could return that namespace.
	ErrNoHost = errors.New("the node's network namespace cannot be distinguished from a pod's")
)

// Error is the result of a search without a namespace. Its text is one line.
type Error struct {
	Pod Pod
	// Searched has the places, in order.
	Searched []Searched
	// Err has one of the causes above.
	Err error
}

func (s *search) failed(err error) *Error { return &Error{Pod: s.pod, Searched: s.searched, Err: err} }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Error names the pod, the cause and the places.
func (e *Error) Error() string {
	text := fmt.Sprintf("looking for the network namespace of pod %s/%s (UID %q, addresses %v): %v",
		e.Pod.Namespace, e.Pod.Name, e.Pod.UID, e.Pod.Addresses, e.Err)
	if len(e.Searched) == 0 {
		return text
	}
	places := make([]string, len(e.Searched))
	for i, place := range e.Searched {
		places[i] = place.String()
	}
	return text + "; looked at " + strings.Join(places, ", ")
}

// Searched is the result of searching one place.
type Searched struct {
	Source Source
	Place  string
	// Entries is the number of entries, Failed the number of relevant entries that could not be read or entered.
	Entries, Failed int
	// Notes are problems of entries about the pod. Err is the reason for not searching the place, or the first failure.
	Notes []string
	Err   error
}

// String is one phrase: the place, the number of entries, and the problems.
func (s Searched) String() string {
	text := fmt.Sprintf("%s %s: entries %d", s.Source, s.Place, s.Entries)
	if s.Failed > 0 {
		text += fmt.Sprintf(", %d not readable", s.Failed)
	}
	if len(s.Notes) > 0 {
		text += " (" + strings.Join(s.Notes, "; ") + ")"
	}
	if s.Err != nil {
		text += fmt.Sprintf(" (%v)", s.Err)
	}
	return text
}

func (s *Searched) fail(err error) {
	s.Failed++
	if s.Err == nil {
		s.Err = err
	}
}
