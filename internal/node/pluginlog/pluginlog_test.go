package pluginlog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/slogtest"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// agent receives the relayed records.
type agent struct {
	dir string

	mu       sync.Mutex
	requests [][]string
}

func startAgent(t *testing.T) *agent {
	t.Helper()
	a := &agent{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /log", a.receive)
	a.dir = agenttest.Serve(t, mux, nil).Dir
	return a
}

func (a *agent) receive(w http.ResponseWriter, r *http.Request) {
	var lines []string
	if err := json.NewDecoder(r.Body).Decode(&lines); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, lines)
}

func (a *agent) all() [][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests
}

// only returns the lines of the only request, and fails if there is another number.
func (a *agent) only(t *testing.T) []string {
	t.Helper()
	requests := a.all()
	if len(requests) != 1 {
		t.Fatalf("%d requests, want one", len(requests))
	}
	return requests[0]
}

func TestRelay_Fails(t *testing.T) {
	for _, c := range []struct {
		name    string
		start   func(t *testing.T, dir string)
		want    string // in the warning; empty for no warning
		timeout time.Duration
	}{
		{"no_socket", func(*testing.T, string) {}, "", agenttest.Generous},
		{"stale_socket", func(t *testing.T, dir string) { t.Helper(); _ = listen(t, dir).Close() }, "connection refused", agenttest.Generous},
		{"answers_500", answering(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }), "it answers 500", agenttest.Generous},
		{"never_answers", answering(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }), socketName, DefaultTimeout},
		{"answers_without_end", answering(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 5<<20)) }), "unexpected EOF", agenttest.Generous},
		{"never_accepts", func(t *testing.T, dir string) { t.Helper(); listen(t, dir) }, socketName, DefaultTimeout},
	} {
		t.Run(c.name, func(t *testing.T) { relayThrough(t, c.start, c.want, c.timeout) })
	}
}

// relayThrough closes a log whose records exceed a socket's buffer, and looks for the warning on stderr.
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

// answering reads requests and answers them.
func answering(answer http.HandlerFunc) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		server := &httptest.Server{Listener: listen(t, dir), Config: &http.Server{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				answer(w, r)
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

// valve is a writer that blocks each write until it is opened.
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
		began := time.Now() // the bubble's clock, which moves only when all goroutines wait
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
			cmd := agenttest.Child(t, roleVariable+"=yes")
			cmd.Stderr = writer
			out, err := cmd.Output()
			_ = writer.Close()
			if err != nil || string(out) != "went on to the end" {
				t.Errorf("plugin ended with %v and wrote %q", err, out)
			}
		})
	}
}

