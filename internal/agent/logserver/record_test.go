package logserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestRelay_Plugin(t *testing.T) {
	b := start(t, func(o *Options) { o.Level = slog.LevelDebug })
	l := b.plugin(io.Discard, pluginlog.LevelDebug)
	log := l.Logger()
	log.Debug("deciding")
	log.Info("decided", "pod", "web-1", "count", 3, "ratio", 0.5, "capture", true, "ports", []int{80, 443}, "none", nil)
	log.Warn("two\nlines", slog.Group("dns", "udp", 53))
	log.Error("gave up", "scope", "forged", "error", fmt.Errorf("reading %q", "x"))
	log.Log(t.Context(), pluginlog.LevelFatal.Level(), "fatal")
	l.Close()
	want := []map[string]any{
		{"level": "DEBUG", "msg": "deciding", "scope": "cni-plugin"},
		{
			"level": "INFO", "msg": "decided", "scope": "cni-plugin", "pod": "web-1", "count": 3.0, "ratio": 0.5,
			"capture": true, "ports": []any{80.0, 443.0}, "none": nil,
		},
		{"level": "WARN", "msg": "two\nlines", "scope": "cni-plugin", "dns": map[string]any{"udp": 53.0}},
		{"level": "ERROR", "msg": "gave up", "scope": "cni-plugin", "error": `reading "x"`},
		{"level": "ERROR", "msg": "fatal", "scope": "cni-plugin"},
	}
	got := b.relayed(t)
	for _, record := range got {
		delete(record, "time") // TestRelay_ReferencePlugin checks the time
	}
	check.Diff(t, "result", want, got)
	check.Diff(t, "counted", map[string]int{"relayed": 5}, b.outcomes())
}

// TestRelay_ReferencePlugin also checks that the last of equal keys wins.
func TestRelay_ReferencePlugin(t *testing.T) {
	b := start(t, nil)
	b.mustPost(t,
		`{"level":"info","time":"2026-05-04T03:02:01.123456Z","msg":"istio-cni cmdAdd with k8s args  \n","pod":"db/0","pod":"web/1"}`,
		`{"time":"2026-05-04T05:02:01.123456789+02:00","level":"error",`+
			`"scope":"cni-plugin","msg":"<failed> & gave up","big":12345678901234567890}`+"\n")
	want := `{"time":"2026-05-04T03:02:01.123456Z","level":"INFO","msg":"istio-cni cmdAdd with k8s args",` +
		`"scope":"cni-plugin","pod":"web/1"}` + "\n" +
		`{"time":"2026-05-04T05:02:01.123456789+02:00","level":"ERROR","msg":"<failed> & gave up",` +
		`"scope":"cni-plugin","big":12345678901234567890}` + "\n"
	check.Diff(t, "result", want, b.records.String())
}

// TestRelay_Level: the fixture's agent logs errors only.
func TestRelay_Level(t *testing.T) { // W-30
	for level, want := range map[slog.Level]string{
		slog.LevelDebug: "debug info warn error", slog.LevelInfo: "info warn error", slog.LevelWarn: "warn error",
	} {
		t.Run(level.String(), func(t *testing.T) {
			b := start(t, func(o *Options) { o.Level = level })
			b.mustPost(t, line("debug", "debug", ""), line("info", "info", ""), line("warn", "warn", ""), line("error", "error", ""))
			var got []string
			for _, record := range b.relayed(t) {
				got = append(got, record["msg"].(string))
			}
			check.Diff(t, "result", want, strings.Join(got, " "))
			check.Diff(t, "counted", map[string]int{"relayed": len(got)}, b.outcomes())
		})
	}
}

