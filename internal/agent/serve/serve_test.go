package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// tried counts the ports that free has tried. They are below the ports that the kernel gives to clients, of which tests have many.
var tried atomic.Int64

// free returns n free ports.
func free(t *testing.T, n int) []int {
	t.Helper()
	const first, count = 10_000, 20_000
	var numbers []int
	var config net.ListenConfig
	for len(numbers) < n {
		number := first + (os.Getpid()*100+int(tried.Add(1)))%count
		if l, err := config.Listen(t.Context(), "tcp", fmt.Sprint(":", number)); err == nil {
			_ = l.Close()
			numbers = append(numbers, number)
		}
	}
	return numbers
}

func occupy(t *testing.T, address string) int {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", address)
	check.OK(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().(*net.TCPAddr).Port
}

var discard = slog.New(slog.DiscardHandler)

func text(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

// serveOne serves a handler on a free port, and returns the port and start's function.
func serveOne(t *testing.T, handler http.Handler) (number int, stop func() error) {
	t.Helper()
	number = free(t, 1)[0]
	return number, start(t, Port{Flag: "--p", Number: number, Handler: handler})
}

// start serves ports until the returned function is called, which returns the result of Serve.
func start(t *testing.T, ports ...Port) (stop func() error) {
	t.Helper()
	return startLogged(t, discard, ports...)
}

func startLogged(t *testing.T, log *slog.Logger, ports ...Port) (stop func() error) {
	t.Helper()
	for i := range ports {
		ports[i].shutdown = 200 * time.Millisecond
	}
	opened, err := open(t.Context(), ports)
	check.OK(t, err)
	var ended error
	end := agenttest.Go(t, func(ctx context.Context) { ended = serve(ctx, log, opened) })
	stop = func() error { end(); return ended }
	t.Cleanup(func() { check.OK(t, stop()) })
	return stop
}

// dial connects to a port until the test ends, and sends a text.
func dial(t *testing.T, number int, text string) net.Conn {
	t.Helper()
	var dialer net.Dialer
	conn, err := dialer.DialContext(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", number))
	check.OK(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	check.OK(t, conn.SetDeadline(time.Now().Add(agenttest.Generous)))
	_, _ = io.WriteString(conn, text) // the server may not read it to the end
	return conn
}

func get(t *testing.T, number int, path string) (int, string, error) {
	t.Helper()
	return getWithin(t, agenttest.Generous, number, path)
}

// getWithin sends a request on its own connection.
func getWithin(t *testing.T, timeout time.Duration, number int, path string) (int, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", number, path), nil)
	check.OK(t, err)
	req.Close = true
	resp, err := (&http.Client{Timeout: timeout}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// closed fails the test if a port is open.
func closed(t *testing.T, number int) {
	t.Helper()
	if _, _, err := get(t, number, "/"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("port %d stays open: %v", number, err)
	}
}

func TestServe_Ports(t *testing.T) {
	n := free(t, 2)
	stop := start(t,
		Port{Flag: "--health-port", Number: n[0], Handler: text("health")},
		Port{Flag: "--monitoring-port", Number: n[1], Handler: text("metrics")},
		Port{Flag: "--off", Number: 0}, Port{Flag: "--also-off", Number: -1})
	for i, want := range []string{"health", "metrics"} {
		if code, body, err := get(t, n[i], "/"); code != 200 || body != want || err != nil {
			t.Errorf("port %d: %d %q %v, want %q", i, code, body, err, want)
		}
	}
	check.OK(t, stop())
	closed(t, n[0])
}

func TestServe_PortsInUse(t *testing.T) { // W-29
	health := occupy(t, ":0")
	monitoring := occupy(t, "127.0.0.1:0")
	good := free(t, 1)[0]
	_, err := open(t.Context(), []Port{
		{Flag: "--health-port", Number: health},
		{Flag: "--good-port", Number: good},
		{Flag: "--monitoring-port", Number: monitoring},
		{Flag: "--high-port", Number: 65536},
		{Flag: "--same-port", Number: good},
	})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		fmt.Sprintf("--health-port %d: address already in use", health),
		fmt.Sprintf("--monitoring-port %d: address already in use", monitoring),
		"--high-port 65536: listen tcp: address 65536: invalid port",
		fmt.Sprintf("--same-port %d: address already in use", good),
	}
	check.Diff(t, "result", want, strings.Split(err.Error(), "\n"))
	check.Is(t, err, syscall.EADDRINUSE)
	closed(t, good)
}

func TestIntrospection_Profiles(t *testing.T) {
	runtime.MemProfileRate = 0 // as main sets it
	n := free(t, 3)
	start(t, Port{Flag: "--health-port", Number: n[0], Handler: http.NotFoundHandler()},
		Introspection("--ctrlz_port", "localhost", n[1], true, nil), Introspection("--other", "127.0.0.1", n[2], false, nil))
	if runtime.MemProfileRate == 0 {
		t.Error("there is no heap profile")
	}
	for _, path := range []string{
		"/debug/pprof/", "/debug/pprof/goroutine?debug=1", "/debug/pprof/cmdline", "/debug/pprof/profile?seconds=1",
	} {
		if code, body, err := get(t, n[1], path); code != 200 || body == "" || err != nil {
			t.Errorf("%s: %d %v", path, code, err)
		}
		if code, _, _ := get(t, n[0], path); code != 404 {
			t.Errorf("%s is answered with %d on a public port", path, code)
		}
		if code, body, _ := get(t, n[2], path); code != 404 || !strings.Contains(body, "set --profiling") {
			t.Errorf("%s is answered with %d %q without the setting", path, code, body)
		}
	}
	for _, host := range []string{"", "0.0.0.0", "::"} {
		_, err := open(t.Context(), []Port{Introspection("--ctrlz_port", host, free(t, 1)[0], false, nil)})
		if !errors.Is(err, errNotLocal) && !errors.Is(err, syscall.EAFNOSUPPORT) {
			t.Errorf("host %q is accepted as local: %v", host, err)
		}
	}
}

// TestIntrospection_Browser: a browser sends the asking page in Origin and Sec-Fetch-Site; programs send neither.
func TestIntrospection_Browser(t *testing.T) {
	t.Parallel()
	handler := Introspection("--ctrlz_port", "localhost", 0, true, map[string]http.Handler{"GET /": text("page"), "PUT /": text("done")}).Handler
	type headers = map[string]string
	navigates := func(site, dest string) headers {
		return headers{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": dest}
	}
	const nobody, root, everything = "", "GET /", "GET /, PUT /, GET /api/pods?check=true, GET /debug/pprof/cmdline"
	for _, test := range []struct {
		host    string
		headers headers
		want    string // the requests that are answered
	}{
		{"localhost:9876", nil, everything},
		{"[::1]", nil, everything},
		{"127.0.0.1:9876", nil, everything},
		{"localhost:9876", navigates("none", "document"), everything}, // a typed address
		{"localhost:9876", headers{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, everything},
		{"localhost:9876", headers{"Origin": "http://localhost:9876"}, everything},
		{"localhost:9876", headers{"Origin": "http://localhost:9876", "Sec-Fetch-Site": "same-origin"}, everything},
		{"localhost:9876", navigates("cross-site", "document"), root}, // a link
		{"localhost:9876", navigates("same-site", "document"), root},
		{"localhost:9876", navigates("cross-site", "iframe"), nobody},
		{"localhost:9876", navigates("same-site", "frame"), nobody},
		{"localhost:9876", navigates("cross-site", ""), nobody},
		{"localhost:9876", headers{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "document"}, nobody},
		{"localhost:9876", headers{"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, nobody},
		{"localhost:9876", headers{"Sec-Fetch-Site": "cross-site"}, nobody},
		{"localhost:9876", headers{"Sec-Fetch-Site": "none", "Origin": "http://evil.example"}, nobody},
		{"localhost:9876", headers{"Origin": "http://localhost:8080"}, nobody},
		{"localhost:9876", headers{"Origin": "https://localhost:9876"}, nobody},
		{"localhost:9876", headers{"Origin": "http://localhost:9876.evil.example"}, nobody},
		{"localhost:9876", headers{"Origin": "null"}, nobody},
		{"evil.example:9876", headers{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, nobody},
		{"localhost.evil.example", nil, nobody},
		{"10.0.0.1:9876", nil, nobody},
		{"", nil, nobody},
	} {
		var answered []string
		for request := range strings.SplitSeq(everything, ", ") {
			method, path, _ := strings.Cut(request, " ")
			r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
			r.Host = test.host
			for name, value := range test.headers {
				r.Header.Set(name, value)
			}
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			if w.Code == http.StatusOK {
				answered = append(answered, request)
			} else if w.Code != http.StatusForbidden {
				t.Errorf("%s of %q %v: %d", request, test.host, test.headers, w.Code)
			}
			check.Equal(t, w.Header().Get("Content-Security-Policy"), "frame-ancestors 'none'", request, test.host, test.headers)
		}
		check.Equal(t, strings.Join(answered, ", "), test.want, "host", test.host, test.headers, "answered")
	}
}

func TestServe_HangingRequestAtTheEnd(t *testing.T) {
	reached, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	n, stop := serveOne(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(reached)
		<-release
	}))
	done := make(chan error, 1)
	go func() { _, _, err := get(t, n, "/"); done <- err }()
	<-reached
	check.OK(t, stop())
	if err := <-done; err == nil {
		t.Error("the hanging request was answered")
	}
}

func TestServe_SilentClient(t *testing.T) {
	n := free(t, 1)[0]
	start(t, Port{Flag: "--p", Number: n, Handler: text("x"), header: time.Millisecond})
	check.OK(t, check.Err(io.ReadAll(dial(t, n, "GET / HTTP/1.1\r\nHost:"))), "the connection was not closed")
}

func TestServe_Panic(t *testing.T) {
	n := free(t, 1)[0]
	log := &agenttest.Buffer{}
	stop := startLogged(t, slog.New(slog.NewTextHandler(log, nil)),
		Port{Flag: "--p", Number: n, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("oops") })})
	_, _, _ = get(t, n, "/")
	check.OK(t, stop())
	check.Contains(t, log.String(), "level=WARN", "oops", "port=")
}

func TestServe_LostPort(t *testing.T) {
	n := free(t, 2)
	ports, err := open(t.Context(), []Port{{Flag: "--a", Number: n[0]}, {Flag: "--b", Number: n[1]}})
	check.OK(t, err)
	_ = ports[1].listener.Close()
	err = serve(t.Context(), discard, ports)
	if want := fmt.Sprintf("serving --b %d: ", n[1]); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	closed(t, n[0])
}

// TestServe_EndedContext: no port stays open.
func TestServe_EndedContext(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for range 200 {
		n := free(t, 1)
		ports, err := open(t.Context(), []Port{{Flag: "--a", Number: n[0]}})
		check.OK(t, err)
		check.OK(t, serve(ended, discard, ports))
		closed(t, n[0])
	}
}

func TestServe_AllPortsOff(t *testing.T) {
	check.OK(t, start(t, Port{Flag: "--off"})())
}
