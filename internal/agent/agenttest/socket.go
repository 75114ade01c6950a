package agenttest

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Go runs a function until the test ends or stop is called: then its context ends, and the function must return.
func Go(t *testing.T, run func(context.Context)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(Generous): //nolint:forbidigo // tests wait in real time
			t.Error("it does not end with its context")
		}
	})
	t.Cleanup(stop)
	return stop
}

// Socket is a server on a Unix socket, and its log.
type Socket struct {
	*unixsock.Server

	Dir, Path string
	Log       Buffer
	Stop      func()
}

// SocketOptions returns the options of Serve, without a log.
func SocketOptions(path string) unixsock.Options {
	return unixsock.Options{
		Path: path, DirMode: 0o700, Mode: 0o600, Connections: 64, Timeout: Generous, Log: slog.New(slog.DiscardHandler),
	}
}

// Serve serves on a socket called log.sock until the test ends. It first applies change, if any, to the options.
func Serve(t *testing.T, handler http.Handler, change func(*unixsock.Options)) *Socket {
	t.Helper()
	s := &Socket{Dir: SocketDir(t)}
	s.Path = filepath.Join(s.Dir, "log.sock")
	o := SocketOptions(s.Path)
	o.Log = slog.New(slog.NewTextHandler(&s.Log, nil))
	if change != nil {
		change(&o)
	}
	s.Path = o.Path
	var err error
	if s.Server, err = unixsock.Open(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	s.Stop = Go(t, func(ctx context.Context) { s.Serve(ctx, handler) })
	return s
}

// Answer serves one answer, whatever the request, and returns the flag with its socket for a command that asks the agent.
func Answer(t *testing.T, status int, body string) (flag string) {
	t.Helper()
	return "--socket=" + Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}), nil).Path
}

// Listen listens on a Unix socket until the test ends. The file stays.
func Listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	check.OK(t, err)
	listener.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// Dial connects to the socket until the test ends.
func (s *Socket) Dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := Dial(t.Context(), s.Path)
	check.OK(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Dial connects to a Unix socket.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(Generous)) //nolint:forbidigo // as above
	}
	return conn, err
}

// Client returns an HTTP client of a Unix socket.
func Client(path string) *http.Client {
	return &http.Client{Timeout: Generous, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return Dial(ctx, path) },
	}}
}
