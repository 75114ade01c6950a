package unixsock_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
)

const (
	// roleVariable makes this binary, run again by one of its tests, a client or a server.
	roleVariable = "UNIXSOCK_TEST_ROLE"
	// pathVariable is the socket of those.
	pathVariable = "UNIXSOCK_TEST_PATH"

	request = "GET / HTTP/1.1\r\nHost: unix\r\n\r\n"
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "client":
		answer, err := get(context.Background(), os.Getenv(pathVariable))
		fmt.Println(answer, err)
	case "server":
		playServer()
	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(2)
	}
}

// playServer serves until its stdin ends. It has no file descriptor left for a connection before a byte comes from there.
func playServer() {
	var usual syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &usual); err != nil {
		panic(err)
	}
	limit := func(n uint64) {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: usual.Max}); err != nil {
			panic(err)
		}
	}
	o := options(os.Getenv(pathVariable))
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	s, err := unixsock.Open(context.Background(), o)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(ctx, hello) })
	limit(3) // fewer than it has open
	fmt.Println("open")
	in := bufio.NewReader(os.Stdin)
	_, _ = in.ReadByte()
	limit(usual.Cur)
	_, _ = io.Copy(io.Discard, in)
	cancel()
	serving.Wait()
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })

func options(path string) unixsock.Options {
	return unixsock.Options{
		Path: path, DirMode: 0o700, Mode: 0o600, Connections: 64, Timeout: agenttest.Generous, Log: slog.New(slog.DiscardHandler),
	}
}

// bench is a server that serves, by default hello.
type bench struct {
	*unixsock.Server

	dir, path string
	log       agenttest.Buffer
	refused   atomic.Int64
	stop      func()
}

func start(t *testing.T, change func(*unixsock.Options)) *bench {
	t.Helper()
	return serve(t, hello, change)
}

// serve serves until the test ends. The change, if any, is made to the options before.
func serve(t *testing.T, handler http.Handler, change func(*unixsock.Options)) *bench {
	t.Helper()
	b := &bench{dir: agenttest.SocketDir(t)}
	b.path = filepath.Join(b.dir, "a.sock")
	o := options(b.path)
	o.Log = slog.New(slog.NewTextHandler(&b.log, nil))
	o.UnauthorizedPeer = func() { b.refused.Add(1) }
	if change != nil {
		change(&o)
	}
	s, err := unixsock.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	b.Server = s
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(ctx, handler) }()
	b.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(agenttest.Generous):
			t.Error("Serve does not end")
		}
	})
	t.Cleanup(b.stop)
	return b
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(agenttest.Generous))
	}
	return conn, err
}

func (b *bench) dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := dial(t.Context(), b.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// get returns the body of an answer.
func get(ctx context.Context, path string) (string, error) {
	conn, err := dial(ctx, path)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if _, err = io.WriteString(conn, request); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

func (b *bench) answers(t *testing.T) {
	t.Helper()
	if got, err := get(t.Context(), b.path); got != "hello" || err != nil {
		t.Errorf("answer %q, %v", got, err)
	}
}

func TestUnauthorizedPeersAreRefused(t *testing.T) {
	for _, c := range []struct {
		name      string
		dir, mode os.FileMode
		want      string
		refused   int64
	}{
		{"by_their_credentials", 0o755, 0o666, "EOF", 3},
		{"by_the_mode_of_the_socket", 0o755, 0o600, "permission denied", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := start(t, func(o *unixsock.Options) { o.Mode = c.mode })
			if err := os.Chmod(b.dir, c.dir); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				cmd := agenttest.Child(t, roleVariable+"=client", pathVariable+"="+b.path)
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1337, Gid: 1337}}
				out, err := cmd.CombinedOutput()
				// The server may hang up before the request is written.
				if err != nil || !strings.Contains(string(out), c.want) && !strings.Contains(string(out), "broken pipe") &&
					!strings.Contains(string(out), "reset") {
					t.Errorf("%v: %s", err, out)
				}
			}
			if got := b.refused.Load(); got != c.refused {
				t.Errorf("%d refused", got)
			}
			if got := strings.Count(b.log.String(), "uid=1337"); got != int(min(c.refused, 1)) {
				t.Errorf("logged %d times: %s", got, b.log.String())
			}
			b.answers(t)
		})
	}
}

// All connections are taken by clients that are not slow: the rest waits.
func TestACrowdIsWaitedFor(t *testing.T) {
	var now, most atomic.Int64
	b := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n := now.Add(1); n > most.Load() {
			most.Store(n)
		}
		runtime.Gosched()
		hello(w, r)
		now.Add(-1)
	}), func(o *unixsock.Options) { o.Connections = 2 })
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { b.answers(t) })
	}
	all.Wait()
	if got := most.Load(); got > 2 {
		t.Errorf("%d at a time", got)
	}
}

// Connections that are silent, or slow, end with the timeout, and no goroutine is left of them.
func TestSlowConnectionsAreCutOff(t *testing.T) {
	for name, begin := range map[string]string{
		"silent": "", "slow header": "GET / HT", "slow body": "POST / HTTP/1.1\r\nHost: unix\r\nContent-Length: 9\r\n\r\n[",
	} {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			b := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				hello(w, r)
			}), func(o *unixsock.Options) { o.Connections, o.Timeout = 8, 200*time.Millisecond })
			for range 20 {
				_, _ = io.WriteString(b.dial(t), begin)
			}
			b.answers(t) // after all of them
			b.stop()
			agenttest.Eventually(t, "no goroutine is left of them", func() bool { return runtime.NumGoroutine() < before+8 })
		})
	}
}

func TestRequestsOfAConnection(t *testing.T) {
	for keepAlive, want := range map[bool]int{false: 1, true: 2} {
		b := start(t, func(o *unixsock.Options) { o.KeepAlive = keepAlive })
		conn := b.dial(t)
		if _, err := io.WriteString(conn, request+strings.Replace(request, "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1)); err != nil {
			t.Fatal(err)
		}
		answers, _ := io.ReadAll(conn) // a reset is an end as well
		if got := strings.Count(string(answers), "HTTP/1.1 200 OK"); got != want {
			t.Errorf("keep-alive %v: answers %q", keepAlive, answers)
		}
	}
}

func TestItEndsThoughHandlersHang(t *testing.T) {
	release, reached := make(chan struct{}), make(chan struct{}, 9)
	defer close(release)
	b := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		reached <- struct{}{}
		<-release
	}), func(o *unixsock.Options) { o.Connections = 2 })
	for range 4 { // of which two wait
		_, _ = io.WriteString(b.dial(t), request)
	}
	<-reached
	<-reached
	b.stop()
}

func TestWithoutFileDescriptorsItWaitsForSome(t *testing.T) {
	path := filepath.Join(agenttest.SocketDir(t), "a.sock")
	cmd := agenttest.Child(t, roleVariable+"=server", pathVariable+"="+path)
	var stdout, stderr agenttest.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the server ended with %v: %s", err, stderr.String())
		}
		if _, err := os.Lstat(path); err == nil {
			t.Error("the socket stays")
		}
	}()
	agenttest.Eventually(t, "it is open", func() bool { return strings.Contains(stdout.String(), "open") })
	answer := make(chan string, 1)
	go func() {
		body, err := get(t.Context(), path)
		answer <- body + strconv.FormatBool(err == nil)
	}()
	agenttest.Eventually(t, "the log has the cause", func() bool { return strings.Contains(stderr.String(), "too many open files") })
	if _, err := stdin.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if got := <-answer; got != "hellotrue" {
		t.Errorf("answer %s", got)
	}
}
