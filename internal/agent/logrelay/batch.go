package logrelay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// chunk is the size of the pieces in which a body is kept: it grows without being copied.
const chunk = 16 << 10

var (
	errNoBatch  = errors.New("not a JSON array")
	errTooLarge = errors.New("body too large")
	errNoRoom   = errors.New("too much at the same time")
)

// post relays a batch: a JSON array of strings, each of them the text of a record. Whatever can be read as one is
// answered with 200, as the sender can do nothing about records that cannot.
func (s *Server) post(w http.ResponseWriter, r *http.Request) {
	select {
	case s.requests <- struct{}{}:
		defer func() { <-s.requests }()
	default: // connections that lost their place, and whose requests wait for a log that hangs
		s.refuse(w, errNoRoom)
		return
	}
	body, free, err := s.read(r.Body)
	defer free()
	if err == nil {
		err = s.relayBatch(context.WithoutCancel(r.Context()), &body) // a client that went away still has its say
	}
	if err != nil {
		s.refuse(w, err)
	}
}

// refuse answers a request from which nothing was relayed. Nobody knows how many records it had; it counts as one.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	code := http.StatusBadRequest
	switch {
	case errors.Is(err, errTooLarge):
		code = http.StatusRequestEntityTooLarge
	case errors.Is(err, errNoRoom):
		code = http.StatusServiceUnavailable
	}
	if code == http.StatusServiceUnavailable {
		s.losses.dropped(1)
	} else {
		s.losses.rejected(1)
	}
	http.Error(w, http.StatusText(code), code)
}

// budget is a number of bytes that all requests share.
type budget struct{ left atomic.Int64 }

func (b *budget) take(n int64) bool {
	if b.left.Add(-n) < 0 {
		b.left.Add(n)
		return false
	}
	return true
}

// read reads a body within the limits. The caller frees it, whatever the error.
func (s *Server) read(r io.Reader) (body net.Buffers, free func(), err error) {
	size, taken := 0, int64(0)
	free = func() { s.shared.left.Add(taken) }
	for {
		if size >= s.limits.allowance {
			if !s.shared.take(chunk) {
				return nil, free, errNoRoom
			}
			taken += chunk
		}
		piece := make([]byte, chunk)
		n, err := io.ReadFull(r, piece)
		body, size = append(body, piece[:n]), size+n
		switch {
		case size > s.limits.body:
			return nil, free, errTooLarge
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // a body cut short is no JSON
			return body, free, nil
		case err != nil:
			return nil, free, fmt.Errorf("reading batch: %w", err)
		}
	}
}

// relayBatch decodes a batch and logs its records, one batch at a time.
func (s *Server) relayBatch(ctx context.Context, body io.Reader) error {
	s.relaying.Lock()
	defer s.relaying.Unlock()
	b, err := decode(body, s.limits)
	if err != nil {
		return err
	}
	now := s.options.Now()
	relayed, dropped, rejected := 0, b.over, b.bad
	for _, line := range b.lines {
		switch s.relay(ctx, line, now) {
		case relayedRecord:
			relayed++
		case droppedRecord:
			dropped++
		case rejectedRecord:
			rejected++
		case unwantedRecord:
		}
	}
	s.losses.relayed(relayed)
	s.losses.dropped(dropped)
	s.losses.rejected(rejected)
	return nil
}

// batch is the records of a request, how many of its elements cannot be one, and whether there were too many: those are
// not even counted, which would cost as much as reading them.
type batch struct {
	lines     []string
	over, bad int
}

// decode reads a batch before any of it is used, up to the number of elements that one may have. A null is an empty one,
// as it is for the reference.
func decode(r io.Reader, l limits) (batch, error) {
	dec := json.NewDecoder(r)
	var b batch
	switch start, err := dec.Token(); {
	case err != nil:
		return batch{}, fmt.Errorf("reading batch: %w", err)
	case start == nil:
		return b, atEnd(dec)
	case start != json.Delim('['):
		return batch{}, errNoBatch
	}
	for seen := 0; dec.More(); seen++ {
		if seen == l.batch {
			b.over++
			return b, nil
		}
		var line string
		err := dec.Decode(&line)
		notText := (*json.UnmarshalTypeError)(nil)
		switch {
		case errors.As(err, &notText) || err == nil && len(line) > l.record:
			b.bad++
		case err != nil:
			return batch{}, fmt.Errorf("reading batch: %w", err)
		default:
			b.lines = append(b.lines, line)
		}
	}
	if _, err := dec.Token(); err != nil {
		return batch{}, fmt.Errorf("reading batch: %w", err)
	}
	return b, atEnd(dec)
}

// atEnd makes sure that nothing follows.
func atEnd(dec *json.Decoder) error {
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errNoBatch
	}
	return nil
}

// fate is what became of a record.
type fate uint8

// An unwanted record is below the level.
const (
	relayedRecord fate = iota
	droppedRecord
	rejectedRecord
	unwantedRecord
)
