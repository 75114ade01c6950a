package ztunnels

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/node/zdsock"
)

// maxConnections bounds the open connections. Connections that never say hello do not reach it: they end with the timeout.
const maxConnections = 32

// logEach is the least time between two records about connections that were not accepted.
const logEach = 30 * time.Second

// Serve accepts ztunnels until ctx ends, and closes their connections then. All pods that a ztunnel may serve already must have been
// Put or kept before, because a ztunnel ends what its first snapshot does not name.
func (s *Server) Serve(ctx context.Context) {
	defer s.work.Wait()
	defer s.end() // a deadline ends the loop early
	defer context.AfterFunc(ctx, s.end)()
	s.work.Go(func() { s.notify(ctx) })
	limit := rate.NewLimiter(rate.Every(s.o.AcceptInterval), 1)
	for limit.Wait(ctx) == nil {
		s.mu.Lock()
		listener := s.listener
		s.mu.Unlock()
		accepted, err := listener.Accept()
		switch {
		case err == nil:
			s.begin(accepted)
		case !zdsock.Closed(err):
			s.refused.Do(func() {
				s.o.Log.WarnContext(ctx, "a connection of ztunnel was not accepted", "path", s.o.Path, "error", err.Error())
			})
		}
	}
}

// end closes everything for good.
func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return // a later file with the same identity belongs to another process
	}
	s.ended = true
	s.listener.Remove()
	for len(s.conns) > 0 {
		s.drop(s.conns[0], context.Canceled)
	}
}

// Rebind binds the socket again if its file is missing or replaced. Connections stay. On an error nothing has changed. One goroutine
// calls it.
func (s *Server) Rebind(ctx context.Context) error {
	s.mu.Lock()
	unneeded := s.ended || s.listener.InPlace()
	s.mu.Unlock()
	if unneeded {
		return nil
	}
	fresh, err := zdsock.Listen(ctx, s.o.Path) // may wait for another process
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		fresh.Remove()
		return nil
	}
	_ = s.listener.Close() // no ztunnel can reach it
	s.listener = fresh
	return nil
}

// begin talks to a new ztunnel.
func (s *Server) begin(accepted *zdsock.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		_ = accepted.Close()
		return
	}
	if len(s.conns) == maxConnections {
		s.drop(s.conns[0], errors.New("there are too many connections"))
	}
	c := &conn{Conn: accepted, has: map[string]*held{}}
	s.conns = append(s.conns, c)
	s.await(c)
	s.work.Go(func() { s.serve(c) })
}

// serve reads a connection until it is closed, so that its end is seen at any time.
func (s *Server) serve(c *conn) {
	var buffer [zdsock.MaxPacket]byte
	for {
		packet, descriptor, err := c.Receive(&buffer)
		if descriptor != zdsock.NoDescriptor {
			zdsock.CloseDescriptor(descriptor)
			err = errors.New("it sends a descriptor")
		}
		uid, refusal, ended := s.handle(c, packet, err)
		switch {
		case errors.Is(ended, io.EOF):
			s.o.Log.Info("a ztunnel has disconnected", slog.String("path", s.o.Path))
		case errors.Is(ended, context.Canceled): // the agent ends
		case ended != nil:
			s.o.Log.Warn("the connection of a ztunnel was closed", slog.String("path", s.o.Path), slog.String("error", ended.Error()))
		case refusal != "":
			s.o.Log.Warn("ztunnel does not serve a pod yet", slog.String("uid", uid), slog.String("error", refusal))
		}
		if ended != nil {
			return
		}
	}
}

// handle handles what was received, and returns why the connection has ended, if it has.
func (s *Server) handle(c *conn, packet []byte, err error) (uid, refusal string, ended error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && c.ended == nil {
		uid, refusal, err = s.received(c, packet)
	}
	if err != nil {
		s.drop(c, err)
	}
	return uid, refusal, c.ended
}

// note remembers for notify what may have changed. It needs the lock.
func (s *Server) note(uids ...string) {
	for _, uid := range uids {
		s.changed[uid] = true
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// notify calls the functions of the options.
func (s *Server) notify(ctx context.Context) {
	connected := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		s.mu.Lock()
		uids, before := s.changed, connected
		s.changed, connected = map[string]bool{}, s.connected()
		s.mu.Unlock()
		if connected != before {
			s.o.Log.InfoContext(ctx, "the number of connected ztunnels has changed", "connected", connected)
			s.o.Connected(connected)
		}
		for uid := range uids {
			s.o.Changed(uid)
		}
	}
}

// connected returns the number of ztunnels that have said hello. It needs the lock.
func (s *Server) connected() (n int) {
	for _, c := range s.conns {
		if c.hello {
			n++
		}
	}
	return n
}
