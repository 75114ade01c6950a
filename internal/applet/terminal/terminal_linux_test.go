package terminal_test

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/applet/terminal"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestTerminal_ColumnsAndColours: neither a pipe, a terminal that shows none nor a user who wants none gets colours.
func TestTerminal_ColumnsAndColours(t *testing.T) {
	t.Parallel()
	screen := open(t)
	check.Equal(t, terminal.Columns(screen), 80, "a terminal without a size has")
	check.OK(t, unix.IoctlSetWinsize(int(screen.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 132}))
	check.Equal(t, terminal.Columns(screen), 132, "columns")
	reader, pipe, err := os.Pipe()
	check.OK(t, err)
	t.Cleanup(func() { _, _ = reader.Close(), pipe.Close() })
	check.Equal(t, terminal.Columns(pipe), 0, "a pipe is a terminal")
	for _, tt := range []struct {
		file *os.File
		env  map[string]string
		want bool
	}{
		{screen, nil, true},
		{screen, map[string]string{"NO_COLOR": "", "TERM": "xterm"}, true},
		{screen, map[string]string{"NO_COLOR": "0"}, false},
		{screen, map[string]string{"TERM": "dumb"}, false},
		{pipe, map[string]string{"TERM": "xterm"}, false},
	} {
		got := terminal.Colours(tt.file, func(name string) (string, bool) { text, set := tt.env[name]; return text, set })
		check.Equal(t, got, tt.want, tt.file.Name(), tt.env)
	}
}

// open makes a pseudoterminal.
func open(t *testing.T) *os.File {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	check.OK(t, err)
	t.Cleanup(func() { _ = master.Close() })
	check.OK(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	check.OK(t, err)
	screen, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	check.OK(t, err)
	t.Cleanup(func() { _ = screen.Close() })
	return screen
}
