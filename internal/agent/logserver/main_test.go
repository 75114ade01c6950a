package logserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// connections is the agent's limit.
const connections = 16

// fixture is a log server behind its socket, with the relayed records, its own log and its counters.
type fixture struct {
	*agenttest.Socket

	handler      http.Handler
	records, log agenttest.Buffer
	counters     *metrics.Metrics
}

// start serves until the test ends. A non-nil change modifies the options first.
func start(t *testing.T, change func(*Options)) *fixture {
	t.Helper()
	b := newFixture(change)
	b.Socket = agenttest.Serve(t, b.handler, func(o *unixsock.Options) { o.Connections, o.Timeout = connections, 2*time.Second })
	return b
}

// newFixture opens no socket. The agent's own level is error.
func newFixture(change func(*Options)) *fixture {
	b := &fixture{counters: metrics.New("")}
	o := Options{
		Records: slog.NewJSONHandler(&b.records, &slog.HandlerOptions{Level: slog.LevelError}), Level: slog.LevelInfo,
		Log: slog.New(slog.NewTextHandler(&b.log, nil)), Metrics: b.counters,
	}
	if change != nil {
		change(&o)
	}
	b.handler = Handler(o)
	return b
}

// plugin returns the log of an invocation of the plugin on the agent's node.
func (b *fixture) plugin(stderr io.Writer, level pluginlog.Level) *pluginlog.Log {
	l := pluginlog.New(stderr, "cni-plugin")
	l.Timeout = agenttest.Generous
	l.Configure(b.Dir, level)
	return l
}

// relayed returns the logged records.
func (b *fixture) relayed(t *testing.T) []map[string]any {
	t.Helper()
	var records []map[string]any
	for line := range strings.Lines(b.records.String()) {
		var record map[string]any
		check.OK(t, json.Unmarshal([]byte(line), &record), "line", line)
		records = append(records, record)
	}
	return records
}

// outcomes returns the counts of records by outcome, without zeros.
func (b *fixture) outcomes() map[string]int {
	all := map[string]int{}
	counter := regexp.MustCompile(`istio_cni_log_records_total\{outcome="(\w+)"\} ([1-9]\d*)\n`)
	for _, found := range counter.FindAllStringSubmatch(string(b.counters.Text()), -1) {
		all[found[1]], _ = strconv.Atoi(found[2])
	}
	return all
}

// ordinary sends a batch with the real plugin, and fails the test unless the server relays it.
func (b *fixture) ordinary(t *testing.T) {
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

// post sends a body like Istio's plugin: with an http.Client that dials the socket.
func (b *fixture) post(t *testing.T, body io.Reader) (int, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://unix/log", body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := agenttest.Client(b.Path).Do(req)
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
	check.OK(t, err)
	return bytes.NewReader(body)
}

// mustPost posts lines and expects 200.
func (b *fixture) mustPost(t *testing.T, lines ...string) {
	t.Helper()
	if code, err := b.post(t, batchOf(t, lines...)); code != http.StatusOK || err != nil {
		t.Fatalf("answer %d, %v", code, err)
	}
}

// line returns a record in the format of Istio's plugin.
func line(level, msg, more string) string {
	return fmt.Sprintf(`{"level":%q,"time":"2026-05-04T03:02:01.000001Z","msg":%s%s}`+"\n", level, strconv.Quote(msg), more)
}