func TestParseLevel(t *testing.T) {
	for text, want := range map[string]Level{
		"": LevelInfo, "debug": LevelDebug, "info": LevelInfo, "warn": LevelWarn, "error": LevelError,
		"fatal": LevelFatal, "none": LevelNone,
	} {
		if got, err := ParseLevel(text); err != nil || got != want || text != "" && got.String() != text {
			t.Errorf("ParseLevel(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for level, want := range map[Level]string{-8: "debug", -1: "debug", 2: "info", 4: "warn", 11: "error", 12: "fatal", 100: "fatal"} {
		check.Equal(t, level.String(), want, "level", level)
	}
	for _, text := range []string{"INFO", "warning", "trace", " info", "0"} {
		got, err := ParseLevel(text)
		want := fmt.Sprintf("parsing log level %q: want one of debug, info, warn, error, fatal, none", text)
		if got != LevelInfo || err == nil || err.Error() != want {
			t.Errorf("ParseLevel(%q) = %v, %v, want info and %s", text, got, err, want)
		}
	}
}

func TestSinks_Form(t *testing.T) {
	p := newPlace(t)
	l := p.open(options{RunDir: p.dir, Scope: "cni-plugin", Now: clock})
	log := l.Logger().With("pod", "shop/cart-0", "if", "eth0")
	log.Info("pod captured", "containers", 2, "capture", true, slog.Group("uid", "proxy", 1337, "none", nil))
	log.WithGroup("rules").Warn("rules <replaced> & \"kept\"",
		"took", 1500*time.Millisecond, "range", netip.MustParsePrefix("10.0.0.0/8"), "error", errors.New("exit status 4"))
	l.Logger().Error("panic\nrecovered", "ratio", 0.5, "at", time.Unix(0, 0).UTC(), "ports", []int{80, 443})
	closeLog(t, l)
	want := `{"time":"2026-05-04T03:02:01.000001Z","level":"info","msg":"pod captured","scope":"cni-plugin",` +
		`"pod":"shop/cart-0","if":"eth0","containers":2,"capture":true,"uid":{"proxy":1337,"none":null}}
{"time":"2026-05-04T03:02:01.000001Z","level":"warn","msg":"rules <replaced> & \"kept\"","scope":"cni-plugin",` +
		`"pod":"shop/cart-0","if":"eth0","rules":{"took":"1.5s","range":"10.0.0.0/8","error":"exit status 4"}}
{"time":"2026-05-04T03:02:01.000001Z","level":"error","msg":"panic\nrecovered","scope":"cni-plugin",` +
		`"ratio":0.5,"at":"1970-01-01T00:00:00.000000Z","ports":[80,443]}
`
	check.Diff(t, "stderr", want, p.stderr.String())
	check.Diff(t, "file", want, readFile(t, filepath.Join(p.dir, fileName)))
	if info, err := os.Stat(filepath.Join(p.dir, fileName)); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode of the file: %v, %v", info, err)
	}
	check.Diff(t, "relayed", want, strings.Join(p.only(t), ""))
}

// TestSinks_Level: the level also applies to the records before the configuration. It is info without one.
func TestSinks_Level(t *testing.T) {
	levels := []Level{LevelDebug, LevelInfo, LevelWarn, LevelError, LevelFatal}
	const unconfigured = LevelFatal + 1
	for at, want := range map[Level]string{
		LevelDebug: "debug info warn error fatal", LevelInfo: "info warn error fatal", LevelWarn: "warn error fatal",
		LevelError: "error fatal", LevelFatal: "fatal", LevelNone: "", unconfigured: "info warn error fatal",
	} {
		p := newPlace(t)
		l := New(&p.stderr, "")
		l.Timeout = agenttest.Generous
		all := func() {
			for _, level := range levels {
				l.Logger().Log(t.Context(), level.Level(), level.String()) //nolint:sloglint // one of a few
			}
		}
		all()
		sinks := ""
		if at != unconfigured {
			l.Configure(p.dir, at)
			sinks = strings.TrimSpace(want + " " + want)
		}
		all()
		closeLog(t, l)
		p.want(t, strings.TrimSpace(want+" "+want), sinks)
	}
}

func TestLog_Concurrent(t *testing.T) {
	p := newPlace(t)
	l := p.open(options{RunDir: p.dir})
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			log := l.Logger().With("goroutine", i)
			for n := range 10 {
				log.Info("record", "n", n)
				log.Debug("kept back")
			}
		})
	}
	all.Wait()
	closeLog(t, l)
	relayed := strings.Join(p.only(t), "")
	check.Equal(t, len(messages(t, relayed)), 200, "agent has")
	if relayed != p.stderr.String() || relayed != readFile(t, filepath.Join(p.dir, fileName)) {
		t.Error("sinks differ in their records or in the order of them")
	}
}

