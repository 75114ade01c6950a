package logrelay

import (
	"bufio"
	"bytes"
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
	"syscall"
	"testing"
	"time"
)

// endless is a body without end: a batch of a record that goes on and on, or of many small ones.
type endless struct{ piece string }

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], e.piece)
	}
	return n, nil
}

const head = "POST /log HTTP/1.1\r\nHost: unix\r\nContent-Type: application/json\r\n"

func TestAfterEachAttackAnOrdinaryBatchArrives(t *testing.T) {
	for _, c := range []struct {
		name   string
		attack func(t *testing.T, b *bench)
	}{
		{"endless_record", func(t *testing.T, b *bench) {
			t.Helper()
			_, _ = b.post(t, io.MultiReader(strings.NewReader(`["`), endless{"xxxxxxxx"}))
		}},
		{"endless_records", func(t *testing.T, b *bench) {
			t.Helper()
			_, _ = b.post(t, io.MultiReader(strings.NewReader(`[""`), endless{`,""`}))
		}},
		{"largest_body_of_smallest_elements", func(t *testing.T, b *bench) {
			t.Helper()
			if code, err := b.post(t, strings.NewReader("[0"+strings.Repeat(",0", 2<<20-4)+"]")); code != 200 || err != nil {
				t.Errorf("answer %d, %v", code, err)
			}
		}},
		{"claims_a_huge_body", func(t *testing.T, b *bench) {
			t.Helper()
			raw(t, b, head+"Content-Length: 9223372036854775807\r\n\r\n[")
		}},
		{"endless_header", func(t *testing.T, b *bench) {
			t.Helper()
			conn := b.dial(t)
			_, _ = io.Copy(conn, io.MultiReader(strings.NewReader(head+"X: "), endless{"xxxxxxxx"}))
			answered(t, conn)
		}},
		{"slow_header", func(t *testing.T, b *bench) { t.Helper(); drip(t, b, head) }},
		{"slow_body", func(t *testing.T, b *bench) {
			t.Helper()
			drip(t, b, head+"Content-Length: 1000000\r\n\r\n[")
		}},
		{"no_http", func(t *testing.T, b *bench) { t.Helper(); raw(t, b, "\x16\x03\x01\x00\xff\x00\n\n\r\n\r\n") }},
		{"half_open", func(t *testing.T, b *bench) {
			t.Helper()
			conn := b.dial(t)
			if err := conn.(*net.UnixConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			answered(t, conn)
		}},
		{"body_cut_short", func(t *testing.T, b *bench) {
			t.Helper()
			conn := b.dial(t)
			_, _ = io.WriteString(conn, head+"Content-Length: 1000\r\n\r\n["+quoted)
			_ = conn.Close()
			eventually(t, "it is counted", func() bool { return b.outcomes(t)["rejected"] == 1 })
		}},
		{"answer_never_read", func(t *testing.T, b *bench) {
			t.Helper()
			conn := b.dial(t)
			for range 1000 {
				if _, err := io.WriteString(conn, head+"Content-Length: 2\r\n\r\n[]"); err != nil {
					break
				}
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, func(_ *Options, l *limits) { l.patience = 500 * time.Millisecond })
			b.ordinary(t)
			c.attack(t, b)
			b.ordinary(t)
			eventually(t, "nothing of it is left", func() bool {
				return len(b.requests) == 0 && b.shared.left.Load() == int64(b.limits.shared) && b.places() == 0
			})
			if got := b.log.String(); strings.Count(got, "\n") > 1 {
				t.Errorf("the log has %q", got)
			}
		})
	}
}

func (b *bench) places() int {
	return b.Busy()
}

// raw sends bytes and waits until the server hangs up.
func raw(t *testing.T, b *bench, text string) {
	t.Helper()
	conn := b.dial(t)
	_, _ = io.WriteString(conn, text)
	answered(t, conn)
}

// answered waits until the server hangs up.
func answered(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, conn); err != nil && os.IsTimeout(err) {
		t.Errorf("the server does not hang up: %v", err)
	}
}

// drip sends a text and then a byte at a time, until the server hangs up.
func drip(t *testing.T, b *bench, text string) {
	t.Helper()
	conn := b.dial(t)
	gone := make(chan struct{})
	go func() { defer close(gone); answered(t, conn) }()
	_, err := io.WriteString(conn, text)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for err == nil {
		select {
		case <-tick.C:
			_, err = io.WriteString(conn, "x")
		case <-gone:
			return
		}
	}
	<-gone
}

