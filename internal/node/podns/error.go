package podns

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// The causes of an [Error].
var (
	// ErrNotFound is a pod that no place knows: it may have ended, or not have begun.
	ErrNotFound = errors.New("no network namespace of it is found")
	// ErrAmbiguous is a pod whose addresses several namespaces have.
	ErrAmbiguous = errors.New("several network namespaces could be its own")
	// ErrLoopback is a namespace that has the pod's addresses where anyone may put them.
	ErrLoopback = errors.New("the only network namespace with its addresses has them on loopback, or on an interface that is down")
	// ErrClaimed is a namespace that has the pod's addresses and is another pod's, as far as is known. The API server tells
	// the addresses of a sandbox for some time after its end, above all after a restart of the node, when others are given
	// the same ones; and whoever is root in a pod can add them.
	ErrClaimed = errors.New("the network namespace with its addresses may be another pod's")
	// ErrHost is a pod that is on the node's own network, by what libcni's cache or its addresses say.
	ErrHost = errors.New("it is on the node's own network")
	// ErrNoHost says that the node's namespace is not known. Without it nothing is looked for: what is found could be it.
	ErrNoHost = errors.New("the node's network namespace cannot be told from a pod's")
)

// Error is a search that gave nothing. Its text is one line.
type Error struct {
	Pod Pod
	// Looked is what was looked at, in order.
	Looked []Look
	// Inodes are those that could be meant, of ErrAmbiguous.
	Inodes []netns.Inode
	// Err has one of the causes above.
	Err error
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Error names the pod, the cause and what was looked at.
func (e *Error) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "looking for the network namespace of pod %s/%s (UID %q, addresses %s): %v",
		e.Pod.Namespace, e.Pod.Name, e.Pod.UID, listed(e.Pod.Addresses), e.Err)
	for i, look := range e.Looked {
		text.WriteString(separator(i, "; looked at ", ", ") + look.String())
	}
	return text.String()
}

func separator(i int, first, later string) string {
	if i == 0 {
		return first
	}
	return later
}

func listed(addresses []netip.Addr) string {
	if len(addresses) == 0 {
		return "none"
	}
	texts := make([]string, len(addresses))
	for i, a := range addresses {
		texts[i] = a.String()
	}
	return strings.Join(texts, " ")
}

// Look is what one place had.
type Look struct {
	Source Source
	Place  string
	// Entries is how many there were, Of how many of them are about the pod by name (of the cache alone), Failed how many of
	// those that mattered could not be read or looked into.
	Entries, Of, Failed int
	// Notes say what was wrong with entries about the pod. Err is why the place gave nothing, or the first failure.
	Notes []string
	Err   error
}

// String is one phrase: the place, the number of entries, and what was wrong.
func (l Look) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s %s: %d entr%s", l.Source, l.Place, l.Entries, map[bool]string{true: "y", false: "ies"}[l.Entries == 1])
	if l.Source == FromCache {
		fmt.Fprintf(&text, ", %d of the pod", l.Of)
	}
	if l.Failed > 0 {
		fmt.Fprintf(&text, ", %d not readable", l.Failed)
	}
	for i, note := range l.Notes {
		text.WriteString(separator(i, " (", "; ") + note)
	}
	if len(l.Notes) > 0 {
		text.WriteString(")")
	}
	if l.Err != nil {
		fmt.Fprintf(&text, " (%v)", l.Err)
	}
	return text.String()
}

func (l *Look) fail(err error) {
	l.Failed++
	if l.Err == nil {
		l.Err = err
	}
}

func (s *search) failed(err error) *Error { return &Error{Pod: s.pod, Looked: s.looked, Err: err} }