func TestLog_FloodOfDebug(t *testing.T) {
	p := newPlace(t)
	l := p.open(options{})
	l.Configure(p.dir, LevelDebug)
	const flood = 1000
	for i := range flood {
		l.Logger().Debug("flood", "number", i, "text", strings.Repeat("x", 1000))
	}
	l.Logger().Error("why the pod failed")
	closeLog(t, l)
	lines := p.only(t)
	if n := len(strings.Join(lines, "")); n > maxKept+1000 {
		t.Errorf("%d bytes relayed", n)
	}
	kept := len(lines) - 2
	if got := decode(t, lines[kept]); got["msg"] != "why the pod failed" {
		t.Errorf("last but one is %v", got)
	}
	notice := decode(t, lines[kept+1])
	if notice["level"] != "warn" || notice["dropped"] != float64(flood-kept) || kept < 100 {
		t.Errorf("kept %d of %d, and the notice is %v", kept, flood, notice)
	}
	if diff := cmp.Diff(strings.Join(lines, ""), p.stderr.String()); diff != "" {
		t.Errorf("stderr (-agent +stderr):\n%s", diff)
	}
}

func TestLog_FloodOfErrors(t *testing.T) {
	out := logged(t, options{Level: LevelError}, func(log *slog.Logger) {
		for range 1000 {
			log.Warn("not wanted")
			log.Error("e", "text", strings.Repeat("x", 1000))
		}
	})
	if last := decode(t, lastLine(out)); last["level"] != "error" || last["dropped"] == nil {
		t.Errorf("the last record is %v", last)
	}
	if len(out) > 2*maxKept+1000 || len(out) < 2*maxKept-2000 {
		t.Errorf("%d bytes were kept", len(out))
	}
}

