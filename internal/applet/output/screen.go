package output

import (
	"bytes"
	"io"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/terminal"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Show writes a text for people, which ends in a line end. On a terminal with colours it paints states and marks.
func Show(c applet.Call, text string) error {
	w := c.Stdout
	text = string(printable.Lines([]byte(text)))
	if screen := c.Screen(); screen != nil {
		w, text = screen, paint(text)
	}
	_, err := io.WriteString(w, text)
	return err
}

// Screen is a writer of texts for people, such as another process's output.
type Screen struct {
	Call applet.Call
	rest []byte
}

// Write shows the complete lines.
func (s *Screen) Write(text []byte) (int, error) {
	const longest = 64 << 10 // of a line that is held back
	s.rest = append(s.rest, text...)
	whole := bytes.LastIndexByte(s.rest, '\n') + 1
	if len(s.rest)-whole > longest {
		whole = len(s.rest)
	}
	err := Show(s.Call, string(s.rest[:whole]))
	s.rest = s.rest[whole:]
	return len(text), err
}

// Close shows the rest.
func (s *Screen) Close() error { return Show(s.Call, string(s.rest)) }

// paint paints the first word of a line if it is a mark, and a state behind the name of a pod or a namespace.
func paint(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		at := 0 // a name may contain the word
		for i, word := range words[:min(len(words), maxState)] {
			at += strings.Index(line[at:], word)
			colour := markOf(word)
			if i > 0 {
				colour = ""
				if before := words[i-1]; strings.ContainsAny(before, "/…") || strings.HasSuffix(before, ":") {
					colour = colourOf(strings.ToLower(strings.TrimSuffix(word, ",")))
				}
			}
			if colour != "" {
				line = line[:at] + colour.Paint(word) + line[at+len(word):]
				break
			}
			at += len(word)
		}
		b.WriteString(line)
	}
	return b.String()
}

// maxState is the number of words up to a state: NODE, POD and STATE of a table.
const maxState = 3

// markOf returns the colour of a word that begins a line, "" unless it is a mark.
func markOf(word string) terminal.Colour {
	switch word {
	case "✓":
		return terminal.Green
	case "✗", "MISSING", "FOREIGN", "EXTRA", "-", "+": // the last two by iptables --verify
		return terminal.Red
	case "!", "?":
		return terminal.Yellow
	case "→", "remedy:":
		return terminal.Bold
	}
	return ""
}

// colourOf returns the colour of a pod's state or a packet's way, "" for any other word.
func colourOf(state string) terminal.Colour {
	switch s := audit.State(state); {
	case s == audit.Captured, state == "as-wanted":
		return terminal.Green
	case s == audit.Outside, s == audit.NotInspected, s == audit.Sandboxed, s == audit.Pending, state == "unknown":
		return terminal.Yellow
	case s.Sentence() != "", state == "past-the-mesh":
		return terminal.Red
	}
	return ""
}

// Fold wraps each line of a text at a number of columns, 0 for no limit, and cuts longer words.
func Fold(text string, columns int) string {
	const indent = 4
	if columns == 0 {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		words := strings.TrimLeft(line, " ")
		blank := len(line) - len(words)
		for _, one := range printable.Wrap(line[:blank], blank+indent, printable.CutWords(words, columns-blank-indent), columns) {
			b.WriteString(one + "\n")
		}
	}
	return b.String()
}
