// Package unixsock serves HTTP on a unix socket of the node, to processes of root.
//
// It promises that it never replaces a socket which another process serves, but replaces a socket that a killed agent left;
// that it refuses and logs a peer that is not root by its credentials (SO_PEERCRED), whatever the socket's mode; that the
// number of connections and the time of a request are bounded; and that a socket whose file was removed can be bound again. It
// never removes a file that is not its own, and does not choose the handler.
//
// Start reading at Server. node/socketfile has the socket's file.
package unixsock

import (
	"context"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/socketfile"
)

const (
	// maxHeader bounds the header of a request, in bytes.
	maxHeader = 16 << 10
	// shutdownTimeout bounds running requests when the server ends.
	shutdownTimeout = time.Second
	// logEach is the least time between two records about unauthorized peers.
	logEach = 30 * time.Second
)

// ErrServed is the error of a socket that another process serves.
var ErrServed = socketfile.ErrServed

// Options configure a socket. Log is required.
type Options struct {
	// Path is the path of the socket; 107 bytes at most. A missing directory is created.
	Path string
	// DirMode is the mode of a created directory, Mode the socket's mode.
	DirMode, Mode fs.FileMode
	// Connections bounds the number of connections served at a time. Others wait in the kernel's backlog.
	Connections int
	// Timeout bounds the reading of a whole request, and the writing of its answer.
	Timeout time.Duration
	// KeepAlive allows several requests on a connection.
	KeepAlive bool
	// UnauthorizedPeer, which may be nil, is called for each connection of a user other than root.
	UnauthorizedPeer func()
	Log              *slog.Logger
}

// Server is the serving end of the socket.
type Server struct {
	options      Options
	connections  chan struct{} // one value per served connection
	unauthorized rate.Sometimes

	mu     sync.Mutex
	socket *socketfile.Socket
	http   *http.Server // nil before Serve
	ended  bool
}

func (o Options) bind(ctx context.Context) (*socketfile.Socket, error) {
	return socketfile.Bind(ctx, socketfile.Options{Network: "unix", Path: o.Path, DirMode: o.DirMode, Mode: o.Mode})
}

// Open binds the socket. Clients can connect from then on; Serve, which must follow, answers them. The error is ErrServed for a
// socket that another process serves.
func Open(ctx context.Context, o Options) (*Server, error) {
	opened, err := o.bind(ctx)
	if err != nil {
		return nil, err
	}
	return &Server{
		options: o, connections: make(chan struct{}, o.Connections), unauthorized: rate.Sometimes{Interval: logEach}, socket: opened,
	}, nil
}

// Rebind binds the socket again if its file is missing or replaced. Connections stay. On an error nothing has changed, and the
// caller may retry at any time.
func (s *Server) Rebind(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.socket.InPlace() {
		return nil
	}
	fresh, err := s.options.bind(ctx)
	if err != nil {
		return err
	}
	_ = s.socket.Close() // no client can reach it
	s.socket = fresh
	s.options.Log.InfoContext(ctx, "a socket was gone and is made again", "path", s.options.Path)
	if s.http != nil {
		s.accept()
	}
	return nil
}

// Serve answers until ctx ends. Then it removes the socket if the file is still its own, and returns after running requests or
// shutdownTimeout.
func (s *Server) Serve(ctx context.Context, handler http.Handler) {
	server := &http.Server{
		Handler:        handler,
		ConnState:      func(conn net.Conn, state http.ConnState) { s.connState(ctx, conn, state) },
		ReadTimeout:    s.options.Timeout,
		WriteTimeout:   2 * s.options.Timeout, // includes the reading
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(s.options.Log.With("path", s.options.Path).Handler(), slog.LevelWarn),
	}
	server.SetKeepAlivesEnabled(s.options.KeepAlive)
	s.mu.Lock()
	s.http = server
	s.accept()
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.ended = true // a later file with the same identity belongs to another process
	s.socket.Remove()
	s.mu.Unlock()
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if server.Shutdown(ending) != nil {
		_ = server.Close() // the connections are closed even with an error
	}
}

// accept starts to accept connections of the current socket. It removes a socket whose accept fails, so that Rebind
// binds it again. It needs the lock.
func (s *Server) accept() {
	server, current := s.http, s.socket
	go func() {
		_ = server.Serve(current) // until it is closed
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.socket == current && !s.ended {
			current.Remove()
		}
	}()
}

// connState is the server's hook. The server calls it for a new connection before it accepts the next one.
func (s *Server) connState(ctx context.Context, conn net.Conn, state http.ConnState) {
	if state == http.StateNew {
		select {
		case s.connections <- struct{}{}:
		case <-ctx.Done():
		}
		if !s.authorized(conn) {
			_ = conn.Close()
		}
	}
	if state == http.StateClosed {
		select {
		case <-s.connections:
		default: // the connection came at the end
		}
	}
}

func (s *Server) authorized(conn net.Conn) bool {
	peer, err := agentapi.Peer(conn)
	if err != nil || peer.Uid == 0 {
		return err == nil
	}
	s.unauthorized.Do(func() {
		s.options.Log.Warn("a connection was refused: the socket is for root", "path", s.options.Path, "uid", peer.Uid)
	})
	if s.options.UnauthorizedPeer != nil {
		s.options.UnauthorizedPeer()
	}
	return false
}
