// Package unixsock serves HTTP on a unix socket of the node, to processes of the node that may.
//
// It promises that a socket which somebody serves is not taken from them, that one which a killed agent left is; that who may not
// connect is refused by the kernel's word for who they are; that slow clients lose their place to those that wait; and
// that a socket whose file was removed can be made again. It never removes a file that is not its own, and decides nothing
// about what is served.
//
// Start reading at Server. socket.go has the file, gate.go the connections.
package unixsock

import (
	"context"
	"io/fs"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

// Options are where the socket is and whom it is for.
type Options struct {
	// Path is the socket; 107 bytes at most. Its directory is made if it is not there.
	Path string
	// DirMode is the mode of a directory that is made, Mode that of the socket. 0 means 0700 and 0600.
	DirMode, Mode fs.FileMode
	// AllowedUIDs may connect besides root. They need a Mode and a DirMode that let them.
	AllowedUIDs []uint32

	// Connections is how many there are at a time, Grace how long one may be open before it has to make place.
	Connections int
	Grace       time.Duration
	// Patience is for a whole request, and for its answer. Header bounds its head in bytes.
	Patience time.Duration
	Header   int
	// KeepAlive lets a connection have several requests.
	KeepAlive bool
	// End is for running requests when the server ends.
	End time.Duration

	// Trouble hears of connections that were refused, Log of the socket's own affairs. Now is the clock. All are required.
	Trouble Trouble
	Log     *slog.Logger
	Now     func() time.Time
}

// Trouble hears of connections that are not served.
type Trouble interface {
	// Stranger is one of a user that may not connect, Slow one that held a place while others waited.
	Stranger(uid uint32)
	Slow()
	// CannotAccept says why no connection is taken just now.
	CannotAccept(err error)
}

// Server is the serving end of the socket.
type Server struct {
	options Options
	gate    *gate

	mu      sync.Mutex
	socket  *socket
	ended   bool
	rebound chan struct{}
}

// Open makes the socket. Clients can connect from then on; they are served by Serve, which has to follow. A socket that
// somebody else serves is an error that is ErrServed.
func Open(ctx context.Context, o Options) (*Server, error) {
	if o.DirMode == 0 {
		o.DirMode = 0o700
	}
	if o.Mode == 0 {
		o.Mode = 0o600
	}
	opened, err := bind(ctx, o.Path, o.DirMode, o.Mode)
	if err != nil {
		return nil, err
	}
	return &Server{options: o, gate: newGate(o), socket: opened, rebound: make(chan struct{}, 1)}, nil
}

// Busy is how many connections have a place.
func (s *Server) Busy() int {
	s.gate.mu.Lock()
	defer s.gate.mu.Unlock()
	return len(s.gate.open)
}

// Listening reports whether the file at the path is still the socket that is served.
func (s *Server) Listening() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.ended && s.socket.isInPlace()
}

// Rebind makes the socket again if its file is gone or another one. What was connected stays so. An error means that
// the path cannot be had now, and that all is as before; the caller may try again at any time.
func (s *Server) Rebind(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.socket.isInPlace() {
		return nil
	}
	fresh, err := bind(ctx, s.options.Path, s.options.DirMode, s.options.Mode)
	if err != nil {
		return err
	}
	_ = s.socket.listener.Close() // nobody can reach it
	s.socket = fresh
	s.options.Log.InfoContext(ctx, "a socket was gone and is made again", "path", s.options.Path)
	select {
	case s.rebound <- struct{}{}:
	default:
	}
	return nil
}

// Serve answers until ctx ends. Then it removes the socket, if it is still its own, and returns when running requests have
// had their time.
func (s *Server) Serve(ctx context.Context, handler http.Handler) {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: s.options.Patience,
		ReadTimeout:       s.options.Patience,
		WriteTimeout:      2 * s.options.Patience, // of which reading is a part
		MaxHeaderBytes:    s.options.Header,
		ErrorLog:          slog.NewLogLogger(s.options.Log.Handler(), slog.LevelWarn),
	}
	server.SetKeepAlivesEnabled(s.options.KeepAlive)
	stop := context.AfterFunc(ctx, s.close)
	defer stop()
	for ctx.Err() == nil {
		_ = server.Serve(s.gate.guard(ctx, s.current())) // until the socket is closed, for one of two reasons:
		select {
		case <-ctx.Done():
		case <-s.rebound:
		}
	}
	s.close() // waits for the one that has begun
	s.shutdown(ctx, server)
}

func (s *Server) current() *socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.socket
}

// close takes the socket away.
func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return // a file that looks like the socket's is another one's by now
	}
	s.ended = true
	s.socket.remove()
}

// Close takes the socket of a server away that was never served.
func (s *Server) Close() { s.close() }

func (s *Server) shutdown(ctx context.Context, server *http.Server) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.options.End)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		_ = server.Close() // the connections are gone whatever it says
	}
}
