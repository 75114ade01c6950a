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

// The process of the namespaces is this program again, under one of these names. A cgroup namespace is entered by one
// thread only, so that the program is executed once more after it.
const (
	nameEnter = "istio-cni-e2e-enter"
	nameInit  = "istio-cni-e2e-init"
)

// enclosable says that Main was called.
var enclosable bool //nolint:gochecknoglobals // a property of the program: what its TestMain begins with

// Main is where the process of the namespaces begins; in any other process it does nothing. It must be called first in
// TestMain, and does not return in that process.
func Main() {
	enclosable = true
	var err error
	switch os.Args[0] {
	case nameEnter:
		err = enter(Tier(os.Args[1]), directory(os.Args[2]))
	case nameInit:
		err = serve(Tier(os.Args[1]), directory(os.Args[2]))
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// order is what the test's process asks of the one inside, a JSON value on its standard input. The answer to each is an
// outcome on its standard output. The end of the input ends the cluster.
type command struct {
	// Verb is what to do about the process of a name.
	Verb verb
	Name string
	// Args are the program and its arguments (start); its output goes to the file Log.
	Args []string
	Log  string
	// Respawn starts it again when it ends by itself, as a node's init does.
	Respawn bool
}

type verb string

const (
	verbStart  verb = "start"
	verbKill   verb = "kill" // and wait until it has ended
	verbAlive  verb = "alive"
	verbPause  verb = "pause" // without telling it; all that is said to it waits
	verbResume verb = "resume"
)

type reply struct {
	Error string
	// Alive answers verbAlive; Status is how the process ended, if it has.
	Alive  bool
	Status string
}

// serve is the life of the first process of the namespaces.
func serve(tier Tier, run directory) error {
	if err := mountAll(tier, run); err != nil {
		return err
	}
	s := &supervisor{processes: map[string]*process{}}
	s.ended = sync.NewCond(&s.mu)
	go s.reap()
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	answer := reply{} // the first one says that the mounts are made
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

// supervisor has the processes that were started by name, and adopts all others of the namespace.
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

// signal leaves a process alone that has ended: its number may be another's.
func (p *process) signal(signal unix.Signal) reply {
	if p.status != "" {
		return reply{Error: "it has ended: " + p.status}
	}
	if err := unix.Kill(p.pid, signal); err != nil {
		return reply{Error: fmt.Sprintf("sending %s: %v", signal, err)}
	}
	return reply{}
}

func (s *supervisor) execute(o command) reply {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.processes[o.Name]
	if p == nil && o.Verb != verbStart {
		return reply{Error: fmt.Sprintf("there is no process %q", o.Name)}
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
		_ = p.signal(unix.SIGKILL)
		for p.status == "" {
			s.ended.Wait()
		}
	case verbPause:
		return p.signal(unix.SIGSTOP)
	case verbResume:
		return p.signal(unix.SIGCONT)
	case verbAlive:
		return reply{Alive: p.status == "", Status: p.status}
	default:
		return reply{Error: fmt.Sprintf("unknown command %q", o.Verb)}
	}
	return reply{}
}

// spawn starts a process without keeping a handle of it: it is reaped with all others. It needs the lock, so that reaping
// finds it among the processes.
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

// reap waits for all that ends, for ever.
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

// again starts a process again that has ended by itself, after a while.
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
