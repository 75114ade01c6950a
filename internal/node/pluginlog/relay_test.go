package pluginlog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// agent receives the relayed records.
type agent struct {
	dir string

	mu       sync.Mutex
	requests []relayed
}

// relayed is one request.
type relayed struct {
	target string
	lines  []string
}

func startAgent(t *testing.T) *agent {
	t.Helper()
	a := &agent{}
	a.dir = agenttest.Serve(t, a, nil).Dir
	return a
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	got := relayed{target: r.Method + " " + r.URL.Path}
	if err := json.NewDecoder(r.Body).Decode(&got.lines); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, got)
}

func (a *agent) all() []relayed {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests
}

// only returns the one request there must have been.
func (a *agent) only(t *testing.T) relayed {
	t.Helper()
	requests := a.all()
	if len(requests) != 1 {
		t.Fatalf("%d requests, want one", len(requests))
	}
	return requests[0]
}

func TestRelay_Fails(t *testing.T) {
	for _, c := range []struct {
		name  string
		start func(t *testing.T, dir string)
		want  string // in the warning; empty means there is none
	}{
		{"no_socket", func(*testing.T, string) {}, ""},
		{"stale_regular_file", func(t *testing.T, dir string) { t.Helper(); put(t, dir, socketName, "") }, "connection refused"},
		{"stale_socket", func(t *testing.T, dir string) { t.Helper(); _ = listen(t, dir).Close() }, "connection refused"},
		{"answers_500", answer(http.StatusInternalServerError), "it answers 500"},
		{"answers_204", answer(http.StatusNoContent), "it answers 204"},
		{"answers_with_a_redirection", answer(http.StatusTemporaryRedirect), "it answers 307"},
		{"closes", talkTo(func(c net.Conn) { _ = c.Close() }), socketName},
		{"other_protocol", reply("SSH-2.0-OpenSSH\r\n"), "malformed HTTP"},
		{"closes_within_its_answer", reply("HTTP/1.1 200 O"), "unexpected EOF"},
		{"answers_without_end", talkTo(func(c net.Conn) {
			go func() { _, _ = io.Copy(io.Discard, c) }()
			_, err := c.Write([]byte("HTTP/1.1 200 OK\r\nA: "))
			for err == nil {
				_, err = c.Write(bytes.Repeat([]byte("x"), 4096))
			}
		}), "unexpected EOF"},
	} {
		t.Run(c.name, func(t *testing.T) { relayThrough(t, c.start, c.want, agenttest.Generous) })
	}
}

func TestRelay_Hangs(t *testing.T) {
	for name, serve := range map[string]func(net.Conn){
		"reads_nothing":            func(net.Conn) {},
		"never_answers":            func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
		"answers_a_byte_at_a_time": drip,
		"body_that_does_not_come": func(c net.Conn) {
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nx"))
			_, _ = io.Copy(io.Discard, c)
		},
	} {
		t.Run(name, func(t *testing.T) { relayThrough(t, talkTo(serve), socketName, DefaultTimeout) })
	}
	t.Run("never_accepts", func(t *testing.T) {
		relayThrough(t, func(t *testing.T, dir string) { t.Helper(); listen(t, dir) }, socketName, DefaultTimeout)
	})
}

// relayThrough closes a log whose records are together more than a socket holds, and looks for the warning on stderr.
func relayThrough(t *testing.T, start func(t *testing.T, dir string), want string, timeout time.Duration) {
	t.Helper()
	dir := agenttest.SocketDir(t)
	start(t, dir)
	var stderr agenttest.Buffer
	l := open(options{Stderr: &stderr, RunDir: dir, Timeout: timeout})
	const records = 30
	for range records {
		l.Logger().Info("record", "text", strings.Repeat("x", 8000))
	}
	closeLog(t, l)
	if want == "" {
		if got := len(messages(t, stderr.String())); got != records {
			t.Errorf("stderr has %d records more than it should", got-records)
		}
	} else {
		agenttest.Eventually(t, "stderr has "+want, func() bool { return strings.Contains(stderr.String(), want) })
		if last := decode(t, lastLine(stderr.String())); last["level"] != "warn" || last["sink"] == nil {
			t.Errorf("the warning is %v", last)
		}
	}
	agenttest.Eventually(t, "the file has all records", func() bool {
		content, _ := os.ReadFile(filepath.Join(dir, fileName))
		return bytes.Count(content, []byte("\n")) == records
	})
	agenttest.Eventually(t, "no goroutine is left", func() bool { return len(leftBehind()) == 0 })
}

