package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/applet/terminal"
)

// title begins a section, unless the demo was interrupted.
func (d *demo) title(text string) {
	if d.Context().Err() != nil {
		panic("interrupted")
	}
	d.line("\n%s", d.paint("1;34", "== "+text))
}

// show runs a command in a terminal like this one, or of 80 columns without colour, and prints its output.
func (d *demo) show(cmd *exec.Cmd) string {
	screen, user, err := openTerminal(terminal.Columns(os.Stdout))
	if err != nil { // a machine without /dev/ptmx
		text, _ := cmd.CombinedOutput()
		d.text(string(text))
		return string(text)
	}
	defer screen.Close() //nolint:errcheck // nothing is kept
	cmd.Stdout, cmd.Stderr = user, user
	if !d.colour {
		cmd.Env = append(os.Environ(), "NO_COLOR=1") //nolint:forbidigo // for the command
	}
	err = cmd.Start()
	_ = user.Close()
	if err != nil {
		panic(err)
	}
	text, _ := io.ReadAll(screen) // ends with EIO
	_ = cmd.Wait()                // its exit code is read
	out := strings.ReplaceAll(string(text), "\r\n", "\n")
	d.text(out)
	return out
}

// openTerminal makes a pseudoterminal: what the program behind user writes is read from screen.
func openTerminal(columns int) (screen, user *os.File, err error) {
	if columns == 0 {
		columns = 80
	}
	if screen, err = os.OpenFile("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	fd := int(screen.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(columns)})
	}
	if err == nil {
		user, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), unix.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		_ = screen.Close()
	}
	return screen, user, err
}
