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

// Width returns the number of columns that a text takes on a terminal. It counts two for characters that may be wide.
func Width(text string) int {
	const wide = 0x1100 // the first wide character
	n := 0
	for _, r := range text {
		if n++; r >= wide && !strings.ContainsRune("…→✓✗", r) {
			n++
		}
	}
	return n
}

// Cut shortens a text to a number of columns, at least 3: "…" replaces its middle.
func Cut(text string, columns int) string {
	if Width(text) <= columns {
		return text
	}
	const back = 3 // a third of the room is for the end, which tells names and rules apart
	runes := []rune(text)
	head, tail := 0, len(runes)
	room := columns - 1
	for end := room / back; tail > 0 && Width(string(runes[tail-1])) <= end; {
		tail--
		end -= Width(string(runes[tail]))
		room -= Width(string(runes[tail]))
	}
	for head < tail && Width(string(runes[head])) <= room {
		room -= Width(string(runes[head]))
		head++
	}
	return string(runes[:head]) + "…" + string(runes[tail:])
}

// CutWords cuts each word of a text to a number of columns, 0 for no limit.
func CutWords(text string, columns int) string {
	if columns <= 0 {
		return text
	}
	words := strings.Split(text, " ")
	for i, word := range words {
		words[i] = Cut(word, columns)
	}
	return strings.Join(words, " ")
}

// Wrap breaks a text at blanks into lines of a number of columns, 0 for no limit. The first line begins with begin, the others with
// indent blanks. A longer word gets a longer line.
func Wrap(begin string, indent int, text string, columns int) []string {
	var lines []string
	line, empty := begin, true
	at := Width(begin)
	for word := range strings.SplitSeq(text, " ") {
		width := Width(word)
		if columns > 0 && !empty && at+1+width > columns {
			lines = append(lines, strings.TrimRight(line, " "))
			line, at, empty = strings.Repeat(" ", indent), indent, true
		}
		if !empty {
			line += " "
			at++
		}
		line, at, empty = line+word, at+width, false
	}
	return append(lines, strings.TrimRight(line, " "))
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
		for _, one := range Wrap(line[:blank], blank+indent, CutWords(words, columns-blank-indent), columns) {
			b.WriteString(one + "\n")
		}
	}
	return b.String()
}
