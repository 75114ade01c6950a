package pluginlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/slogtest"
	"time"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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
			// Here the protocol wins over slog: the agent drops a record without a time.
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
		{"siblings_do_not_share_attributes", func(l *slog.Logger) {
			parent := l.With("a", 1, "b", 2, "c", 3)
			one, other := parent.With("d", 4), parent.With("e", 5)
			_ = other
			one.Info("m")
		}, `"a":1,"b":2,"c":3,"d":4`},
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

func TestRecord_LongMessage(t *testing.T) {
	text := "x" + strings.Repeat("é", maxText)
	out := logged(t, options{}, func(log *slog.Logger) { log.Info(text) }) //nolint:sloglint // not a constant on purpose
	check.Equal[any](t, decode(t, out)["msg"], printable.Text(text, maxText), "message is")
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
