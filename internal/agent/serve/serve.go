// Package serve opens the agent's TCP ports and serves HTTP on them until the agent ends.
//
// It promises that all ports are opened before anything else happens, that one which cannot be is an error that names
// its flag, its number and the cause (all of them at once, and none stays open), that a slow or silent client is cut off
// and keeps no other one from being answered, and that the end of the context ends the serving within a bound. Profiling is
// served on loopback addresses only.
//
// It never serves http.DefaultServeMux, on which packages may have put what they like, and decides nothing about what
// is served.
//
// Start reading at Open.
package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// The limits of a connection. Answers are small and clients are near.
const (
	headerTimeout  = 5 * time.Second
	readTimeout    = 10 * time.Second
	writeTimeout   = 30 * time.Second
	maxHeader      = 16 << 10
	shutdownWithin = 3 * time.Second
)

// Port is a TCP port to serve on. A number of 0 or less means that it is switched off.
type Port struct {
	// Flag is what the operator sets the number by, such as "--monitoring-port". It is for errors.
	Flag string
	// Host is the address to listen on; empty means all of them.
	Host    string
	Number  int
	Handler http.Handler
	// Reach says who may be able to connect.
	Reach Reach
	// Patience is how long an answer may take; 0 means 30 s.
	Patience time.Duration
}

// Reach is from where a port can be reached.
type Reach uint8

// A port that is Local is refused when its host is not a loopback address.
const (
	Public Reach = iota
	Local
)

// Servers are ports that are open. Clients can connect from Open on, and are answered from Serve on.
type Servers struct {
	log     *slog.Logger
	limits  limits
	servers []*server
}

// limits are those of a connection, and of the end.
type limits struct{ header, end time.Duration }

type server struct {
	port     Port
	listener net.Listener
	http     *http.Server
}

var (
	errNotLocal  = errors.New("not a loopback address")
	errNoHandler = errors.New("nothing to serve")
)

// Open opens all ports that are not switched off. If one cannot be opened the others are closed again, and the error
// has a line for each that could not. The log, which may be nil, gets what goes wrong with single connections.
func Open(ctx context.Context, log *slog.Logger, ports ...Port) (*Servers, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Servers{log: log, limits: limits{header: headerTimeout, end: shutdownWithin}}
	var errs []error
	for _, p := range ports {
		if p.Number <= 0 {
			continue
		}
		listener, err := listen(ctx, p)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %d: %w", p.Flag, p.Number, err))
			continue
		}
		s.servers = append(s.servers, &server{port: p, listener: listener})
	}
	if len(errs) > 0 {
		s.Close()
		return nil, errors.Join(errs...)
	}
	return s, nil
}

func listen(ctx context.Context, p Port) (net.Listener, error) {
	if p.Handler == nil {
		return nil, errNoHandler
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", net.JoinHostPort(address(p.Host), strconv.Itoa(p.Number)))
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		return nil, errno // what the net package puts around it only repeats the number
	}
	if err != nil {
		return nil, err
	}
	// What a name stands for is known only now.
	if at, ok := listener.Addr().(*net.TCPAddr); p.Reach == Local && (!ok || !at.IP.IsLoopback()) {
		_ = listener.Close()
		return nil, fmt.Errorf("listening on %q: %w", p.Host, errNotLocal)
	}
	return listener, nil
}

// address spares the most common name the resolver, which an image without /etc/hosts does not have.
func address(host string) string {
	if host == "localhost" {
		return "127.0.0.1"
	}
	return host
}

// Close closes ports that nobody serves. After Serve it does nothing.
func (s *Servers) Close() {
	for _, srv := range s.servers {
		_ = srv.listener.Close() // it is closed whatever it says
	}
}

// Serve answers until ctx ends, gives running requests a moment to finish, and closes all ports. It returns nil, or
// why a port ended before: then all the others have ended with it.
func (s *Servers) Serve(ctx context.Context) error {
	if len(s.servers) == 0 {
		<-ctx.Done()
		return nil
	}
	ended := make(chan error, len(s.servers))
	var serving sync.WaitGroup
	for _, srv := range s.servers {
		srv.http = s.prepare(srv.port)
		serving.Go(func() {
			err := srv.http.Serve(srv.listener)
			ended <- fmt.Errorf("serving %s %d: %w", srv.port.Flag, srv.port.Number, err)
		})
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
	}
	s.shutdown(ctx)
	// Who closes a listener second does not wait for the first, which may be one of these.
	serving.Wait()
	return err
}

func (s *Servers) prepare(p Port) *http.Server {
	patience := p.Patience
	if patience <= 0 {
		patience = writeTimeout
	}
	server := &http.Server{
		Handler:           p.Handler,
		ConnState:         newLimit().state,
		ReadHeaderTimeout: s.limits.header,
		ReadTimeout:       readTimeout,
		WriteTimeout:      patience,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.With("port", p.Number).Handler(), slog.LevelWarn),
	}
	server.SetKeepAlivesEnabled(false) // probes and scrapes come seconds apart: an idle connection is of use to nobody
	return server
}

// shutdown ends all servers, at the latest when the bound is over.
func (s *Servers) shutdown(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.end)
	defer cancel()
	done := make(chan struct{})
	for _, srv := range s.servers {
		go func() {
			if srv.http.Shutdown(ctx) != nil {
				_ = srv.http.Close() // the connections are gone whatever it says
			}
			done <- struct{}{}
		}()
	}
	for range s.servers {
		<-done
	}
	// A server that had not begun to serve does not know its listener yet, and would close it only when it begins.
	s.Close()
}
