package kubetest

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// change is one step of the history.
type change struct {
	version int
	at      place
	// before is the object as it was, nil when it is new.
	data, before []byte
	deleted      bool
}

// watch is one open stream.
type watch struct {
	in selection
	// lines are what is still to be sent, ended is closed when there will be no more of them.
	lines chan []byte
	ended chan struct{}
	// held keeps changes back, in kept.
	held bool
	kept []change
	// abort ends it without the proper end of an answer.
	abort bool
}

// watchBuffer is more than a test sends before the stream's goroutine comes to run.
const watchBuffer = 1024

// publish needs the lock.
func (s *Server) publish(c change) {
	s.history = append(s.history, c)
	for w := range s.watches {
		w.offer(c)
	}
}

// offer tells a change as it looks from within the selection: an object that ceases to be picked is deleted there.
func (w *watch) offer(c change) {
	if w.held {
		w.kept = append(w.kept, c)
		return
	}
	was, is := c.before != nil && w.in.picks(c.at, c.before), !c.deleted && w.in.picks(c.at, c.data)
	switch {
	case was && is:
		w.lines <- event("MODIFIED", c.data)
	case is:
		w.lines <- event("ADDED", c.data)
	case was:
		w.lines <- event("DELETED", c.data)
	}
}

func event(kind string, data []byte) []byte {
	return append(marshal(object{"type": kind, "object": json.RawMessage(data)}), '\n')
}

// watch streams what happens after the request's resourceVersion.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, in selection) {
	initial := r.URL.Query().Get("sendInitialEvents") == "true"
	s.mu.Lock()
	listsOnly := s.noStreams
	s.mu.Unlock()
	if initial && listsOnly {
		refuse(w, invalid("sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"))
		return
	}
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil && !initial {
		refuse(w, apierrors.NewBadRequest("resourceVersion: Invalid value"))
		return
	}
	seconds, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	if err != nil {
		seconds = 1800
	}
	over := time.NewTimer(time.Duration(seconds) * time.Second)
	defer over.Stop()
	stream := &watch{in: in, lines: make(chan []byte, watchBuffer), ended: make(chan struct{})}
	var first [][]byte
	if initial {
		first = s.initial(stream)
	} else {
		s.open(stream, from)
	}
	defer s.forget(stream)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	for _, line := range first {
		w.Write(line) //nolint:errcheck,gosec // the client may be gone
	}
	first = nil //nolint:ineffassign,wastedassign // a watch may last long
	control := http.NewResponseController(w)
	for control.Flush() == nil {
		select {
		case line := <-stream.lines:
			w.Write(line) //nolint:errcheck,gosec // the client may be gone
		case <-stream.ended:
			stream.finish(w, control)
			return
		case <-over.C:
			return
		case <-r.Context().Done():
			return
		case <-s.done:
			return
		}
	}
}

// finish sends what there still is and ends the stream as was asked for.
func (w *watch) finish(to http.ResponseWriter, control *http.ResponseController) {
	for len(w.lines) > 0 {
		to.Write(<-w.lines) //nolint:errcheck,gosec // the client may be gone
	}
	if w.abort {
		to.Write([]byte(`{"type":"MODI`)) //nolint:errcheck,gosec // it is about to break anyway
		control.Flush()                   //nolint:errcheck,gosec // the same
		panic(http.ErrAbortHandler)
	}
}

// open begins a stream with what happened meanwhile, or with its end when that is no longer known.
func (s *Server) open(stream *watch, from int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from < s.oldest {
		stream.lines <- event("ERROR", marshal(statusOf(apierrors.NewResourceExpired("too old resource version: "+strconv.Itoa(from)).ErrStatus)))
		close(stream.ended)
		return
	}
	for _, c := range s.history {
		if c.version > from {
			stream.offer(c)
		}
	}
	s.watches[stream] = struct{}{}
}

// initial is a list as a watch has it, which begins with what there is and goes on from there.
func (s *Server) initial(stream *watch) [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lines [][]byte
	for _, data := range s.picked(stream.in) {
		lines = append(lines, event("ADDED", data))
	}
	s.watches[stream] = struct{}{}
	return append(lines, s.bookmark(stream, object{"k8s.io/initial-events-end": "true"}))
}

// bookmark needs the lock.
func (s *Server) bookmark(w *watch, annotations object) []byte {
	return event("BOOKMARK", marshal(object{
		"kind": w.in.in.kind(), "apiVersion": "v1",
		"metadata": object{"resourceVersion": strconv.Itoa(s.version), "annotations": annotations},
	}))
}

// ListsOnly makes the server one that knows no streaming lists, as those before Kubernetes 1.34.
func (s *Server) ListsOnly() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noStreams = true
}

func (s *Server) forget(stream *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watches, stream)
}

// Watches counts the streams that are open.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.watches)
}

// Bookmark tells all watches where they are.
func (s *Server) Bookmark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.lines <- s.bookmark(w, nil)
	}
}

// Tell puts an event of whatever type and object into all watches.
func (s *Server) Tell(kind string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.lines <- event(kind, data)
	}
}

// Compact forgets the history: a watch from before now is told 410. It does not end those that are open.
func (s *Server) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history, s.oldest = nil, s.version
}

// CloseWatches ends all open streams properly, after what they have still to send.
func (s *Server) CloseWatches() { s.endWatches(false) }

// BreakWatches ends all open streams in the middle of an event.
func (s *Server) BreakWatches() { s.endWatches(true) }

func (s *Server) endWatches(abort bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.abort = abort
		close(w.ended)
		delete(s.watches, w)
	}
}

// HoldWatches keeps events from the streams that are open and have a part in their path, until [Server.ReleaseWatches].
func (s *Server) HoldWatches(part string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.held = strings.Contains(w.in.in.path(), part)
	}
}

// ReleaseWatches sends what was held.
func (s *Server) ReleaseWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.held = false
		for _, c := range w.kept {
			w.offer(c)
		}
		w.kept = nil
	}
}
