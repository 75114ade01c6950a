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
