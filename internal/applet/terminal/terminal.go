// Package terminal describes the terminal behind a file, and has the colours of texts on it.
//
// It promises that a pipe or a file has neither columns nor colours. It never writes.
//
// Start at Columns and Colours.
package terminal

import (
	"os"

	"golang.org/x/term"
)

// defaultColumns is the width of a terminal that does not know its size, such as a serial line.
const defaultColumns = 80

// Columns returns the width of a terminal, and 0 for any other file.
func Columns(f *os.File) int {
	fd := int(f.Fd())
	if !term.IsTerminal(fd) {
		return 0
	}
	if width, _, err := term.GetSize(fd); err == nil && width > 0 {
		return width
	}
	return defaultColumns
}

// Colours reports whether a file is a terminal with colours, and the user has not switched them off (https://no-color.org).
func Colours(f *os.File, getenv func(string) (string, bool)) bool {
	off, _ := getenv("NO_COLOR")
	kind, _ := getenv("TERM")
	return off == "" && kind != "dumb" && term.IsTerminal(int(f.Fd()))
}

// Colour is a parameter of the sequence SGR of ECMA-48.
type Colour string

// The colours.
const (
	Red    Colour = "31"
	Green  Colour = "32"
	Yellow Colour = "33"
	Bold   Colour = "1"
)

// Paint returns the text in the colour.
func (c Colour) Paint(text string) string { return "\x1b[" + string(c) + "m" + text + "\x1b[0m" }
