package unixsock_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// clientOf runs this binary again, in one of its tests, as a client of the socket.
const clientOf = "UNIXSOCK_TEST_CLIENT_OF"

const request = "GET / HTTP/1.1\r\nHost: unix\r\n\r\n"

func TestMain(m *testing.M) {
	if path := os.Getenv(clientOf); path != "" {
		answer, err := get(context.Background(), path)
		fmt.Println(answer, err)
		return
	}
	m.Run()
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })

func start(t *testing.T, change func(*unixsock.Options)) *agenttest.Socket {
	t.Helper()
	return agenttest.Serve(t, hello, change)
}

// get returns the body of an answer.
func get(ctx context.Context, path string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://unix/", nil)
	if err != nil {
		return "", err
	}
	response, err := agenttest.Client(path).Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

func answers(t *testing.T, b *agenttest.Socket) {
	t.Helper()
	if got, err := get(t.Context(), b.Path); got != "hello" || err != nil {
		t.Errorf("answer %q, %v", got, err)
	}
}

func TestServe_UnauthorizedPeers(t *testing.T) {
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
			var refused atomic.Int64
			b := start(t, func(o *unixsock.Options) { o.Mode, o.UnauthorizedPeer = c.mode, func() { refused.Add(1) } })
			check.OK(t, os.Chmod(b.Dir, c.dir))
			for range 3 {
				cmd := agenttest.Child(t, clientOf+"="+b.Path)
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1337, Gid: 1337}}
				out, err := cmd.CombinedOutput()
				// The server may close the connection before the request is written.
				closed := func(text string) bool { return strings.Contains(string(out), text) }
				if err != nil || !slices.ContainsFunc([]string{c.want, "broken pipe", "reset", "closed idle connection"}, closed) {
					t.Errorf("%v: %s", err, out)
				}
			}
			check.Equal(t, refused.Load(), c.refused, "refused")
			check.Equal(t, strings.Count(b.Log.String(), "uid=1337"), int(min(c.refused, 1)), "records in", b.Log.String())
			answers(t, b)
		})
	}
}

// TestServe_MoreClientsThanConnections: clients that are not slow have all connections.
func TestServe_MoreClientsThanConnections(t *testing.T) {
	var now, most atomic.Int64
	b := agenttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n := now.Add(1); n > most.Load() {
			most.Store(n)
		}
		runtime.Gosched()
		hello(w, r)
		now.Add(-1)
	}), func(o *unixsock.Options) { o.Connections = 2 })
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { answers(t, b) })
	}
	all.Wait()
	if got := most.Load(); got > 2 {
		t.Errorf("%d at a time", got)
	}
}

// TestServe_SlowConnections: silent and slow connections end with the timeout and leave no goroutine.
func TestServe_SlowConnections(t *testing.T) {
	for name, begin := range map[string]string{
		"silent": "", "slow header": "GET / HT", "slow body": "POST / HTTP/1.1\r\nHost: unix\r\nContent-Length: 1000000\r\n\r\n[",
		"no HTTP": "\x16\x03\x01\x00\n\n", "large header": "GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			b := agenttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				hello(w, r)
			}), func(o *unixsock.Options) { o.Connections, o.Timeout = 8, 200*time.Millisecond })
			for i := range 20 {
				conn := b.Dial(t)
				_, err := io.WriteString(conn, begin)
				if i%2 == 0 && begin != "" { // and then one byte at a time
					go func() {
						for tick := time.NewTicker(10 * time.Millisecond); err == nil; <-tick.C {
							_, err = io.WriteString(conn, "x")
						}
					}()
				}
			}
			answers(t, b) // after all connections
			b.Stop()
			agenttest.Eventually(t, "goroutines of the connections remain", func() bool { return runtime.NumGoroutine() < before+8 })
		})
	}
}

func TestServe_RequestsOfAConnection(t *testing.T) {
	for keepAlive, want := range map[bool]int{false: 1, true: 2} {
		b := start(t, func(o *unixsock.Options) { o.KeepAlive = keepAlive })
		conn := b.Dial(t)
		check.OK(t, check.Err(io.WriteString(conn, request+strings.Replace(request, "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))))
		answers, _ := io.ReadAll(conn) // a reset is an end as well
		check.Equal(t, strings.Count(string(answers), "HTTP/1.1 200 OK"), want, "keep-alive", keepAlive)
	}
}

func TestServe_HangingHandlersAtTheEnd(t *testing.T) {
	release, reached := make(chan struct{}), make(chan struct{}, 9)
	defer close(release)
	b := agenttest.Serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		reached <- struct{}{}
		<-release
	}), func(o *unixsock.Options) { o.Connections = 2 })
	for range 4 { // two of them wait
		_, _ = io.WriteString(b.Dial(t), request)
	}
	<-reached
	<-reached
	b.Stop()
}

func TestServe_NoFileDescriptors(t *testing.T) {
	b := start(t, func(o *unixsock.Options) { o.Connections = 1 })
	var usual syscall.Rlimit
	check.OK(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &usual))
	limit := func(n uint64) {
		check.OK(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: usual.Max}))
	}
	t.Cleanup(func() { limit(usual.Cur) })
	first, second := b.Dial(t), b.Dial(t) // the second one waits in the backlog
	_, _ = io.WriteString(second, request)
	limit(3) // fewer than are open
	_ = first.Close()
	agenttest.Eventually(t, "the log lacks the cause", func() bool { return strings.Contains(b.Log.String(), "too many open files") })
	limit(usual.Cur)
	if answer, err := io.ReadAll(second); !strings.HasSuffix(string(answer), "hello") {
		t.Errorf("answer %q, %v", answer, err)
	}
}
