// Package program runs the program under test as a process.
//
// It promises that the process is killed when the test process exits for any reason, and that each line of its output can be
// read as soon as it is written. It never sends a signal to any other process.
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

// Program is a running process.
type Program struct {
	command *exec.Cmd
	ended   chan struct{}
	out     writer
}

// Start runs a program with PATH and env as its only environment.
func Start(env []string, path string, args ...string) (*Program, error) {
	p := &Program{command: exec.CommandContext(context.Background(), path, args...), ended: make(chan struct{})}
	p.command.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, env...)
	p.command.Stdout, p.command.Stderr = &p.out, &p.out
	p.command.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the forking thread exits, so the thread must live as long as the process.
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

// Signal sends a signal; it does nothing if the process has exited.
func (p *Program) Signal(signal os.Signal) { _ = p.command.Process.Signal(signal) }

// PID returns the id of the process.
func (p *Program) PID() int { return p.command.Process.Pid }

// Ended returns a channel that is closed when the process has exited and all of its output was read.
func (p *Program) Ended() <-chan struct{} { return p.ended }

// Status waits for the exit and returns the exit code, -1 if a signal killed the process.
func (p *Program) Status() int {
	<-p.ended
	return p.command.ProcessState.ExitCode()
}

// Lines returns the lines that the process has written so far to stdout and stderr.
func (p *Program) Lines() []string {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return slices.Clone(p.out.lines)
}

// Records returns the lines so far, each decoded as a JSON object.
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

// writer splits output into lines.
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
