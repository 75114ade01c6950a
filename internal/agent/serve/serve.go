// Package serve opens the agent's TCP ports and serves HTTP on them until the agent ends.
//
// It promises that all ports are opened before anything else happens; that a port which cannot be opened is an error that names
// its flag, its number and the cause (all such ports at once, and no port stays open); that a slow or silent client is
// disconnected and delays no other client; and that serving ends within a bound after the context ends. Profiling is served
// on loopback addresses only.
//
// It never serves http.DefaultServeMux, to which any package can add handlers, and does not choose the handlers.
//
// Start reading at While.
package serve

import (
	"cmp"
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
	headerTimeout   = 5 * time.Second
	readTimeout     = 10 * time.Second
	writeTimeout    = 30 * time.Second
	maxHeader       = 16 << 10
	shutdownTimeout = 3 * time.Second
)

// While opens the ports, answers on them while work runs, and closes them after work. The error comes from the opening or from work; the
// log has a port that ends earlier.
func While(ctx context.Context, log *slog.Logger, work func(context.Context) error, ports ...Port) error {
	ports, err := open(ctx, ports)
	if err != nil {
		return err
	}
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var serving sync.WaitGroup
	serving.Go(func() {
		if failed := serve(background, log, ports); failed != nil {
			log.ErrorContext(background, "serving health and metrics ended", slog.String("error", failed.Error()))
		}
	})
	err = work(ctx)
	end()
	serving.Wait()
	return err
}

// Port is a TCP port to serve on. A number of 0 or less disables the port.
type Port struct {
	// Flag is the flag that sets the number, such as "--monitoring-port", for error messages.
	Flag string
	// Host is the address to listen on; empty means all addresses.
	Host    string
	Number  int
	Handler http.Handler
	// Local refuses a host that is not a loopback address.
	Local bool
	// Timeout bounds an answer; 0 means 30 s.
	Timeout time.Duration

	listener net.Listener
	// header and shutdown replace the timeouts of a request's header and of the shutdown, in tests.
	header, shutdown time.Duration
}

var errNotLocal = errors.New("not a loopback address")

// open opens all enabled ports and returns them: clients can connect. If one cannot be opened, open closes the others, and the
// error has a line for each failed port.
func open(ctx context.Context, ports []Port) (opened []Port, err error) {
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
		p.listener = listener
		opened = append(opened, p)
	}
	if len(errs) == 0 {
		return opened, nil
	}
	for _, p := range opened {
		_ = p.listener.Close() // the port is closed even with an error
	}
	return nil, errors.Join(errs...)
}

func listen(ctx context.Context, p Port) (net.Listener, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", net.JoinHostPort(address(p.Host), strconv.Itoa(p.Number)))
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		return nil, errno // the net package's text around errno only repeats the number
	}
	if err != nil {
		return nil, err
	}
	// The address of a host name is known only after Listen.
	if at, ok := listener.Addr().(*net.TCPAddr); p.Local && (!ok || !at.IP.IsLoopback()) {
		_ = listener.Close()
		return nil, fmt.Errorf("listening on %q: %w", p.Host, errNotLocal)
	}
	return listener, nil
}

// address maps the most common name without the resolver, which fails in an image without /etc/hosts.
func address(host string) string {
	if host == "localhost" {
		return "127.0.0.1"
	}
	return host
}

// serve answers until ctx ends, gives running requests a moment to finish, and closes all ports. It returns nil, or the error
// of a port that ended before ctx; then all other ports have ended as well. The log gets the errors of single connections.
func serve(ctx context.Context, log *slog.Logger, ports []Port) error {
	serving, end := context.WithCancelCause(context.WithoutCancel(ctx))
	defer context.AfterFunc(ctx, func() { end(nil) })()
	var all sync.WaitGroup
	for _, p := range ports {
		server := p.server(log)
		all.Go(func() {
			err := server.Serve(p.listener)
			end(fmt.Errorf("serving %s %d: %w", p.Flag, p.Number, err)) // only the first cause counts
		})
		all.Go(func() {
			<-serving.Done()
			bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), cmp.Or(p.shutdown, shutdownTimeout))
			defer cancel()
			if server.Shutdown(bound) != nil {
				_ = server.Close() // the connections are closed even with an error
			}
		})
	}
	<-serving.Done()
	all.Wait()
	if err := context.Cause(serving); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (p Port) server(log *slog.Logger) *http.Server {
	server := &http.Server{
		Handler:           p.Handler,
		ConnState:         newLimit().state,
		ReadHeaderTimeout: cmp.Or(p.header, headerTimeout),
		ReadTimeout:       readTimeout,
		WriteTimeout:      cmp.Or(p.Timeout, writeTimeout),
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(log.With("port", p.Number).Handler(), slog.LevelWarn),
	}
	server.SetKeepAlivesEnabled(false) // probes and scrapes come seconds apart: an idle connection is useless
	return server
}
