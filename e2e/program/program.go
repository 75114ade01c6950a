// Package program runs the program under test as a process.
//
// It promises that the process ends with the test's own, whatever ends that, and that each line which it writes is there to
// be looked at as soon as it was written. It never sends a signal to anything but that process.
//
// Start reading at Start.
package program

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Program is a process.
type Program struct {
	command *exec.Cmd
	ended   chan struct{}
	out     writer
}

// Start runs a program with an environment that has nothing but env.
func Start(env []string, path string, args ...string) (*Program, error) {
	p := &Program{command: exec.CommandContext(context.Background(), path, args...), ended: make(chan struct{})}
	p.command.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, env...)
	p.command.Stdout, p.command.Stderr = &p.out, &p.out
	p.command.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the thread ends that forked, so it lives as long as the process.
		runtime.LockOSThread()
		defer close(p.ended)
		err := p.command.Start()
		started <- err
		if err == nil {
			_ = p.command.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %q: %w", path, err)
	}
	return p, nil
}

// Signal does nothing to a process that has ended.
func (p *Program) Signal(signal os.Signal) { _ = p.command.Process.Signal(signal) }

// Ended is closed when the process has ended and all that it wrote was taken in.
func (p *Program) Ended() <-chan struct{} { return p.ended }

// Status is the exit code, -1 for one that was ended by a signal. It waits for the end.
func (p *Program) Status() int {
	<-p.ended
	return p.command.ProcessState.ExitCode()
}

// Lines are those that the process has written so far, to stdout and stderr alike.
func (p *Program) Lines() []string {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return slices.Clone(p.out.lines)
}

// Records are the lines so far, each a JSON object.
func Records[T any](p *Program) (all []T, err error) {
	for _, line := range p.Lines() {
		var one T
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			return nil, fmt.Errorf("a line of the log is not JSON: %q", line)
		}
		all = append(all, one)
	}
	return all, nil
}

// writer cuts into lines.
type writer struct {
	mu    sync.Mutex
	rest  []byte
	lines []string
}

func (w *writer) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, text...)
	for {
		line, rest, found := bytes.Cut(w.rest, []byte("\n"))
		if !found {
			return len(text), nil
		}
		w.lines, w.rest = append(w.lines, string(line)), rest
	}
}
