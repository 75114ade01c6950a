package serve

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// kubelet sends a probe like the kubelet, on its own connection. Its timeout is longer than the kubelet's second because the machine
// may be busy with other tests, and shorter than the timeouts that end the other connections.
func kubelet(t *testing.T, number int) error {
	t.Helper()
	code, body, err := getWithin(t, headerTimeout-time.Second, number, "/readyz")
	if err != nil || code != http.StatusOK || body != "ready" {
		return fmt.Errorf("answer %d %.20q, %w", code, body, err)
	}
	return nil
}

// attacker keeps connections open, from a number of addresses.
type attacker struct {
	name        string
	connections int
	sources     int
	// Each connection sends begin, and then more every 100 ms unless more is empty.
	begin, more string
	// again replaces a closed connection with a new one.
	again bool
}

// run attacks until the test ends, and returns when all connections were opened once.
func (a attacker) run(t *testing.T, number int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var all, opened sync.WaitGroup
	t.Cleanup(func() { stop(); all.Wait() })
	for i := range a.connections {
		opened.Add(1)
		source := i % max(a.sources, 1)
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 1, byte(source/250), byte(1+source%250))}}
		all.Go(func() {
			once := sync.OnceFunc(opened.Done)
			for {
				conn, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", number))
				if err == nil {
					a.hold(ctx, conn, once)
				}
				once()
				if !a.again || ctx.Err() != nil {
					<-ctx.Done()
					return
				}
			}
		})
	}
	opened.Wait()
}

// hold keeps a connection until the other side closes it, and reads nothing but its end.
func (a attacker) hold(ctx context.Context, conn net.Conn, opened func()) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10) //nolint:forcetypeassert // by the network "tcp"
	if _, err := io.WriteString(conn, a.begin); err != nil {
		return
	}
	opened()
	for a.more != "" {
		if _, err := io.WriteString(conn, a.more); err != nil {
			return
		}
		timer := time.NewTimer(100 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
	if a.begin == "" {
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	<-ctx.Done() // the answer is not read
}

// TestListener_ProbeIsAnswered: the kubelet gets an answer within its timeout despite other connections.
func TestListener_ProbeIsAnswered(t *testing.T) {
	const request = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, a := range []attacker{
		{name: "128 idle connections", connections: 128},
		{name: "1000 idle connections", connections: 1000},
		{name: "1000 idle connections from 500 addresses", connections: 1000, sources: 500},
		{name: "reconnecting ones", connections: 500, again: true},
		{name: "reconnecting from 500 addresses", connections: 500, sources: 500, again: true},
		{name: "slow headers", connections: 1000, begin: "GET / HTTP/1.1\r\n", more: "A: b\r\n"},
		{name: "slow headers, again", connections: 300, sources: 7, begin: "G", more: "E", again: true},
		{name: "large headers", connections: 500, begin: "GET / HTTP/1.1\r\nA: " + strings.Repeat("a", 64<<10)},
		{name: "unread answers", connections: 500, begin: request},
		{name: "unread answers from 500 addresses", connections: 500, sources: 500, begin: request},
		{name: "pipelined requests", connections: 300, sources: 3, begin: strings.Repeat(request, 200)},
		{name: "connections kept alive", connections: 500, begin: "GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"},
		{name: "bodies that do not come", connections: 500, begin: "POST /readyz HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"},
	} {
		t.Run(a.name, func(t *testing.T) {
			mux := http.NewServeMux()
			mux.Handle("/readyz", text("ready"))
			large := make([]byte, 256<<10) // more than the kernel buffers for the server
			mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(large) })
			n, _ := serveOne(t, mux)
			a.run(t, n)
			for i := range 20 {
				check.OK(t, kubelet(t, n), "probe", i)
			}
			if got, most := runtime.NumGoroutine(), 2*a.connections+maxWaiting+maxAnswered+200; got > most {
				t.Errorf("%d goroutines, of which the attacker has up to %d", got, 2*a.connections)
			}
		})
	}
}

