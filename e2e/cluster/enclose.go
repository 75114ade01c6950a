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

// pidOne is the process of the namespaces as the test sees it.
type pidOne struct {
	pid   int
	run   directory
	ended chan struct{}

	mu       sync.Mutex
	commands *json.Encoder
	pipe     interface{ Close() error }
	answer   *json.Decoder
}

// enclose starts it and waits until its mounts are made.
func (c *Cluster) enclose(ctx context.Context) error {
	name := nameInit
	// No two boots of the node have the same.
	if err := os.WriteFile(c.run.bootID(), []byte(strings.ToLower(rand.Text())+"\n"), 0o644); err != nil {
		return fmt.Errorf("writing a boot ID: %w", err)
	}
	if c.options.Tier == Node {
		if err := makeCgroups(c.run.cgroups(), string(c.run)); err != nil {
			return err
		}
		name = nameEnter
	}
	log, err := os.OpenFile(c.run.log("init"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("opening a log: %w", err)
	}
	defer log.Close() //nolint:errcheck // the process has its own
	command := exec.CommandContext(context.WithoutCancel(ctx), "/proc/self/exe")
	command.Args = []string{name, string(c.options.Tier), string(c.run)}
	command.Env = environment()
	command.Stderr = log
	command.SysProcAttr = &unix.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  unix.SIGKILL,
		Setsid:     true,
	}
	p := &pidOne{run: c.run, ended: make(chan struct{})}
	if err := p.begin(command); err != nil {
		return err
	}
	c.inside = p
	if _, err := p.read(); err != nil {
		return fmt.Errorf("entering the namespaces: %w", err)
	}
	return nil
}

// environment is what servers and plugins get: libcni hands all of it to plugins, so nothing of this process is in it.
func environment() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
}

// begin starts the process on a thread that lives as long as it: the kernel sends Pdeathsig when the thread ends that
// forked, not the process.
func (p *pidOne) begin(command *exec.Cmd) error {
	in, err := command.StdinPipe()
	if err != nil {
		return fmt.Errorf("making a pipe: %w", err)
	}
	// Not StdoutPipe, which Wait closes under the reader.
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

// read waits for an answer, or the end of the process.
func (p *pidOne) read() (reply, error) {
	var answer reply
	if err := p.answer.Decode(&answer); err != nil {
		return answer, fmt.Errorf("the process of the namespaces has ended: %s", tail(p.run.log("init")))
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// send gives an order and waits for the answer.
func (p *pidOne) send(o command) (reply, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.commands.Encode(o); err != nil {
		return reply{}, fmt.Errorf("asking the process of the namespaces: %w: %s", err, tail(p.run.log("init")))
	}
	return p.read()
}

// end ends all of the namespaces and waits until nothing of them is left. The process has not been waited for, or it has
// and its number is not used: Wait and this are distinguished by ended.
func (p *pidOne) end() error {
	select {
	case <-p.ended:
		return nil
	default:
	}
	_ = p.pipe.Close()
	if err := unix.Kill(p.pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ending the process of the namespaces: %w", err)
	}
	<-p.ended
	return nil
}

// tail is the end of a log, for an error.
func tail(path string) string {
	const lines = 12
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
