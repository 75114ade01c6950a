package nodetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The agent's default ports, which are free in a network namespace of its own.
const (
	HealthPort     = "8000"
	MonitoringPort = "15014"
)

// Timeout bounds each wait before the test fails.
const Timeout = 60 * time.Second

// Agent is a node agent: a process in the container's view of the node.
type Agent struct {
	tb   testing.TB
	node *Node
	cmd  *exec.Cmd
	// logged is its stdout and stderr.
	logged agenttest.Buffer
	exited chan struct{}
	ended  error
	http   *http.Client
	// health and monitoring are the agent's ports.
	health, monitoring string
}

// Env returns the environment that the DaemonSet sets in the container.
func Env() map[string]string {
	host, port, _ := strings.Cut(APIAddress, ":")
	return map[string]string{
		"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
		"POD_NAMESPACE": Namespace, "POD_NAME": PodName, "NODE_NAME": NodeName,
		"REPAIR_ENABLED": "false", "GOMAXPROCS": "2",
	}
}

// Run runs a command of the agent to its end and returns its exit code; the arguments are as in [Node.Start].
func (n *Node) Run(args ...string) (code int, a *Agent) {
	n.tb.Helper()
	a = n.Start(args...)
	return a.Wait(), a
}

// Listen listens on a TCP port of the node.
func (n *Node) Listen(port string) {
	n.tb.Helper()
	err := n.inNetns(func() error {
		listener, err := (&net.ListenConfig{}).Listen(n.tb.Context(), "tcp", net.JoinHostPort("", port))
		if err == nil {
			n.tb.Cleanup(func() { _ = listener.Close() })
		}
		return err
	})
	check.OK(n.tb, err)
}

// Start starts a node agent as install-cni with arguments. Leading arguments of the form NAME=VALUE are environment variables
// besides [Env]. The agent is killed at the end of the test.
func (n *Node) Start(args ...string) *Agent {
	n.tb.Helper()
	env := Env()
	for len(args) > 0 {
		name, value, is := strings.Cut(args[0], "=")
		if !is || strings.HasPrefix(name, "-") {
			break
		}
		env[name], args = value, args[1:]
	}
	a := &Agent{tb: n.tb, node: n, exited: make(chan struct{}), health: HealthPort, monitoring: MonitoringPort}
	for _, arg := range args {
		switch flag, value, _ := strings.Cut(arg, "="); flag {
		case "--health-port":
			a.health = value
		case "--monitoring-port":
			a.monitoring = value
		}
	}
	a.cmd = exec.CommandContext(context.WithoutCancel(n.tb.Context()), imageAgent, args...) //nolint:gosec // the program under test
	a.cmd.Args[0] = "install-cni"
	a.cmd.Dir = "/"
	for _, name := range slices.Sorted(maps.Keys(env)) {
		a.cmd.Env = append(a.cmd.Env, name+"="+env[name])
	}
	a.cmd.Stdout, a.cmd.Stderr = &a.logged, &a.logged
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	a.http = &http.Client{Transport: &http.Transport{DialContext: a.dial}, Timeout: Timeout}
	started := make(chan error, 1)
	go func() {
		defer close(a.exited)
		// The thread that starts the process must live as long as the process, which is killed with the thread (PR_SET_PDEATHSIG, prctl(2)).
		err := n.as(n.container, func() error {
			if err := a.cmd.Start(); err != nil {
				return err
			}
			started <- nil
			a.ended = a.cmd.Wait()
			return nil
		})
		if a.cmd.Process == nil {
			started <- err // the error that prevented the start
		}
	}()
	check.OK(n.tb, <-started, "starting a node agent")
	n.tb.Cleanup(a.cleanup)
	return a
}

func (a *Agent) cleanup() {
	a.Kill()
	a.http.CloseIdleConnections()
	if a.tb.Failed() {
		a.tb.Logf("node agent %d:\n%s", a.PID(), a.Log())
	}
}

func (a *Agent) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	failed := a.node.inNetns(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, failed
}

// PID returns the id of the process.
func (a *Agent) PID() int { return a.cmd.Process.Pid }

// Log returns the agent's output so far.
func (a *Agent) Log() string { return a.logged.String() }

// Kill sends SIGKILL. The process is gone when Kill returns.
func (a *Agent) Kill() {
	_ = a.cmd.Process.Kill() // it may have ended by itself
	<-a.exited
}

// Terminate sends SIGTERM.
func (a *Agent) Terminate() {
	a.tb.Helper()
	check.OK(a.tb, a.cmd.Process.Signal(syscall.SIGTERM), "terminating the node agent")
}

// Wait waits until the process ends by itself and returns its exit code, -1 after a signal.
func (a *Agent) Wait() int {
	a.tb.Helper()
	Await(a.tb, "the end of the node agent", func() error {
		if a.Running() == nil {
			return errNotYet
		}
		return nil
	})
	return a.cmd.ProcessState.ExitCode()
}

// Running returns an error when the process has ended.
func (a *Agent) Running() error {
	select {
	case <-a.exited:
		return fmt.Errorf("the node agent has ended: %w", errors.Join(errEnded, a.ended))
	default:
		return nil
	}
}

var errEnded = errors.New("it is not running")

// Ask requests a path from one of the agent's ports.
func (a *Agent) Ask(port, path string) (code int, body string, err error) {
	return a.Send(http.MethodGet, port, path, "")
}

// Send sends a request to one of the agent's ports.
func (a *Agent) Send(method, port, path, content string) (code int, body string, err error) {
	url := "http://" + net.JoinHostPort("127.0.0.1", port) + path
	request, err := http.NewRequestWithContext(context.Background(), method, url, strings.NewReader(content))
	if err != nil {
		return 0, "", err
	}
	response, err := a.http.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// Ready returns nil if the agent reports that it is ready.
func (a *Agent) Ready() error {
	if err := a.Running(); err != nil {
		return err
	}
	code, body, err := a.Ask(a.health, "/readyz")
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("not ready: %d %s", code, strings.TrimSpace(body)) //nolint:err113 // for the test's reader
	}
	return err
}

// AwaitReady waits until the agent reports that it is ready.
func (a *Agent) AwaitReady() {
	a.tb.Helper()
	Await(a.tb, "a ready agent", a.Ready)
}

// AwaitLog waits until the log has a text.
func (a *Agent) AwaitLog(text string) {
	a.tb.Helper()
	a.Await(fmt.Sprintf("%q in the agent's log", text), func() bool { return strings.Contains(a.Log(), text) })
}

// Await waits until a condition holds, while the agent runs.
func (a *Agent) Await(what string, holds func() bool) {
	a.tb.Helper()
	Await(a.tb, what, func() error {
		if holds() {
			return nil
		}
		return cmp.Or(a.Running(), errNotYet)
	})
}

var errNotYet = errors.New("not yet")

// Metric returns the value of a series, such as `istio_cni_rewrites_total{artifact="config"}`, in the text format; "" without
// the series.
func (a *Agent) Metric(series string) string {
	_, body, err := a.Ask(a.monitoring, "/metrics")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(body) {
		if value, is := strings.CutPrefix(line, series+" "); is {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Await waits until check returns no error.
func Await(tb testing.TB, what string, check func() error) {
	tb.Helper()
	const often = 2 * time.Millisecond
	var last error
	err := wait.PollUntilContextTimeout(context.Background(), often, Timeout, true, func(context.Context) (bool, error) {
		if last = check(); errors.Is(last, errEnded) {
			return false, last
		}
		return last == nil, nil
	})
	if err != nil {
		tb.Fatalf("waiting for %s: %v: %v", what, err, last)
	}
}
