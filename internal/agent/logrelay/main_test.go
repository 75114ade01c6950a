package logrelay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// roleVariable tells this binary, run again by one of its tests, which process to play.
const roleVariable = "LOGRELAY_TEST_ROLE"

// generous is how long a test waits for what must not take long before it calls it hung.
const generous = 30 * time.Second

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "plugin":
		playPlugin()
	case "agent":
		playAgent()
	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(2)
	}
}

// playPlugin is one invocation of the plugin. What its log has to say about the socket is on its stderr.
func playPlugin() {
	l := pluginlog.New(pluginlog.Options{Stderr: os.Stderr, RunDir: os.Getenv("DIR"), Scope: "cni-plugin", Timeout: generous})
	l.Logger().Info("from a child", "uid", os.Getuid())
	l.Close()
}

// playAgent serves until its stdin ends. Files beyond the limit FILES cannot be opened.
func playAgent() {
	var usual syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &usual); err != nil {
		panic(err)
	}
	limit := func(n uint64) {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: usual.Max}); err != nil {
			panic(err)
		}
	}
	l := defaultLimits()
	l.report = 10 * time.Millisecond
	s, err := open(context.Background(), Options{
		Path:    filepath.Join(os.Getenv("DIR"), "log.sock"),
		Records: slog.NewJSONHandler(os.Stdout, nil),
		Log:     slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}, l)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(ctx) }()
	if files, err := strconv.ParseUint(os.Getenv("FILES"), 10, 64); err == nil {
		limit(files)
	}
	_, _ = os.Stdout.WriteString(`{"msg":"open"}` + "\n")
	one := make([]byte, 1)
	for {
		if _, err := os.Stdin.Read(one); err != nil {
			break
		}
		limit(usual.Cur) // any byte lifts the limit
	}
	cancel()
	<-done
}

// child returns a command that runs this binary again in a role, from a place where any user may start it.
func child(t *testing.T, role string, environment ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(runDir(t), "child")
	content, err := os.ReadFile(self)
	if err == nil {
		err = os.WriteFile(program, content, 0o755)
	}
	if err == nil {
		err = os.Chmod(filepath.Dir(program), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program) // t.Context ends before the test's cleanups
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Env = append(cmd.Env, environment...)
	cmd.Dir = "/"
	return cmd
}

// runDir makes a directory whose name is short enough for a socket in it.
func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "run") //nolint:usetesting // a socket's path is 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// bench is a server that serves, with what it relayed, what it said itself and what it counted.
type bench struct {
	*Server

	dir      string
	records  lockedBuffer
	log      lockedBuffer
	counters *metrics.Metrics
	stop     func()
}

// start serves until the test ends. The change, if any, is made to options and limits before.
func start(t *testing.T, change func(*Options, *limits)) *bench {
	t.Helper()
	b := &bench{dir: runDir(t), counters: metrics.New("")}
	o := Options{
		Path:    filepath.Join(b.dir, "log.sock"),
		Records: slog.NewJSONHandler(&b.records, nil),
		Log:     slog.New(slog.NewTextHandler(&b.log, nil)),
		Metrics: b.counters,
	}
	l := defaultLimits()
	if change != nil {
		change(&o, &l)
	}
	s, err := open(t.Context(), o, l)
	if err != nil {
		t.Fatal(err)
	}
	b.Server = s
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(ctx) }()
	b.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(generous):
			t.Error("Serve does not end")
		}
	})
	t.Cleanup(b.stop)
	return b
}

// relayed returns the records that were logged.
func (b *bench) relayed(t *testing.T) []map[string]any {
	t.Helper()
	var records []map[string]any
	for line := range strings.Lines(b.records.String()) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		records = append(records, record)
	}
	return records
}

// count returns a counter.
func (b *bench) count(t *testing.T, series string) int {
	t.Helper()
	for line := range strings.Lines(string(b.counters.Text())) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			n, err := strconv.Atoi(value)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no series %s", series)
	return 0
}

func (b *bench) outcomes(t *testing.T) map[string]int {
	t.Helper()
	all := map[string]int{}
	for _, o := range []string{"relayed", "dropped", "rejected"} {
		if n := b.count(t, `istio_cni_log_records_total{outcome="`+o+`"}`); n > 0 {
			all[o] = n
		}
	}
	return all
}

// ordinary sends what a plugin sends, by the real one, and fails the test unless it is relayed.
func (b *bench) ordinary(t *testing.T) {
	t.Helper()
	before := b.records.Len()
	var stderr lockedBuffer
	l := pluginlog.New(pluginlog.Options{Stderr: &stderr, RunDir: b.dir, Scope: "cni-plugin", Timeout: generous})
	l.Logger().Info("an ordinary batch", "pod", "web-1")
	l.Logger().Error("with an error", "error", errors.New("boom"))
	l.Close()
	rest := b.records.String()[before:]
	relayed := strings.Contains(rest, "an ordinary batch") && strings.Contains(rest, "boom")
	if !relayed || strings.Count(stderr.String(), "\n") != 2 {
		t.Errorf("an ordinary batch did not arrive; stderr %q, relayed %q", stderr.String(), rest)
	}
}

func (b *bench) dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := dial(t.Context(), b.options.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(generous))
	}
	return conn, err
}

// post sends a body as the reference's plugin does: by an http.Client that dials the socket.
func (b *bench) post(t *testing.T, body io.Reader) (int, error) {
	t.Helper()
	return post(t.Context(), b.options.Path, http.MethodPost, "http://unix/log", body)
}

func post(ctx context.Context, path, method, url string, body io.Reader) (int, error) {
	client := http.Client{
		Timeout: generous,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, path)
		}},
	}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, errors.Join(err, resp.Body.Close())
}

// batchOf makes a body of the lines.
func batchOf(t *testing.T, lines ...string) io.Reader {
	t.Helper()
	body, err := json.Marshal(lines)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(body)
}

// mustPost posts lines and expects 200.
func (b *bench) mustPost(t *testing.T, lines ...string) {
	t.Helper()
	if code, err := b.post(t, batchOf(t, lines...)); code != http.StatusOK || err != nil {
		t.Fatalf("answer %d, %v", code, err)
	}
}

// line is a record as the reference's plugin writes it.
func line(level, msg, more string) string {
	return fmt.Sprintf(`{"level":%q,"time":"2026-05-04T03:02:01.000001Z","msg":%s%s}`+"\n", level, strconv.Quote(msg), more)
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for limit := time.Now().Add(generous); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("never: %s", what)
		}
	}
}

type lockedBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

func (b *lockedBuffer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Len()
}
