package cluster

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The first process of the namespaces is the test binary, executed under one of these names. Entering a cgroup
// namespace affects one thread only, so nameEnter executes the binary again as nameInit.
const (
	nameEnter = "istio-cni-e2e-enter"
	nameInit  = "istio-cni-e2e-init"
)

// mainCalled reports whether Main was called.
var mainCalled bool //nolint:gochecknoglobals // one per process, set by TestMain

// Main runs the first process of the namespaces and does not return in it; in any other process it does nothing. It
// must be called first in TestMain.
func Main() {
	mainCalled = true
	var err error
	switch os.Args[0] {
	case nameEnter:
		err = enter(directory(os.Args[2]))
	case nameInit:
		err = serve(Tier(os.Args[1]), directory(os.Args[2]), os.Args[3])
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command is a request from the test process, one JSON value on standard input. The first process writes one reply
// for each to standard output. End of input ends the cluster.
type command struct {
	// Verb is the action on the process called Name.
	Verb verb
	Name string
	// Args are the program and its arguments (start). Its output is appended to the file Log.
	Args []string
	Log  string
	// Respawn starts the process again when it exits by itself, as systemd does on a node.
	Respawn bool
}

type verb string

const (
	verbStart verb = "start"
	verbKill  verb = "kill" // and wait for its exit
	verbAlive verb = "alive"
)

type reply struct {
	Error string
	// Alive is set by verbAlive; Status is the exit status, if the process has exited.
	Alive  bool
	Status string
}

// serve is the main loop of the first process of a machine called name.
func serve(tier Tier, run directory, name string) error {
	if err := mountAll(tier, run, name); err != nil {
		return err
	}
	s := &supervisor{processes: map[string]*process{}}
	s.ended = sync.NewCond(&s.mu)
	go s.reap()
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	answer := reply{} // the first reply reports that the file systems are mounted
	for {
		if err := out.Encode(answer); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		var o command
		if err := in.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("reading a command: %w", err)
		}
		answer = s.execute(o)
	}
}

// supervisor tracks the processes that were started by name, and reaps all others of the PID namespace.
type supervisor struct {
	mu        sync.Mutex
	ended     *sync.Cond
	processes map[string]*process
}

type process struct {
	command command
	pid     int
	status  string // "" while it runs
	killed  bool
}

func (s *supervisor) execute(o command) reply {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.processes[o.Name]
	if p == nil && o.Verb != verbStart {
		return reply{Error: fmt.Sprintf("unknown process %q", o.Name)}
	}
	switch o.Verb {
	case verbStart:
		if p != nil && p.status == "" {
			return reply{Error: fmt.Sprintf("process %q runs already", o.Name)}
		}
		pid, err := spawn(o)
		if err != nil {
			return reply{Error: err.Error()}
		}
		s.processes[o.Name] = &process{command: o, pid: pid}
	case verbKill:
		p.killed = true
		if p.status == "" { // else its PID can be reused
			_ = unix.Kill(p.pid, unix.SIGKILL)
		}
		for p.status == "" {
			s.ended.Wait()
		}
	case verbAlive:
		return reply{Alive: p.status == "", Status: p.status}
	default:
		return reply{Error: fmt.Sprintf("unknown command %q", o.Verb)}
	}
	return reply{}
}

// spawn starts a process and keeps only its PID, because reapOne waits for all children. The caller holds the lock, so
// that reapOne finds the process.
func spawn(o command) (pid int, err error) {
	log, err := os.OpenFile(o.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return 0, fmt.Errorf("opening the log of %q: %w", o.Name, err)
	}
	defer log.Close() //nolint:errcheck // the process has its own
	none, err := os.Open(os.DevNull)
	if err != nil {
		return 0, fmt.Errorf("starting %q: %w", o.Name, err)
	}
	defer none.Close() //nolint:errcheck // only read from
	p, err := os.StartProcess(o.Args[0], o.Args, &os.ProcAttr{
		Dir: "/", Env: os.Environ(), Files: []*os.File{none, log, log},
	})
	if err != nil {
		return 0, fmt.Errorf("starting %q: %w", o.Name, err)
	}
	defer p.Release() //nolint:errcheck // it is known by its number
	return p.Pid, nil
}

// reap waits for exited children in an endless loop.
func (s *supervisor) reap() {
	news := make(chan os.Signal, 1)
	signal.Notify(news, unix.SIGCHLD)
	for range news {
		for s.reapOne() {
		}
	}
}

func (s *supervisor) reapOne() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if err != nil || pid <= 0 {
		return errors.Is(err, unix.EINTR)
	}
	for _, p := range s.processes {
		if p.pid == pid && p.status == "" {
			p.status = describe(status)
			s.ended.Broadcast()
			if p.command.Respawn {
				go s.respawn(p)
			}
		}
	}
	return true
}

// respawn starts a process again that has exited by itself, after a delay.
func (s *supervisor) respawn(p *process) {
	const pause = 500 * time.Millisecond
	time.Sleep(pause)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.killed || s.processes[p.command.Name] != p {
		return
	}
	if pid, err := spawn(p.command); err == nil {
		s.processes[p.command.Name] = &process{command: p.command, pid: pid}
	}
}

func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return "ended by " + status.Signal().String()
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}