func TestLog_Scopes(t *testing.T) {
	for text, want := range map[string]Level{
		"debug": LevelDebug, "default:warn": LevelWarn, "other:debug": LevelInfo, "taint:none, all:debug": LevelNone,
		"all:error,default:warn": LevelWarn, "default:warn,all:error": LevelWarn, "all:error,other:debug": LevelError,
	} {
		scopes, err := ParseScopes(text)
		if got := scopes.Of("taint"); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	_, err := ParseScopes("taint:loud,debug,x:")
	for _, want := range []string{`scope "taint", level "loud"`, `scope "x", level ""`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestHandler_ObeysSlog(t *testing.T) {
	var stderr *agenttest.Buffer
	var l *Log
	slogtest.Run(t, func(*testing.T) slog.Handler {
		stderr = &agenttest.Buffer{}
		l = open(options{Stderr: stderr, Now: clock, Timeout: agenttest.Generous})
		return l.Logger().Handler()
	}, func(t *testing.T) map[string]any {
		t.Helper()
		closeLog(t, l)
		record := decode(t, stderr.String())
		if strings.HasSuffix(t.Name(), "/zero-time") {
			// Here the protocol overrides slog: the agent drops a record without a time.
			check.Equal[any](t, record["time"], clock().UTC().Format(timeLayout), "record of the zero time has time")
			delete(record, "time")
		}
		return record
	})
}

type (
	badMarshaler  struct{}
	panicking     struct{}
	torturedError struct{ *int }
	secretive     struct{ token string }
)

func (badMarshaler) MarshalJSON() ([]byte, error) { return []byte("{\n\"a\" : \"\xff\"\n}"), nil }
func (panicking) MarshalJSON() ([]byte, error)    { panic("cannot") }
func (e torturedError) Error() string             { return fmt.Sprint(*e.int) }
func (secretive) LogValue() slog.Value            { return slog.StringValue("redacted") }

func TestRecord_Attributes(t *testing.T) {
	long := strings.Repeat("é", maxText)
	for _, c := range []struct {
		name string
		log  func(*slog.Logger)
		want string // the rest of the line after the message
	}{
		{"invalid_utf8_is_replaced", func(l *slog.Logger) {
			l.Info("m", "k\xff", "v\xc3(", "b", badMarshaler{})
		}, `"k\ufffd":"v\ufffd(","b":{"a":"\ufffd"}`},
		{"lines_stay_lines", func(l *slog.Logger) { l.Info("m", "k\n", "a\r\nb") }, `"k\n":"a\r\nb"`},
		{"values_without_json_become_text", func(l *slog.Logger) {
			l.Info("m", "nan", math.NaN(), "c", make(chan int), "t", time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC))
		}, `"nan":"!ERROR:json: unsupported value: NaN","c":"!ERROR:json: unsupported type: chan int","t":"10000-01-01T00:00:00.000000Z"`},
		{"panics_become_text", func(l *slog.Logger) {
			l.Info("m", "p", panicking{}, "e", torturedError{})
		}, `"p":"!PANIC: cannot","e":"!PANIC: runtime error: invalid memory address or nil pointer dereference"`},
		{"values_that_hide_themselves_stay_hidden", func(l *slog.Logger) {
			l.Info("m", "credential", secretive{"x"})
		}, `"credential":"redacted"`},
		{"joined_errors_are_text", func(l *slog.Logger) {
			l.Info("m", "error", errors.Join(errors.New("a"), errors.New("b")))
		}, `"error":"a\nb"`},
		{"long_text_is_cut", func(l *slog.Logger) { l.Info("m", "a", long) }, `"a":"` + printable.Text(long, maxText) + `"`},
		{"long_errors_are_cut", func(l *slog.Logger) { l.Info("m", "a", errors.New(long)) }, `"a":"` + printable.Text(long, maxText) + `"`},
		{"attributes_of_a_long_line_are_dropped", func(l *slog.Logger) {
			l.Info("m", "a", []string{strings.Repeat("x", maxLine)}, "b", 1)
		}, `"dropped_attributes":2`},
		{"what_is_not_printable_is_escaped", func(l *slog.Logger) {
			l.Info("m", "a\u202e", "\x1b[2J\u009b\x7f\u200b", "b", json.RawMessage(`"`+"\u0085\U000e0041"+`"`))
		}, `"a\u202e":"\u001b[2J\u009b\u007f\u200b","b":"\u0085\udb40\udc41"`},
		{"what_is_escaped_makes_a_line_that_the_agent_takes", func(l *slog.Logger) {
			l.Info("m", "a", strings.Repeat("\x1b", maxText))
		}, `"a":"` + strings.Repeat(`\u001b`, maxText) + `"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := logged(t, options{}, c.log)
			want := `{"time":"2026-05-04T03:02:01.000001Z","level":"info","msg":"m",` + c.want + "}\n"
			check.Diff(t, "result", want, got)
			decode(t, got)
		})
	}
}

func FuzzRecordIsOneJSONLine(f *testing.F) {
	f.Add("pod captured", "pod", "shop/cart-0", []byte(`{"a":[1,2]}`), 0.5, 0)
	f.Add("two\nlines", "level", "none", []byte("{\"a\":\n\"\xff\"}"), math.NaN(), 8)
	f.Add("\xff\xfe", "Time", "\u2028\x00", []byte(`"`), math.Inf(-1), -4)
	f.Add("", "", "", []byte(nil), 1e300, 13)
	f.Fuzz(func(t *testing.T, msg, key, text string, raw []byte, number float64, level int) {
		line := logged(t, options{Level: lowest + 1, Scope: text}, func(log *slog.Logger) {
			log = log.With("k"+key, text).WithGroup("g"+key).With(key, number)
			log.Log(context.Background(), slog.Level(level), msg, key, json.RawMessage(raw), //nolint:sloglint // any message
				"group", slog.GroupValue(slog.Any(key, map[string]any{key: text})), text, slog.GroupValue(slog.Int(key, level)), "bytes", raw)
		})
		if strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "}\n") {
			t.Fatalf("not one line: %q", line)
		}
		if !utf8.ValidString(line) || len(line) > maxLine {
			t.Fatalf("not UTF-8, or of %d bytes: %q", len(line), line)
		}
		var own struct{ Level, Time, Msg string }
		if err := json.Unmarshal([]byte(line), &own); err != nil {
			t.Fatalf("not JSON: %v: %q", err, line)
		}
		if own.Level != Level(level).String() || own.Time != "2026-05-04T03:02:01.000001Z" {
			t.Fatalf("own keys overwritten: %q", line)
		}
		if utf8.ValidString(msg) && len(msg) <= maxText && own.Msg != msg {
			t.Fatalf("message %q became %q", msg, own.Msg)
		}
	})
}
