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
	// before is the previous version of the object, nil for a new object.
	data, before []byte
	deleted      bool
}

// watch is one open stream.
type watch struct {
	in selection
	// lines has the lines to send, ended is closed after the last line.
	lines chan []byte
	ended chan struct{}
	// held keeps changes back, in kept.
	held bool
	kept []change
	// abort ends the stream without the proper end of a response.
	abort bool
}

// watchBuffer exceeds the number of lines that a test sends before the stream's goroutine runs.
const watchBuffer = 1024

// publish requires the lock.
func (s *Server) publish(c change) {
	s.history = append(s.history, c)
	for w := range s.watches {
		w.offer(c)
	}
}

// offer sends a change to a watch. An object that no longer matches the selection is sent as deleted.
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

// watch streams the changes after the request's resourceVersion.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, in selection) {
	initial := r.URL.Query().Get("sendInitialEvents") == "true"
	if initial && valueOf(s, func() bool { return s.noStreams }) {
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
	contentType, encode := s.encoding(r)
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	for _, line := range first {
		w.Write(encode(line)) //nolint:errcheck,gosec // the client may be gone
	}
	first = nil //nolint:ineffassign,wastedassign // frees memory during a long watch
	control := http.NewResponseController(w)
	for control.Flush() == nil {
		select {
		case line := <-stream.lines:
			w.Write(encode(line)) //nolint:errcheck,gosec // the client may be gone
		case <-stream.ended:
			stream.finish(w, control, encode)
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

// finish sends the remaining lines and ends the stream, properly or with an abort.
func (w *watch) finish(to http.ResponseWriter, control *http.ResponseController, encode func([]byte) []byte) {
	for len(w.lines) > 0 {
		to.Write(encode(<-w.lines)) //nolint:errcheck,gosec // the client may be gone
	}
	if w.abort {
		to.Write([]byte(`{"type":"MODI`)) //nolint:errcheck,gosec // the stream breaks next
		control.Flush()                   //nolint:errcheck,gosec // the same
		panic(http.ErrAbortHandler)
	}
}

// open begins a stream with the changes since a version. If the version has expired, it ends the stream.
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

// initial returns the initial events of a streaming list. The watch continues after them.
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

// bookmark requires the lock.
func (s *Server) bookmark(w *watch, annotations object) []byte {
	return event("BOOKMARK", marshal(object{
		"kind": w.in.in.kind(), "apiVersion": w.in.in.apiVersion(),
		"metadata": object{"resourceVersion": strconv.Itoa(s.version), "annotations": annotations},
	}))
}

// ListsOnly disables streaming lists, as in API servers before Kubernetes 1.34.
func (s *Server) ListsOnly() { s.locked(func() { s.noStreams = true }) }

func (s *Server) forget(stream *watch) { s.locked(func() { delete(s.watches, stream) }) }

// Watches returns the number of open streams.
func (s *Server) Watches() int { return valueOf(s, func() int { return len(s.watches) }) }

// Bookmark sends a bookmark to all watches.
func (s *Server) Bookmark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.lines <- s.bookmark(w, nil)
	}
}

// Send sends an event of any type and object to all watches.
func (s *Server) Send(kind string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.lines <- event(kind, data)
	}
}

// Compact drops the history: a watch from an earlier version gets 410. It does not end open watches.
func (s *Server) Compact() { s.locked(func() { s.history, s.oldest = nil, s.version }) }

// CloseWatches ends all open streams properly, after their remaining lines.
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

// HoldWatches holds back the events of open streams whose path contains part, until [Server.ReleaseWatches].
func (s *Server) HoldWatches(part string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.held = strings.Contains(w.in.in.path(), part)
	}
}

// ReleaseWatches sends the held events.
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