func TestAThousandSilentConnections(t *testing.T) {
	before := runtime.NumGoroutine()
	b := start(t, func(_ *Options, l *limits) {
		l.grace = 5 * time.Millisecond
		l.report = time.Hour
	})
	for range 1000 {
		b.dial(t)
	}
	b.ordinary(t) // it is the 1001st, and the others still hang on
	if got := b.places(); got > b.limits.connections {
		t.Errorf("%d connections at a time", got)
	}
	refused := b.count(t, `istio_cni_log_connections_refused_total{reason="slow"}`)
	if refused < 1000-b.limits.connections {
		t.Errorf("%d lost their place", refused)
	}
	eventually(t, "no goroutine is left of those that lost their place", func() bool {
		return runtime.NumGoroutine() < before+3*b.limits.connections
	})
	b.stop()
	if got := b.log.String(); strings.Count(got, "slow while others waited") != 1 {
		t.Errorf("the log has %q", got)
	}
}

// All places are taken by plugins that are not slow: nobody loses one, the rest waits.
func TestAnHonestCrowdIsWaitedFor(t *testing.T) {
	b := start(t, func(_ *Options, l *limits) { l.connections, l.grace = 2, time.Hour })
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { b.mustPost(t, line("info", "x", "")) })
	}
	all.Wait()
	if got := b.outcomes(t)["relayed"]; got != 50 {
		t.Errorf("%d relayed", got)
	}
	if got := b.count(t, `istio_cni_log_connections_refused_total{reason="slow"}`); got != 0 {
		t.Errorf("%d lost their place", got)
	}
}

// When the log hangs, requests that wait for it hold no more than their number.
func TestAHangingLogBoundsWhatWaitsForIt(t *testing.T) {
	release, reached := make(chan struct{}), make(chan struct{})
	b := start(t, func(o *Options, l *limits) {
		o.Records = slog.NewTextHandler(hanging{sync.OnceFunc(func() { close(reached) }), release}, nil)
		l.connections, l.grace = 4, time.Millisecond
	})
	body := "[" + quoted + "]"
	var conns []net.Conn
	for i := range 40 {
		conn := b.dial(t)
		_, _ = io.WriteString(conn, head+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
		conns = append(conns, conn)
		if i == 0 {
			<-reached
		}
	}
	eventually(t, "some are refused", func() bool { return b.outcomes(t)["dropped"] > 0 })
	if got := len(b.requests); got > 4 {
		t.Errorf("%d wait", got)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	close(release)
	eventually(t, "all are gone", func() bool { return len(b.requests) == 0 && b.places() == 0 })
	b.mustPost(t, line("info", "x", ""))
}

// The bytes that bodies share run out, and small bodies pass all the same.
func TestLargeBodiesDoNotCrowdOutSmallOnes(t *testing.T) {
	b := start(t, func(_ *Options, l *limits) { l.shared, l.patience = 2<<20, generous })
	large := "[" + strings.Repeat(quoted+",", (3<<20)/(len(quoted)+1)) + quoted + "]"
	hold := b.dial(t)
	go func() { _, _ = io.WriteString(hold, head+"Content-Length: 4000000\r\n\r\n"+large[:2<<20+300<<10]) }()
	eventually(t, "most of it is taken", func() bool { return b.shared.left.Load() < 1<<18 })
	if code, err := b.post(t, strings.NewReader(large)); code != http.StatusServiceUnavailable && err == nil {
		t.Errorf("answer %d", code)
	}
	b.ordinary(t)
	_ = hold.Close()
	eventually(t, "all is given back", func() bool { return b.shared.left.Load() == 2<<20 })
}

func TestStrangersAreRefused(t *testing.T) {
	open := func(o *Options, _ *limits) { o.Mode, o.DirMode = 0o666, 0o755 }
	play := func(t *testing.T, b *bench) string {
		t.Helper()
		if err := os.Chmod(b.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := child(t, "plugin", "DIR="+b.dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1337, Gid: 1337}}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v: %s", err, stderr.String())
		}
		return stderr.String()
	}
	t.Run("by_the_kernel_s_word", func(t *testing.T) {
		b := start(t, func(o *Options, l *limits) { open(o, l); l.report = time.Millisecond })
		said := play(t, b)
		if !strings.Contains(said, "log sink failed") || len(b.relayed(t)) != 0 {
			t.Errorf("relayed %v, and the plugin says %s", b.relayed(t), said)
		}
		if got := b.count(t, `istio_cni_log_connections_refused_total{reason="stranger"}`); got != 1 {
			t.Errorf("%d counted", got)
		}
		eventually(t, "the log tells of it", func() bool { return strings.Contains(b.log.String(), "last_uid=1337") })
		b.ordinary(t)
	})
	t.Run("unless_allowed", func(t *testing.T) {
		b := start(t, func(o *Options, l *limits) { open(o, l); o.AllowedUIDs = []uint32{1337} })
		play(t, b)
		got := b.relayed(t)
		if len(got) != 1 || got[0]["uid"] != 1337.0 {
			t.Errorf("relayed %v", got)
		}
		b.ordinary(t) // root still may
	})
	t.Run("by_the_mode_of_the_socket", func(t *testing.T) {
		b := start(t, nil)
		if said := play(t, b); !strings.Contains(said, "permission denied") {
			t.Errorf("the plugin says %s", said)
		}
	})
}

// agent is a server in a process of its own.
type agent struct {
	dir    string
	pid    int
	out    lockedBuffer
	stderr lockedBuffer
	stdin  io.WriteCloser
}

func startAgent(t *testing.T, environment ...string) *agent {
	t.Helper()
	a := &agent{dir: runDir(t)}
	cmd := child(t, "agent", append(environment, "DIR="+a.dir)...)
	cmd.Stdout, cmd.Stderr = &a.out, &a.stderr
	var err error
	if a.stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err = cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a.pid = cmd.Process.Pid
	t.Cleanup(func() {
		_ = a.stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the agent ended with %v: %s", err, a.stderr.String())
		}
		if _, err := os.Lstat(filepath.Join(a.dir, "log.sock")); err == nil {
			t.Error("the socket stays")
		}
	})
	eventually(t, "the agent is open", func() bool { return a.out.Len() > 0 })
	return a
}