// TestRelay_Bodies: the server refuses an unreadable batch as a whole, and skips bad records among good ones.
func TestRelay_Bodies(t *testing.T) {
	good := `"{\"level\":\"info\",\"time\":\"2026-05-04T03:02:01Z\",\"msg\":\"good\"}"`
	type row struct {
		name, body string
		code       int
		want       map[string]int
	}
	rows := []row{
		{"empty_batch", `[]`, 200, map[string]int{}},
		{"null", ` null `, 200, map[string]int{}},
		{"one", "[" + good + "]\n", 200, map[string]int{"relayed": 1}},
		{
			"other_types_among_them", `[` + good + `,1,{"a":[2]},null,` + good + `]`, 200,
			map[string]int{"relayed": 2, "rejected": 3},
		},
		{"nothing", ``, 400, map[string]int{"rejected": 1}},
		{"object", `{"a":` + good + `}`, 400, map[string]int{"rejected": 1}},
		{"text", good, 400, map[string]int{"rejected": 1}},
		{"cut_short", `[` + good + `,` + good, 400, map[string]int{"rejected": 1}},
		{"syntax_at_the_end", `[` + good + `,}`, 400, map[string]int{"rejected": 1}},
		{"something_after_it", `[` + good + `] []`, 400, map[string]int{"rejected": 1}},
		{"too_large", `["` + strings.Repeat("x", maxBody) + `"]`, 413, map[string]int{"rejected": 1}},
		{"too_many", "[" + strings.Repeat(good+",", maxRecords+6) + good + "]", 200, map[string]int{"relayed": maxRecords, "dropped": 7}},
		{
			"smallest_elements", "[0" + strings.Repeat(",0", maxBody/2-4) + "]", 200,
			map[string]int{"rejected": maxRecords, "dropped": maxBody/2 - 3 - maxRecords},
		},
		{"deeply_nested", strings.Repeat("[", 1<<20), 400, map[string]int{"rejected": 1}},
		{"deeply_nested_objects", `[` + strings.Repeat(`{"a":`, 1<<17), 400, map[string]int{"rejected": 1}},
	}
	for name, record := range map[string]string{
		"empty":               "",
		"text":                "hello",
		"null":                "null",
		"array":               "[]",
		"unfinished":          `{"level":"info","time":"2026-05-04T03:02:01Z","msg":"x"`,
		"something_after_it":  strings.TrimSpace(line("info", "good", "")) + `{}`,
		"no_level":            `{"time":"2026-05-04T03:02:01Z","msg":"x"}`,
		"level_none":          line("none", "x", ""),
		"level_of_other_case": line("Info", "x", ""),
		"no_time":             `{"level":"info","msg":"x"}`,
		"time_is_a_number":    `{"level":"info","time":1777777777,"msg":"x"}`,
		"time_of_other_form":  `{"level":"info","time":"04 May 26 03:02 UTC","msg":"x"}`,
		"no_message":          `{"level":"info","time":"2026-05-04T03:02:01Z"}`,
		"message_is_no_text":  `{"level":"info","time":"2026-05-04T03:02:01Z","msg":{"a":1}}`,
		"deeply_nested":       line("info", "x", `,"a":`+strings.Repeat("[", 20000)),
	} {
		text, err := json.Marshal(record)
		check.OK(t, err)
		body := "[" + good + "," + string(text) + "," + good + "]"
		rows = append(rows, row{"record_" + name, body, 200, map[string]int{"relayed": 2, "rejected": 1}})
	}
	for _, c := range rows {
		t.Run(c.name, func(t *testing.T) {
			b := start(t, nil)
			code, err := b.post(t, strings.NewReader(c.body))
			if code != c.code || err != nil {
				t.Errorf("answer %d, %v, want %d", code, err, c.code)
			}
			check.Diff(t, "counted", c.want, b.outcomes())
			for _, record := range b.relayed(t) {
				if record["msg"] != "good" {
					t.Errorf("relayed %v", record)
				}
			}
			check.Equal(t, strings.Count(b.records.String(), "\n"), c.want["relayed"], "relayed")
			b.ordinary(t)
		})
	}
}

func TestRelay_Methods(t *testing.T) {
	b := start(t, nil)
	for target, want := range map[string]int{"GET /log": 405, "POST /": 404, "POST /cmdadd": 404} {
		method, path, _ := strings.Cut(target, " ")
		w := httptest.NewRecorder()
		b.handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, batchOf(t)))
		check.Equal(t, w.Code, want, target)
	}
}

// handlers are the handlers of the agent's log, whose output package applet makes printable.
var handlers = map[string]func(*bytes.Buffer) slog.Handler{
	"json": func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(printable.NewWriter(b), nil) },
	"text": func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(printable.NewWriter(b), nil) },
}

func TestRelay_BatchStaysTogether(t *testing.T) {
	b := start(t, nil)
	const senders, records = 20, 50
	var all sync.WaitGroup
	for sender := range senders {
		all.Go(func() {
			l := b.plugin(io.Discard, pluginlog.LevelInfo)
			for range records {
				l.Logger().Info("record", "sender", sender)
			}
			l.Close()
		})
	}
	all.Wait()
	got := b.relayed(t)
	if len(got) != senders*records {
		t.Fatalf("%d records, want %d", len(got), senders*records)
	}
	changes := 0
	for i := 1; i < len(got); i++ {
		if got[i]["sender"] != got[i-1]["sender"] {
			changes++
		}
	}
	check.Equal(t, changes, senders-1, "the sender changes", "times in", senders, "batches")
}