// TestListener_CompleteRequest: waiting connections do not evict a connection that is being answered.
func TestListener_CompleteRequest(t *testing.T) {
	reached, release := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.Handle("/readyz", text("ready"))
	mux.HandleFunc("/slow", func(w http.ResponseWriter, _ *http.Request) {
		close(reached)
		<-release
		_, _ = io.WriteString(w, "slow")
	})
	n, _ := serveOne(t, mux)
	answer := make(chan string, 1)
	go func() {
		_, body, err := get(t, n, "/slow")
		answer <- fmt.Sprint(body, err)
	}()
	<-reached
	attacker{connections: 3 * maxWaiting}.run(t, n)
	check.OK(t, kubelet(t, n))
	close(release)
	check.Equal(t, <-answer, "slow<nil>")
}

// fakeConn is a connection from an address.
type fakeConn struct {
	net.Conn

	source string
	closed bool
}

func (c *fakeConn) Close() error { c.closed = true; return nil }

func (c *fakeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.source), Port: 1} }

// TestListener_Eviction: the address with most connections loses its oldest.
func TestListener_Eviction(t *testing.T) {
	t.Parallel()
	l := &limit{rate: rate.NewLimiter(rate.Inf, 0), waiting: group{most: 4}, answered: group{most: 2}}
	all := map[string]*fakeConn{}
	for i, step := range []struct {
		conn    string
		state   http.ConnState
		evicted string
	}{
		{"1.1.1.1/old", http.StateNew, ""},
		{"2.2.2.2/a", http.StateNew, ""},
		{"2.2.2.2/b", http.StateNew, ""},
		{"3.3.3.3/x", http.StateNew, ""},
		{"4.4.4.4/new", http.StateNew, "2.2.2.2/a"},
		{"5.5.5.5/new", http.StateNew, "1.1.1.1/old"},
		{"4.4.4.4/new", http.StateActive, ""},
		{"3.3.3.3/x", http.StateActive, ""},
		{"3.3.3.3/x", http.StateClosed, ""},
		{"5.5.5.5/new", http.StateActive, ""},
		{"6.6.6.6/c", http.StateNew, ""},
		{"6.6.6.6/d", http.StateNew, ""},
		{"6.6.6.6/e", http.StateNew, ""},
		{"6.6.6.6/c", http.StateActive, "4.4.4.4/new"},
	} {
		if all[step.conn] == nil {
			source, _, _ := strings.Cut(step.conn, "/")
			all[step.conn] = &fakeConn{source: source}
		}
		l.state(all[step.conn], step.state)
		for name, conn := range all {
			check.Equal(t, conn.closed, name == step.evicted, "step", i, name, "is closed")
			conn.closed = false
		}
	}
	for _, conn := range all {
		l.state(conn, http.StateClosed)
	}
	check.Equal(t, len(l.waiting.conns)+len(l.answered.conns), 0, "left:", l)
}

// TestListener_OneRequestPerConnection: the server does not read further requests.
func TestListener_OneRequestPerConnection(t *testing.T) {
	n, _ := serveOne(t, text("x"))
	in := bufio.NewReader(dial(t, n, strings.Repeat("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 3)))
	resp, err := http.ReadResponse(in, nil)
	if err != nil || !resp.Close {
		t.Fatalf("%+v, %v", resp, err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if rest, err := io.ReadAll(in); len(rest) > 0 || err != nil && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("%q, %v", rest, err)
	}
}

// TestListener_Memory opens more connections than the limit, with headers of the maximal length.
func TestListener_Memory(t *testing.T) {
	const bound = 32 << 20
	n, _ := serveOne(t, text("x"))
	used := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := used()
	header := "GET / HTTP/1.1\r\n" + strings.Repeat("A: "+strings.Repeat("a", 994)+"\r\n", 15)
	for range 4 * maxWaiting {
		dial(t, n, header)
	}
	check.Fails(t, kubelet(t, n), `"x"`) // it answers: the port accepted it last
	after := used()
	t.Logf("%d KiB for %d connections", (after-before)>>10, 4*maxWaiting)
	if after > before+bound {
		t.Errorf("%d bytes of memory, before it %d", after, before)
	}
}
