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

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
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
	begin       string // sent on each connection
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
		{name: "1000 idle connections", connections: 1000},
		{name: "1000 idle connections from 500 addresses", connections: 1000, sources: 500},
		{name: "reconnecting ones", connections: 500, again: true},
		{name: "reconnecting from 500 addresses", connections: 500, sources: 500, again: true},
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

// TestListener_FloodEvictsItself: the oldest connection stays while another address has more connections.
func TestListener_FloodEvictsItself(t *testing.T) {
	n := free(t, 1)[0]
	start(t, Port{Flag: "--p", Number: n, Handler: text("ready"), header: agenttest.Generous})
	oldest := dial(t, n, "GET / HTTP/1.1\r\n")
	attacker{connections: 3 * maxWaiting}.run(t, n)
	check.OK(t, kubelet(t, n)) // after the others
	_, err := io.WriteString(oldest, "Host: a\r\n\r\n")
	check.OK(t, err)
	answer, err := io.ReadAll(oldest)
	check.OK(t, err)
	check.Contains(t, string(answer), "ready")
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