func lastLine(lines string) string {
	return lines[strings.LastIndex(strings.TrimSuffix(lines, "\n"), "\n")+1:]
}

func listen(t *testing.T, dir string) net.Listener {
	t.Helper()
	return agenttest.Listen(t, filepath.Join(dir, socketName))
}

// answer reads requests and answers them with a status.
func answer(code int) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		server := &httptest.Server{Listener: listen(t, dir), Config: &http.Server{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Location", "http://unix/elsewhere")
				w.WriteHeader(code)
			}),
		}}
		server.Start()
		t.Cleanup(server.Close)
	}
}

func TestSinks_FailureBelowTheLevel(t *testing.T) {
	dir := agenttest.SocketDir(t)
	_ = listen(t, dir).Close()
	got := logged(t, options{RunDir: dir, Level: LevelError}, func(log *slog.Logger) { log.Error("e") })
	if len(messages(t, got)) != 1 {
		t.Errorf("stderr has %q", got)
	}
}

// reply reads a request, sends the text and closes the connection.
func reply(text string) func(*testing.T, string) {
	return talkTo(func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err == nil {
			_, _ = io.Copy(io.Discard, r.Body)
		}
		_, _ = c.Write([]byte(text))
		_ = c.Close()
	})
}

// talkTo accepts connections and lets each be served until the test ends.
func talkTo(serve func(net.Conn)) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		listener := listen(t, dir)
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				t.Cleanup(func() { _ = conn.Close() })
				go serve(conn)
			}
		}()
	}
}

// drip sends a valid answer, but would take a minute for it.
func drip(c net.Conn) {
	go func() { _, _ = io.Copy(io.Discard, c) }()
	for _, letter := range "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + strings.Repeat("x", 600) + "\r\n\r\n" {
		if _, err := c.Write([]byte(string(letter))); err != nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// leftBehind returns the stacks of the goroutines that run code of a log.
func leftBehind() []string {
	buf := make([]byte, 1<<20)
	var left []string
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		for _, mark := range []string{"pluginlog.(*Log)", "pluginlog.appendFile", "pluginlog.relay("} {
			if strings.Contains(stack, mark) {
				left = append(left, stack)
				break
			}
		}
	}
	return left
}

// valve is a writer that blocks until it is opened, or for each write.
type valve struct {
	agenttest.Buffer

	open chan struct{}
}

func (v *valve) Write(p []byte) (int, error) {
	<-v.open
	return v.Buffer.Write(p)
}

func TestStderr_Hangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now() // the bubble's clock, which moves only while all wait
		v := &valve{open: make(chan struct{})}
		l := open(options{Stderr: v})
		log := l.Logger()
		for range 50 {
			log.Info("early")
		}
		l.Configure("", LevelDebug)
		for range 50 {
			log.Debug("late")
		}
		check.Equal(t, time.Since(began), 0, "100 records took")
		l.Close()
		if got := time.Since(began); got != DefaultTimeout || got >= 100*time.Millisecond {
			t.Errorf("with Close it took %v, want the timeout of %v", got, DefaultTimeout)
		}
		close(v.open)
		synctest.Wait()
		want := append(strings.Fields(strings.Repeat("early ", 50)), strings.Fields(strings.Repeat("late ", 50))...)
		check.Diff(t, "written in the end", want, messages(t, v.String()))
	})
}

func TestStderr_Slow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &valve{open: make(chan struct{})}
		l := open(options{Stderr: v})
		go func() {
			time.Sleep(20 * time.Millisecond)
			v.open <- struct{}{}
			time.Sleep(20 * time.Millisecond)
			close(v.open)
		}()
		l.Logger().Info("a")
		synctest.Wait() // a is being written
		l.Logger().Info("b")
		l.Logger().Info("c")
		l.Close()
		check.Diff(t, "result", []string{"a", "b", "c"}, messages(t, v.String()))
	})
}

func TestStderr_Closed(t *testing.T) {
	for name, prepare := range map[string]func(reader *os.File){
		"closed_by_the_reader": func(r *os.File) { _ = r.Close() },
		"never_read":           func(*os.File) {},
	} {
		t.Run(name, func(t *testing.T) {
			reader, writer, err := os.Pipe()
			check.OK(t, err)
			defer func() { _ = reader.Close() }()
			prepare(reader)
			cmd := agenttest.Child(t, roleVariable+"=talker")
			cmd.Stderr = writer
			out, err := cmd.Output()
			_ = writer.Close()
			if err != nil || string(out) != "went on to the end" {
				t.Errorf("plugin ended with %v and wrote %q", err, out)
			}
		})
	}
}
