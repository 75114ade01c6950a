package cluster

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// initProcess is the test's handle of the first process of the namespaces.
type initProcess struct {
	pid   int
	run   directory
	ended chan struct{}

	mu       sync.Mutex
	commands *json.Encoder
	pipe     interface{ Close() error }
	answer   *json.Decoder
}

// startInit starts the first process in new namespaces and waits until it has mounted its file systems.
func (m *Machine) startInit(ctx context.Context) error {
	name := nameInit
	// Each boot of the node has another boot ID.
	if err := os.WriteFile(m.run.bootID(), []byte(strings.ToLower(rand.Text())+"\n"), 0o644); err != nil {
		return fmt.Errorf("writing a boot ID: %w", err)
	}
	if m.cluster.options.Tier == Node {
		if err := makeCgroups(m.run.cgroups(), string(m.run)); err != nil {
			return err
		}
		name = nameEnter
	}
	log, err := os.OpenFile(m.run.log("init"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("opening a log: %w", err)
	}
	defer log.Close() //nolint:errcheck // the process has its own
	command := exec.CommandContext(context.WithoutCancel(ctx), "/proc/self/exe")
	command.Args = []string{name, string(m.cluster.options.Tier), string(m.run), m.name}
	command.Env = environment()
	command.Stderr = log
	command.SysProcAttr = &unix.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  unix.SIGKILL,
		Setsid:     true,
	}
	p := &initProcess{run: m.run, ended: make(chan struct{})}
	if err := p.begin(command); err != nil {
		return err
	}
	m.inside = p
	if _, err := p.read(); err != nil {
		return fmt.Errorf("entering the namespaces: %w", err)
	}
	return nil
}

// environment returns the environment of servers and CNI plugins. It is constant: libcni passes its whole environment
// to plugins.
func environment() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
}

// begin starts the process on a thread that lives as long as the process: the kernel sends Pdeathsig at the exit of
// the thread that forked, not of its process.
func (p *initProcess) begin(command *exec.Cmd) error {
	in, err := command.StdinPipe()
	if err != nil {
		return fmt.Errorf("making a pipe: %w", err)
	}
	// StdoutPipe is not used: Wait closes it before the reader is done.
	answers, write, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("making a pipe: %w", err)
	}
	command.Stdout = write
	p.commands, p.pipe, p.answer = json.NewEncoder(in), in, json.NewDecoder(bufio.NewReader(answers))
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer close(p.ended)
		err := command.Start()
		_ = write.Close()
		if err == nil {
			p.pid = command.Process.Pid
		}
		started <- err
		if err == nil {
			_ = command.Wait()
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting the process of the namespaces: %w", err)
	}
	return nil
}

// read returns the next reply, or an error if the process has exited.
func (p *initProcess) read() (reply, error) {
	var answer reply
	if err := p.answer.Decode(&answer); err != nil {
		return answer, fmt.Errorf("the process of the namespaces has ended: %s", tail(p.run.log("init")))
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// send sends a command and returns its reply.
func (p *initProcess) send(o command) (reply, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.commands.Encode(o); err != nil {
		return reply{}, fmt.Errorf("asking the process of the namespaces: %w: %s", err, tail(p.run.log("init")))
	}
	return p.read()
}

// runs reports whether the process was started and has not exited.
func (p *initProcess) runs() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// end kills the first process, and with it the namespaces, and waits until all processes are gone. The channel ended
// is closed after Wait: while it is open, the PID is not reused.
func (p *initProcess) end() error {
	if !p.runs() {
		return nil
	}
	_ = p.pipe.Close()
	if err := unix.Kill(p.pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ending the process of the namespaces: %w", err)
	}
	<-p.ended
	return nil
}

// tail returns the last lines of a log, for an error.
func tail(path string) string {
	const lines = 12
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
