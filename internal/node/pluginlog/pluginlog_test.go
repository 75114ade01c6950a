package pluginlog

import (
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

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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
	request := p.only(t)
	check.Equal(t, request.target, "POST /log", "request is")
	check.Diff(t, "relayed", want, strings.Join(request.lines, ""))
}

func TestSinks_Level(t *testing.T) {
	all := []Level{LevelDebug, LevelInfo, LevelWarn, LevelError, LevelFatal}
	for at, want := range map[Level]string{
		LevelDebug: "debug info warn error fatal",
		LevelInfo:  "info warn error fatal",
		LevelWarn:  "warn error fatal",
		LevelError: "error fatal",
		LevelFatal: "fatal",
		LevelNone:  "",
	} {
		t.Run(at.String(), func(t *testing.T) {
			p := newPlace(t)
			l := p.open(options{RunDir: p.dir, Level: at})
			for _, level := range all {
				l.Logger().Log(t.Context(), level.Level(), level.String()) //nolint:sloglint // one of a few
			}
			closeLog(t, l)
			p.want(t, want, want)
		})
	}
}

func TestSinks_EarlyRecords(t *testing.T) {
	for _, c := range []struct {
		name          string
		configure     bool
		level         Level
		stderr, sinks string
	}{
		{"debug", true, LevelDebug, "a A b B last", "a A b B last"},
		{"info", true, LevelInfo, "A B last", "A B last"},
		{"error", true, LevelError, "last", "last"},
		{"not_configured", false, LevelInfo, "A B last", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlace(t)
			l := New(&p.stderr, "")
			l.Timeout = agenttest.Generous
			log := l.Logger()
			log.Debug("a")
			log.Info("A")
			if c.configure {
				l.Configure(p.dir, c.level)
			}
			log.Debug("b")
			log.Info("B")
			log.Error("last")
			closeLog(t, l)
			p.want(t, c.stderr, c.sinks)
		})
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
	relayed := strings.Join(p.only(t).lines, "")
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
	lines := p.only(t).lines
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