// TestRelay_Rate: the server relays the burst of a flood, and then records at the rate. The log has the number of lost records.
func TestRelay_Rate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFixture(func(o *Options) { o.Records = slog.DiscardHandler })
		const size = 128 << 10
		long := line("info", "x", "")
		long = line("info", strings.Repeat("x", size-len(long)+1), "")
		body, err := json.Marshal([]string{line("debug", "costs nothing", ""), long, long, long, long})
		check.OK(t, err)
		expect := func(batches, relayed, dropped int) {
			t.Helper()
			for range batches {
				w := httptest.NewRecorder()
				b.handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/log", bytes.NewReader(body)))
				check.Equal(t, w.Code, http.StatusOK)
			}
			if got := b.outcomes(); got["relayed"] != relayed || got["dropped"] != dropped {
				t.Errorf("counted %v, want %d relayed and %d dropped", got, relayed, dropped)
			}
		}
		expect(byteBurst/size/4, byteBurst/size, 0)
		expect(2, byteBurst/size, 8)
		time.Sleep(time.Second)
		expect(3, byteBurst/size+byteRate/size, 12)
		if got := b.log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "dropped=4 rejected=0") {
			t.Errorf("logged %q", got)
		}
		time.Sleep(time.Minute)
		expect(33, 2*byteBurst/size+byteRate/size, 16)
		if got := b.log.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, "dropped=8") {
			t.Errorf("logged %q", got)
		}
	})
}

const quoted = `"{\"level\":\"info\",\"time\":\"2026-05-04T03:02:01Z\",\"msg\":\"x\"}"`

// TestRelay_Memory measures the heap while clients send the largest bodies.
func TestRelay_Memory(t *testing.T) {
	const most = 140 << 20
	b := start(t, func(o *Options) { o.Records = slog.DiscardHandler })
	used := func() int {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	runtime.GC()
	calm, peak := used(), 0
	stop := agenttest.Go(t, func(ctx context.Context) {
		for tick := time.NewTicker(time.Millisecond); ctx.Err() == nil; <-tick.C {
			peak = max(peak, used())
		}
	})
	bodies := []string{
		"[" + strings.Repeat(quoted+",", maxBody/(len(quoted)+1)-10) + quoted + "]", // many records
		`["` + strings.Repeat("x", maxBody-100) + `"]`,                              // one record
		"[" + strings.Repeat(`"",`, maxBody/3-100) + `""]`,                          // many empty records
		strings.Repeat("[", maxBody-100),
	}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() { _, _ = b.post(t, strings.NewReader(bodies[i%len(bodies)])) })
	}
	all.Wait()
	// A slow machine still reads requests whose clients have given up, one at a time.
	agenttest.Eventually(t, "an ordinary batch arrives afterwards", func() bool {
		code, _ := b.post(t, strings.NewReader("["+quoted+"]"))
		return code == http.StatusOK
	})
	stop()
	t.Logf("calm %d MiB, under attack %d MiB", calm>>20, peak>>20)
	if peak > calm+most {
		t.Errorf("%d MiB", (peak-calm)>>20)
	}
}

// FuzzParse: any record is one line, without control characters.
func FuzzParse(f *testing.F) {
	forged := "x\n" + `{"time":"2026-05-04T03:02:01Z","level":"ERROR","msg":"forged"}` +
		"\r\x1b[2J\x00\u2028\u0085\u009b\x7f\u202e" + ` level=ERROR`
	record, err := json.Marshal(map[string]any{
		"level": "info", "time": "2026-05-04T03:02:01Z", "msg": forged,
		"value": forged, forged: "key", "nested": map[string]any{forged: []string{forged}},
	})
	check.OK(f, err)
	f.Add(strings.ReplaceAll(string(record), `\u2028`, "\u2028")) // sent raw, like the other characters
	f.Add(line("info", "x", `,"a":{"b":[1,"\u009b"]},"scope":"y"`))
	f.Add(`{"level":"warn","time":"2026-05-04T05:02:01+02:00","msg":"","":null}`)
	f.Fuzz(func(t *testing.T, text string) {
		record, err := parse(text)
		if err != nil {
			return
		}
		for name, handler := range handlers {
			var out bytes.Buffer
			if err := handler(&out).Handle(t.Context(), record); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if strings.Count(out.String(), "\n") != 1 || strings.ContainsFunc(out.String(), func(r rune) bool {
				return r < 0x20 && r != '\n' || r >= 0x7f && r <= 0x9f || r == 0x202e || r == 0x2028
			}) {
				t.Errorf("%s writes %q", name, out.String())
			}
		}
	})
}
