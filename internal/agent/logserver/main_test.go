package logserver

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
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// roleVariable is the role of this binary when one of its tests runs it again.
const roleVariable = "LOGRELAY_TEST_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "agent":
		playAgent()
	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(2)
	}
}

// playAgent serves until its stdin ends.
func playAgent() {
	s, err := unixsock.Open(context.Background(), socketOptions(os.Getenv("DIR")))
	if err != nil {
		panic(err)
	}
	r := New(Options{
		Records: slog.NewJSONHandler(os.Stdout, nil), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Metrics: metrics.New(""),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(ctx, r.Handler()) }()
	_, _ = os.Stdout.WriteString(`{"msg":"open"}` + "\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	<-done
}

// socketOptions are the agent's.
func socketOptions(dir string) unixsock.Options {
	return unixsock.Options{
		Path: filepath.Join(dir, "log.sock"), DirMode: 0o700, Mode: 0o600, Connections: 16, Timeout: 2 * time.Second,
		Log: slog.New(slog.DiscardHandler),
	}
}

// bench is a relay behind its socket, with what it relayed, what it logged itself and what it counted.
type bench struct {
	dir, path string
	handler   http.Handler
	records   agenttest.Buffer
	log       agenttest.Buffer
	counters  *metrics.Metrics
	stop      func()
}

// start serves until the test ends. The change, if any, is made to the options before.
func start(t *testing.T, change func(*Options)) *bench {
	t.Helper()
	b := &bench{dir: agenttest.SocketDir(t), counters: metrics.New("")}
	b.path = filepath.Join(b.dir, "log.sock")
	o := Options{
		Records: slog.NewJSONHandler(&b.records, nil),
		Log:     slog.New(slog.NewTextHandler(&b.log, nil)),
		Metrics: b.counters,
	}
	if change != nil {
		change(&o)
	}
	s, err := unixsock.Open(t.Context(), socketOptions(b.dir))
	if err != nil {
		t.Fatal(err)
	}
	b.handler = New(o).Handler()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(ctx, b.handler) }()
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

// plugin is the log of an invocation of the plugin on the agent's node.
func (b *bench) plugin(stderr io.Writer, level pluginlog.Level) *pluginlog.Log {
	l := pluginlog.New(stderr, "cni-plugin")
	l.Timeout = agenttest.Generous
	l.Configure(b.dir, level)
	return l
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

// outcomes are the counted records, of those that there are.
func (b *bench) outcomes() map[string]int {
	all := map[string]int{}
	counter := regexp.MustCompile(`istio_cni_log_records_total\{outcome="(\w+)"\} ([1-9]\d*)\n`)
	for _, found := range counter.FindAllStringSubmatch(string(b.counters.Text()), -1) {
		all[found[1]], _ = strconv.Atoi(found[2])
	}
	return all
}

// ordinary sends what a plugin sends, by the real one, and fails the test unless it is relayed.
func (b *bench) ordinary(t *testing.T) {
	t.Helper()
	before := len(b.records.String())
	var stderr agenttest.Buffer
	l := b.plugin(&stderr, pluginlog.LevelInfo)
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
	conn, err := dial(t.Context(), b.path)
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
		err = conn.SetDeadline(time.Now().Add(agenttest.Generous))
	}
	return conn, err
}

// post sends a body as the reference's plugin does: by an http.Client that dials the socket.
func (b *bench) post(t *testing.T, body io.Reader) (int, error) {
	t.Helper()
	return post(t.Context(), b.path, body)
}

func post(ctx context.Context, path string, body io.Reader) (int, error) {
	client := http.Client{
		Timeout: agenttest.Generous,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, path)
		}},
	}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://unix/log", body)
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
