package pluginlog

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseLevel(t *testing.T) {
	for text, want := range map[string]Level{
		"": LevelInfo, "debug": LevelDebug, "info": LevelInfo, "warn": LevelWarn, "error": LevelError,
		"fatal": LevelFatal, "none": LevelNone,
	} {
		got, err := ParseLevel(text)
		if err != nil || got != want {
			t.Errorf("ParseLevel(%q) = %v, %v; want %v", text, got, err, want)
		}
		if text != "" && got.String() != text {
			t.Errorf("level %q prints as %q", text, got)
		}
	}
	for _, text := range []string{"INFO", "warning", "trace", " info", "0"} {
		got, err := ParseLevel(text)
		want := fmt.Sprintf("parsing log level %q: want one of debug, info, warn, error, fatal, none", text)
		if err == nil || err.Error() != want {
			t.Errorf("ParseLevel(%q): error %v, want %s", text, err, want)
		}
		if got != LevelInfo {
			t.Errorf("ParseLevel(%q) = %v, want the level to fall back to", text, got)
		}
	}
}

func TestEverySinkHasTheDocumentedForm(t *testing.T) {
	agent := startAgent(t)
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, RunDir: agent.dir, Scope: "cni-plugin", Now: clock, Patience: generous})
	log := l.Logger().With("pod", "shop/cart-0", "if", "eth0")
	log.Info("pod captured", "containers", 2, "capture", true, slog.Group("uid", "proxy", 1337, "none", nil))
	log.WithGroup("rules").Warn("rules <replaced> & \"kept\"",
		"took", 1500*time.Millisecond, "range", netip.MustParsePrefix("10.0.0.0/8"), "error", errors.New("exit status 4"))
	logAt(l, LevelFatal, "panic\nrecovered", "ratio", 0.5, "at", time.Unix(0, 0).UTC(), "ports", []int{80, 443})
	want := `{"level":"info","time":"2026-05-04T03:02:01.000001Z","msg":"pod captured","scope":"cni-plugin",` +
		`"pod":"shop/cart-0","if":"eth0","containers":2,"capture":true,"uid.proxy":1337,"uid.none":null}
{"level":"warn","time":"2026-05-04T03:02:01.000001Z","msg":"rules <replaced> & \"kept\"","scope":"cni-plugin",` +
		`"pod":"shop/cart-0","if":"eth0","rules.took":"1.5s","rules.range":"10.0.0.0/8","rules.error":"exit status 4"}
{"level":"fatal","time":"2026-05-04T03:02:01.000001Z","msg":"panic\nrecovered","scope":"cni-plugin",` +
		`"ratio":0.5,"at":"1970-01-01T00:00:00Z","ports":[80,443]}
`
	if diff := cmp.Diff(want, stderr.String()); diff != "" {
		t.Errorf("stderr before Close (-want +got):\n%s", diff)
	}
	closeLog(t, l)
	if diff := cmp.Diff(want, stderr.String()); diff != "" {
		t.Errorf("stderr after Close (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, readFile(t, filepath.Join(agent.dir, fileName))); diff != "" {
		t.Errorf("file (-want +got):\n%s", diff)
	}

	request := agent.only(t)
	if got := request.method + " " + request.host + request.path; got != "POST unix/log" {
		t.Errorf("request is %q", got)
	}
	if request.contentType != "application/json" {
		t.Errorf("content type is %q", request.contentType)
	}
	relayed := strings.Replace(want, `"level":"fatal"`, `"level":"error"`, 1) // the agent drops the level fatal
	if diff := cmp.Diff(relayed, strings.Join(request.lines, "")); diff != "" {
		t.Errorf("relayed (-want +got):\n%s", diff)
	}
	if len(request.kept) != 3 {
		t.Errorf("agent kept %d of 3 records", len(request.kept))
	}
}

func TestLevelDecidesWhatEachSinkGets(t *testing.T) {
	all := []Level{LevelDebug, LevelInfo, LevelWarn, LevelError, LevelFatal}
	for at, want := range map[Level]string{
		LevelDebug: "debug info warn error fatal",
		LevelInfo:  "info warn error fatal",
		LevelWarn:  "warn error fatal",
		LevelError: "error fatal",
		LevelFatal: "fatal",
		LevelNone:  "",
	} {
		for _, configured := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v configured %v", at, configured), func(t *testing.T) {
				agent := startAgent(t)
				var stderr bytes.Buffer
				l := New(Options{Stderr: &stderr, RunDir: agent.dir, Level: at, Patience: generous})
				if configured {
					l.Configure(agent.dir, at)
				}
				for _, level := range all {
					logAt(l, level, level.String())
				}
				closeLog(t, l)
				if got := strings.Join(messages(t, stderr.String()), " "); got != want {
					t.Errorf("stderr has %q, want %q", got, want)
				}
				if want == "" {
					if n := len(agent.all()); n != 0 {
						t.Errorf("%d requests for no records", n)
					}
					if _, err := os.Stat(filepath.Join(agent.dir, fileName)); err == nil {
						t.Error("a file for no records")
					}
					return
				}
				if got := strings.Join(messages(t, strings.Join(agent.only(t).lines, "")), " "); got != want {
					t.Errorf("agent has %q, want %q", got, want)
				}
				if got := strings.Join(messages(t, readFile(t, filepath.Join(agent.dir, fileName))), " "); got != want {
					t.Errorf("file has %q, want %q", got, want)
				}
			})
		}
	}
}

