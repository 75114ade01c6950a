package ztunnels

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/zdsock"
)

const (
	// timeout bounds ztunnel's first message and each of its answers.
	timeout = 5 * time.Second
	// maxText bounds ztunnel's text about a pod.
	maxText = 500
)

// conn is a connected ztunnel. The server's lock protects it.
type conn struct {
	*zdsock.Conn

	hello    bool
	complete bool             // the end of the snapshot has been sent
	has      map[string]*held // by UID: the pods whose last request was not a Del
	urgent   []string         // UIDs that have changed, each once
	backlog  []string         // UIDs to go through, for the snapshot or because this one has become the newest
	underway *zds.Request     // nil if ztunnel owes no answer
	timer    clock.Timer      // for the awaited message
	waits    uint64           // number of the awaited message
	ended    error            // why it was closed
}

// held is a pod that a ztunnel may have.
type held struct {
	sent  bool        // false if the request could not be sent
	inode netns.Inode // of the last Add, zero after a Keep
	acked bool
	err   error
}

// next takes the next UID to look at. Changes go first: a new pod does not wait for a long snapshot.
func (c *conn) next() (uid string, ok bool) {
	switch {
	case len(c.urgent) > 0:
		uid, c.urgent = c.urgent[0], c.urgent[1:]
	case len(c.backlog) > 0:
		uid, c.backlog = c.backlog[0], c.backlog[1:]
	default:
		return "", false
	}
	return uid, true
}

// hurry looks at a pod next. It needs the lock.
func (s *Server) hurry(c *conn, uid string) {
	if !slices.Contains(c.urgent, uid) {
		c.urgent = append(c.urgent, uid)
	}
	s.advance(c)
}

// advance sends the next request unless an answer is awaited. It needs the lock.
func (s *Server) advance(c *conn) {
	for c.hello && c.ended == nil && c.underway == nil {
		uid, more := c.next()
		if !more && c.complete {
			return
		}
		r, descriptor, needed := zds.Request{Kind: zds.SnapshotSent}, zdsock.NoDescriptor, true
		if more {
			r, descriptor, needed = s.request(c, uid)
		}
		if needed {
			s.send(c, r, descriptor)
		}
	}
}

// send sends a request. It needs the lock, so that the descriptor stays open meanwhile.
func (s *Server) send(c *conn, r zds.Request, descriptor int) {
	packet, err := r.Encode()
	if err == nil && r.Kind == zds.Add && descriptor < 0 {
		err = errors.New("its network namespace is closed")
	}
	if r.Kind == zds.SnapshotSent {
		c.complete = true
	} else {
		c.record(r, s.members[r.UID], err)
	}
	if err != nil {
		s.note(r.UID)
		return
	}
	if err = c.Send(packet, descriptor); err != nil {
		s.drop(c, fmt.Errorf("sending %q: %w", r.Kind, err))
		return
	}
	c.underway = &r
	s.await(c)
}

// record records that an Add or Keep was sent, or that err prevented it.
func (c *conn) record(r zds.Request, m *member, err error) {
	h := c.has[r.UID]
	if h == nil {
		h = &held{}
		c.has[r.UID] = h
	}
	*h = held{sent: h.sent || err == nil, err: err}
	if r.Kind == zds.Add {
		h.inode = m.inode()
	}
}

// received handles a packet of ztunnel. The error is the end of the connection; refusal is ztunnel's text about the pod in uid. It
// needs the lock.
func (s *Server) received(c *conn, packet []byte) (uid, refusal string, err error) {
	if !c.hello {
		err = zds.CheckHello(packet)
		if err == nil {
			c.hello = true
			s.greeted(c)
		}
		return "", "", err
	}
	r := c.underway
	if r == nil {
		return "", "", errors.New("it sent a message without a request")
	}
	text, err := zds.DecodeAck(packet)
	if err != nil {
		return "", "", err
	}
	text = printable.Text(text, maxText)
	s.unawait(c)
	c.underway = nil
	switch h := c.has[r.UID]; {
	case text != "" && r.Kind != zds.Add:
		return "", "", fmt.Errorf("it refuses %q of pod %q: %s", r.Kind, r.UID, text)
	case text != "":
		h.err = errors.New(text)
	case r.Kind == zds.Add:
		h.acked = true
	case r.Kind == zds.Del:
		delete(c.has, r.UID)
	}
	if r.Kind != zds.SnapshotSent {
		s.note(r.UID)
	}
	s.advance(c)
	return r.UID, text, nil
}

// greeted begins the snapshot of a ztunnel that has said hello. It needs the lock.
func (s *Server) greeted(c *conn) {
	s.unawait(c)
	c.backlog = s.byAge()
	s.note(c.backlog...)
	s.advance(c)
}

// await closes a connection whose next message does not come in time: a later answer would look like the answer to the next request.
// It needs the lock.
func (s *Server) await(c *conn) {
	number := c.waits
	c.timer = s.o.Clock.AfterFunc(timeout, func() {
		go func() { // a fake clock calls with its lock held
			s.mu.Lock()
			defer s.mu.Unlock()
			if c.waits == number {
				s.drop(c, fmt.Errorf("it says nothing for %v", timeout))
			}
		}()
	})
}

// unawait is called with the awaited message. It needs the lock.
func (s *Server) unawait(c *conn) {
	c.waits++
	c.timer.Stop()
}

// drop closes a connection. If it was the newest, the next ztunnel gets the pods that it lacks. It needs the lock.
func (s *Server) drop(c *conn, why error) {
	if c.ended != nil {
		return
	}
	newest := s.newest()
	c.ended = why
	s.unawait(c)
	_ = c.Close() // closed even with an error
	s.conns = slices.DeleteFunc(s.conns, func(other *conn) bool { return other == c })
	s.note(slices.Collect(maps.Keys(c.has))...)
	if c != newest {
		return
	}
	all := s.byAge()
	s.note(all...)
	if next := s.newest(); next != nil {
		next.backlog = all
		s.advance(next)
	}
}
