// Package printable makes untrusted text safe to show on a terminal, in a log, in an event or as a label, and fits text into columns.
//
// It promises that its output has no control characters (C0, C1, DEL), no format characters (bidirectional controls,
// zero-width characters, tags), no combining or otherwise invisible characters and no invalid UTF-8. It writes each as
// a JSON escape (\u001b), so that a JSON document keeps its meaning, and the reader sees the original bytes.
// [Text] and [Quote] also bound the length.
//
// It never interprets the text.
//
// Start at Text for a value, at NewWriter for a program's output, at Wrap for columns.
package printable

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Is reports whether a terminal only shows the rune, without another effect.
func Is(r rune) bool {
	if r < utf8.RuneSelf {
		return r >= ' ' && r != 0x7f
	}
	return unicode.IsPrint(r) && !unicode.In(r, unicode.Mn, unicode.Me, unicode.Other_Default_Ignorable_Code_Point)
}

// Text returns the text as one printable line of at most most bytes; most is at least 40. The length of the rest replaces
// a truncated rest.
func Text(text string, most int) string {
	return string(appendText(make([]byte, 0, min(len(text), most)), text, most, ""))
}

// Quote is Text between double quotes. It escapes quotes and backslashes, so a text cannot forge its end.
func Quote(text string, most int) string {
	quoted := appendText([]byte{'"'}, text, most-1, `"\`)
	return string(append(quoted, '"'))
}

// Some joins the first texts, which must be safe, and the number of the others.
func Some(texts []string, most int) string {
	if more := len(texts) - most; more > 0 {
		texts = append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, ", ")
}

// appendText appends the escaped text to dst, up to a total of most bytes. It puts a backslash before the runes in special.
func appendText(dst []byte, text string, most int, special string) []byte {
	room := most - len(note(len(text)))
	cut, rest := len(dst), len(text) // where to truncate dst if it gets too long, and how much of the text is missing then
	for at := 0; at < len(text); {
		if len(dst) <= room {
			cut, rest = len(dst), len(text)-at
		}
		r, size := utf8.DecodeRuneInString(text[at:])
		if r < utf8.RuneSelf && strings.ContainsRune(special, r) {
			dst = append(dst, '\\')
		}
		dst = appendRune(dst, r, size)
		if at += size; len(dst) > most {
			return append(dst[:cut], note(rest)...)
		}
	}
	return dst
}

func note(bytes int) string { return "… (" + strconv.Itoa(bytes) + " bytes more)" }

// appendRune appends a decoded rune, escaped unless it is printable.
func appendRune(dst []byte, r rune, size int) []byte {
	switch {
	case r == utf8.RuneError && size <= 1:
		return append(dst, `\ufffd`...)
	case Is(r):
		return utf8.AppendRune(dst, r)
	case r == '\n':
		return append(dst, '\\', 'n')
	case r == '\t':
		return append(dst, '\\', 't')
	case r > 0xffff:
		high, low := utf16.EncodeRune(r) // as in JSON
		return fmt.Appendf(dst, `\u%04x\u%04x`, high, low)
	default:
		return fmt.Appendf(dst, `\u%04x`, r)
	}
}

// NewWriter returns a writer that escapes unprintable runes, except line ends and tabs. A rune may span several writes;
// an incomplete rune at the end of the last write is lost. The writer is safe for concurrent use.
func NewWriter(w io.Writer) io.Writer { return &writer{w: w} }

type writer struct {
	mu sync.Mutex
	w  io.Writer
	// unfinished holds the first bytes of an incomplete rune.
	unfinished []byte
}

// Write passes the whole text on in one write.
func (w *writer) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	clean, unfinished := appendLines(make([]byte, 0, len(text)+utf8.UTFMax), append(w.unfinished, text...))
	w.unfinished = append([]byte(nil), unfinished...)
	if len(clean) > 0 || len(text) == 0 {
		if _, err := w.w.Write(clean); err != nil {
			return 0, err
		}
	}
	return len(text), nil
}

// Lines escapes unprintable runes in a text of several lines, such as a JSON document, and keeps a document's meaning.
func Lines(text []byte) []byte {
	clean, unfinished := appendLines(make([]byte, 0, len(text)), text)
	for range unfinished {
		clean = append(clean, `\ufffd`...)
	}
	return clean
}

func appendLines(dst, text []byte) (clean, unfinished []byte) {
	for len(text) > 0 {
		if !utf8.FullRune(text) {
			return dst, text
		}
		r, size := utf8.DecodeRune(text)
		if r == '\n' || r == '\t' {
			dst = append(dst, text[0])
		} else {
			dst = appendRune(dst, r, size)
		}
		text = text[size:]
	}
	return dst, nil
}
