package pluginlog

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBufferDropsTheLowestLevelFirstAndInItTheLatest(t *testing.T) {
	for _, c := range []struct {
		name  string
		level Level
		add   string // each letter a record of one byte: debug, info, warn, error; upper case is three bytes
		want  string // "level:number" is the notice
	}{
		{"all_fit", LevelDebug, "dided", "dided"},
		{"late_debug_is_dropped", LevelDebug, "diddidd", "diddi warn:2"},
		{"debug_makes_room_for_info", LevelDebug, "ddddi i", "dddii warn:1"},
		{"an_error_takes_the_latest_of_the_lowest", LevelDebug, "iwdidE", "iwE warn:3"},
		{"an_error_goes_up_to_the_warnings", LevelDebug, "wwwwwE", "wwE warn:3"},
		{"the_first_of_equals_stay", LevelDebug, "eeeeeee", "eeeee error:2"},
		{"what_cannot_fit_evicts_nobody", LevelDebug, "ddeeeE", "ddeee error:1"},
		{"dropped_below_the_level_is_not_told", LevelInfo, "dddddiid", "ii"},
		{"the_notice_obeys_the_level", LevelError, "wwwwwwe", "e"},
		{"the_level_holds_at_the_end", LevelError, "diwe", "e"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := buffer{limit: 5}
			levels := map[string]Level{"d": LevelDebug, "i": LevelInfo, "w": LevelWarn, "e": LevelError}
			for letter := range strings.SplitSeq(strings.ReplaceAll(c.add, " ", ""), "") {
				line := letter
				if letter != strings.ToLower(letter) {
					line = strings.Repeat(letter, 3)
				}
				b.add(record{level: levels[strings.ToLower(letter)], line: []byte(line)})
				if b.size != len(join(b.records)) || b.size > b.limit {
					t.Fatalf("size %d of limit %d, holds %q", b.size, b.limit, join(b.records))
				}
			}
			got := string(join(b.take(c.level, func(level Level, n int) []byte {
				return fmt.Appendf(nil, " %v:%d", level, n)
			})))
			if diff := cmp.Diff(c.want, strings.ReplaceAll(got, "EEE", "E")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if b.size != 0 || len(b.records) != 0 || len(b.dropped) != 0 {
				t.Error("not empty after take")
			}
		})
	}
}

func TestFloodOfDebugKeepsTheError(t *testing.T) {
	agent := startAgent(t)
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, Patience: generous})
	l.Configure(agent.dir, LevelDebug)
	const flood = 1000
	for i := range flood {
		l.Logger().Debug("flood", "number", i, "text", strings.Repeat("x", 1000))
	}
	l.Logger().Error("why the pod failed")
	closeLog(t, l)
	lines := agent.only(t).lines
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
	if got := len(messages(t, stderr.String())); got != flood+1 {
		t.Errorf("stderr has %d records, want all", got)
	}
}
