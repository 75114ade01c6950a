package printable_test

import (
	"bytes"
	"encoding/json"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// hostile has the characters that must never reach a terminal, by name.
var hostile = map[string]string{
	"escape": "\x1b[2J", "bell": "\a", "carriage return": "\r", "NUL": "\x00", "DEL": "\x7f", "CSI of C1": "\u009b2J",
	"NEL": "\u0085", "byte 0x9b alone": "\x9b2J", "half a rune": "\xe2\x80", "surrogate": "\xed\xa0\x80",
	"right-to-left override": "\u202e", "isolate": "\u2066", "mark": "\u200f", "Arabic letter mark": "\u061c",
	"zero-width space": "\u200b", "joiner": "\u200d", "word joiner": "\u2060", "byte order mark": "\ufeff", "soft hyphen": "\u00ad",
	"line separator": "\u2028", "paragraph separator": "\u2029", "tag": "\U000e0041", "combining": "a\u0301",
	"variation selector": "\ufe0f", "Hangul filler": "\u3164", "half-width filler": "\uffa0", "no-break space": "\u00a0",
	"private use": "\ue000", "not assigned": "\U000f0000", "grapheme joiner": "\u034f", "interlinear": "\ufff9",
}

func clean(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !printable.Is(r) })
}

func TestText_Hostile(t *testing.T) {
	for name, bad := range hostile {
		t.Run(name, func(t *testing.T) {
			text := "a" + bad + "b"
			for how, got := range map[string]string{
				"Text": printable.Text(text, 100), "Quote": printable.Quote(text, 100), "Lines": string(printable.Lines([]byte(text))),
				"cut": printable.Text(strings.Repeat(bad, 99), 50),
			} {
				if !clean(got) || !strings.Contains(got, `\u`) {
					t.Errorf("%s: %q", how, got)
				}
			}
			var out bytes.Buffer
			if _, err := io.Copy(printable.NewWriter(&out), iotest.OneByteReader(strings.NewReader(text+"\n"))); err != nil {
				t.Error(err)
			}
			if got := out.String(); !clean(strings.TrimSuffix(got, "\n")) || !strings.HasPrefix(got, "a") || !strings.HasSuffix(got, "b\n") {
				t.Errorf("a writer: %q", got)
			}
		})
	}
}

func TestText_Printable(t *testing.T) {
	const text = `Grüße, 世界 "…" \ <&> 🙂`
	check.Equal(t, printable.Text(text, 100), text)
	check.Equal(t, printable.Quote(`a"b\`+"\n", 100), `"a\"b\\\n"`)
	check.Equal(t, string(printable.Lines([]byte("a\tb\nc"))), "a\tb\nc")
	check.Equal(t, printable.Text("a\tb\nc", 100), `a\tb\nc`)
}

func TestText_Bound(t *testing.T) {
	for _, unit := range []string{"x", "\x1b", "世", `"`, "\U000e0041"} {
		for n := range 120 {
			text := strings.Repeat(unit, n)
			for _, most := range []int{40, 100} {
				for _, got := range []string{printable.Text(text, most), printable.Quote(text, most)} {
					if len(got) > most || !clean(got) {
						t.Fatalf("%d times %q within %d: %d bytes: %q", n, unit, most, len(got), got)
					}
				}
			}
		}
	}
	check.Equal(t, printable.Text(strings.Repeat("x", 1<<20), 40), "xxxxxxxxxxxxxxxx… (1048560 bytes more)")
}

// The cost of a long text depends only on the bound.
func TestText_LongIsNotCopied(t *testing.T) {
	text := strings.Repeat("\x1b", 8<<20)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_ = printable.Text(text, 256)
	runtime.ReadMemStats(&after)
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 64<<10 {
		t.Errorf("%d bytes", bytes)
	}
}

// FuzzLines: Lines keeps the meaning of a JSON document.
func FuzzLines(f *testing.F) {
	for _, bad := range hostile {
		f.Add(bad)
	}
	f.Fuzz(func(t *testing.T, text string) {
		document, err := json.MarshalIndent(map[string]string{"k" + text: text}, "", "  ")
		check.OK(t, err)
		var before, after map[string]string
		safe := printable.Lines(document)
		check.OK(t, json.Unmarshal(document, &before))
		check.OK(t, json.Unmarshal(safe, &after), safe)
		for k, v := range before {
			check.Equal(t, after[k], v, "after it")
		}
		for line := range strings.Lines(string(safe)) {
			if !clean(strings.TrimSuffix(line, "\n")) {
				t.Errorf("%q", line)
			}
		}
	})
}
