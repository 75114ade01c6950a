package printable

import "strings"

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
