// Package terminal describes the terminal behind a file.
//
// It promises that a pipe or a file has no columns. It never writes.
//
// Start at Columns.
package terminal

import (
	"os"

	"golang.org/x/term"
)

// usual is the width of a terminal that does not know its size, such as a serial line.
const usual = 80

// Columns is the width of the terminal, 0 if the file is none.
func Columns(f *os.File) int {
	fd := int(f.Fd())
	if !term.IsTerminal(fd) {
		return 0
	}
	if width, _, err := term.GetSize(fd); err == nil && width > 0 {
		return width
	}
	return usual
}
