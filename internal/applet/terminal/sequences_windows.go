package terminal

import (
	"os"

	"golang.org/x/sys/windows"
)

// sequences has the console interpret ANSI sequences, and reports whether it does: Windows 10 and later.
func sequences(f *os.File, _ bool) bool {
	var mode uint32
	console := windows.Handle(f.Fd())
	return windows.GetConsoleMode(console, &mode) == nil &&
		windows.SetConsoleMode(console, mode|windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING) == nil
}