// send posts a body to the agent.
func (a *agent) send(ctx context.Context, body io.Reader) (int, error) {
	return post(ctx, filepath.Join(a.dir, "log.sock"), http.MethodPost, "http://unix/log", body)
}

func TestWithoutFileDescriptorsItWaitsForSome(t *testing.T) {
	a := startAgent(t, "FILES=3") // fewer than it has open
	conn, err := dial(t.Context(), filepath.Join(a.dir, "log.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	request := head + "Content-Length: " + strconv.Itoa(len(quoted)+2) + "\r\n\r\n[" + quoted + "]"
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the log tells of it", func() bool { return strings.Contains(a.stderr.String(), "too many open files") })
	if _, err := a.stdin.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if got, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("answer %q", got)
	}
	eventually(t, "the record is there", func() bool { return strings.Contains(a.out.String(), `"msg":"x"`) })
}

// peak returns the most memory that the process had resident, in bytes.
func (a *agent) peak(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

func TestMemoryUnderAttack(t *testing.T) {
	a := startAgent(t)
	calm := a.peak(t)
	ctx, cancel := context.WithTimeout(t.Context(), generous)
	defer cancel()
	bodies := []string{
		"[" + strings.Repeat(quoted+",", (4<<20)/(len(quoted)+1)-10) + quoted + "]", // records
		`["` + strings.Repeat("x", 4<<20-100) + `"]`,                                // one
		"[" + strings.Repeat(`"",`, (4<<20)/3-100) + `""]`,                          // nothing, often
		strings.Repeat("[", 4<<20-100),
	}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			for range 3 {
				_, _ = a.send(ctx, strings.NewReader(bodies[i%len(bodies)]))
			}
		})
	}
	all.Wait()
	code, err := a.send(ctx, strings.NewReader("["+quoted+"]"))
	if code != http.StatusOK || err != nil {
		t.Errorf("afterwards: %d %v", code, err)
	}
	used := a.peak(t) - calm
	t.Logf("calm %d MiB, under attack %d MiB more", calm>>20, used>>20)
	if used > most {
		t.Errorf("%d MiB", used>>20)
	}
}