func TestEarlyRecordsReachTheSinksConfiguredLater(t *testing.T) {
	for _, c := range []struct {
		name          string
		level         Level
		stderr, sinks string
	}{
		{"a_lower_level_brings_what_was_kept_back", LevelDebug, "A a b B last", "a A b B last"},
		{"the_same_level_brings_the_same", LevelInfo, "A B last", "A B last"},
		{"a_higher_level_holds_for_them_too", LevelError, "A last", "last"},
	} {
		t.Run(c.name, func(t *testing.T) {
			agent := startAgent(t)
			var stderr bytes.Buffer
			l := New(Options{Stderr: &stderr, Patience: generous})
			log := l.Logger()
			log.Debug("a")
			log.Info("A")
			if got := strings.Join(messages(t, stderr.String()), " "); got != "A" {
				t.Errorf("stderr has %q before Configure", got)
			}
			l.Configure(agent.dir, c.level)
			log.Debug("b")
			log.Info("B")
			log.Error("last")
			closeLog(t, l)
			if got := strings.Join(messages(t, stderr.String()), " "); got != c.stderr {
				t.Errorf("stderr has %q, want %q", got, c.stderr)
			}
			if got := strings.Join(messages(t, strings.Join(agent.only(t).lines, "")), " "); got != c.sinks {
				t.Errorf("agent has %q, want %q", got, c.sinks)
			}
			if got := strings.Join(messages(t, readFile(t, filepath.Join(agent.dir, fileName))), " "); got != c.sinks {
				t.Errorf("file has %q, want %q", got, c.sinks)
			}
		})
	}
}

func TestLaterConfigureReplacesTheEarlierOne(t *testing.T) {
	first, second := startAgent(t), startAgent(t)
	l := New(Options{RunDir: first.dir, Patience: generous})
	l.Configure(first.dir, LevelError)
	l.Logger().Error("told to the last one only")
	l.Configure(second.dir, LevelInfo)
	closeLog(t, l)
	if got := len(first.all()); got != 0 {
		t.Errorf("the replaced agent had %d requests", got)
	}
	if _, err := os.Stat(filepath.Join(first.dir, fileName)); err == nil {
		t.Error("the replaced directory has a file")
	}
	if got := len(second.only(t).lines); got != 1 {
		t.Errorf("the agent had %d records", got)
	}
}

func TestSecondCloseDoesNothing(t *testing.T) {
	agent := startAgent(t)
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, RunDir: agent.dir, Patience: generous})
	l.Logger().Info("before")
	closeLog(t, l)
	l.Logger().Info("after")
	l.Configure(agent.dir, LevelDebug)
	closeLog(t, l)
	if got := strings.Join(agent.only(t).lines, ""); strings.Contains(got, "after") {
		t.Errorf("agent has %q", got)
	}
	if diff := cmp.Diff([]string{"before", "after"}, messages(t, stderr.String())); diff != "" {
		t.Errorf("stderr (-want +got):\n%s", diff)
	}
}

func TestZeroOptionsLogNowhere(t *testing.T) {
	l := New(Options{})
	l.Logger().Error("heard by nobody")
	l.Configure("", LevelDebug)
	closeLog(t, l)
}

func TestOneLogServesManyGoroutines(t *testing.T) {
	agent := startAgent(t)
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, RunDir: agent.dir, Patience: generous})
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			log := l.Logger().With("goroutine", i)
			for n := range 10 {
				log.Info("record", "n", n)
				log.Debug("kept back")
			}
			l.Configure(agent.dir, LevelInfo)
		})
	}
	all.Wait()
	closeLog(t, l)
	relayed := strings.Join(agent.only(t).lines, "")
	if got := len(messages(t, relayed)); got != 200 {
		t.Errorf("agent has %d records, want 200", got)
	}
	if relayed != stderr.String() || relayed != readFile(t, filepath.Join(agent.dir, fileName)) {
		t.Error("sinks differ in their records or in the order of them")
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
