package logbuffer_test

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/logbuffer"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestBuffer_KeepsLastLines(t *testing.T) {
	const size = 4 << 10
	b := logbuffer.New(size)
	var lines []string
	for i := range 1000 {
		lines = append(lines, fmt.Sprintf("line %d\n", i))
		if n, err := b.Write([]byte(lines[i])); n != len(lines[i]) || err != nil {
			t.Fatal(n, err)
		}
	}
	got := string(b.Since(time.Time{}))
	if len(got) > size || len(got) < size/2-20 || !strings.HasSuffix(strings.Join(lines, ""), got) || !strings.HasPrefix(got, "line") {
		t.Errorf("%d bytes: %q", len(got), got)
	}
	_, _ = b.Write([]byte(strings.Repeat("x", 3*size) + "\n"))
	_, _ = b.Write([]byte("end\n"))
	if got = string(b.Since(time.Time{})); len(got) > size || !strings.HasSuffix(got, "x\nend\n") {
		t.Errorf("%d bytes", len(got))
	}
}

func TestBuffer_Since(t *testing.T) {
	old, now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for name, handler := range map[string]func(*logbuffer.Buffer) slog.Handler{
		"text": func(b *logbuffer.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
		"JSON": func(b *logbuffer.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
	} {
		b := logbuffer.New(1 << 16)
		h := handler(b)
		for at, message := range map[time.Time]string{old: "long ago", now: "just now"} {
			check.OK(t, h.Handle(t.Context(), slog.NewRecord(at, slog.LevelInfo, message, 0)))
		}
		_, _ = b.Write([]byte("a stack trace\n"))
		got := string(b.Since(now))
		if strings.Contains(got, "long ago") || !strings.Contains(got, "just now") || !strings.Contains(got, "a stack trace") {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestBuffer_Allocations(t *testing.T) {
	b := logbuffer.New(64 << 10)
	line := []byte(strings.Repeat("x", 300) + "\n")
	check.Equal(t, testing.AllocsPerRun(10_000, func() { _, _ = b.Write(line) }), 0, "allocations")
}

func TestBuffer_GrowsAsNeeded(t *testing.T) {
	const size = 16 << 20
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	b := logbuffer.New(size)
	for range 10 {
		_, _ = b.Write([]byte("one whole line\n"))
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > size/16 {
		t.Errorf("ten short lines take %d bytes", grown)
	}
}

func TestBuffer_ManyWriters(t *testing.T) {
	b := logbuffer.New(16 << 10)
	var writers sync.WaitGroup
	for range 8 {
		writers.Go(func() {
			for range 1000 {
				_, _ = b.Write([]byte("one whole line\n"))
				check.Equal(t, len(b.Since(time.Time{}))%len("one whole line\n"), 0, "a torn line")
			}
		})
	}
	writers.Wait()
}
