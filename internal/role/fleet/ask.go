package fleet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// exec returns kubectl's arguments for a command in an agent.
func (f *fleet) exec(a agent, command ...string) []string {
	return slices.Concat([]string{"exec", "-n", a.namespace, "pod/" + a.pod, "-c", f.container, "--", "istio-cni"}, command)
}

// one runs a command in one agent and returns its output. Exit codes other than those in ok are errors, except with an
// empty list: a command prints it if nothing matches its flags.
func (f *fleet) one(ctx context.Context, a agent, ok []int, command ...string) (text []byte, code int, err error) {
	if a.problem != "" {
		return nil, 0, errors.New(a.problem)
	}
	text, err = f.kubectl(ctx, maxList, f.exec(a, command...)...)
	if ended, is := errors.AsType[*exitError](err); is {
		empty := ended.code == applet.ExitError && bytes.HasSuffix(bytes.TrimRight(text, "} \n"), []byte("[]"))
		if code = ended.code; empty || slices.Contains(ok, code) && len(text) > 0 {
			return text, code, nil
		}
	}
	if cause := explained(err, command[0]); cause != nil {
		err = cause
	}
	return text, code, err
}

// pass runs a command in an agent and passes its output on.
func (f *fleet) pass(ctx context.Context, a agent, form output.Form, command ...string) (int, error) {
	screen := &output.Screen{Call: f.Call}
	out := io.Writer(screen)
	if form != output.Table {
		out = printable.NewWriter(f.Stdout)
	}
	stderr, err := f.stream(ctx, out, f.exec(a, command...)...)
	_ = screen.Close()
	cause := explained(err, command[0])
	if late, is := errors.AsType[*lateError](err); is {
		cause = late
	}
	if cause != nil {
		return 0, fmt.Errorf("node %s: %w", a.name(), f.withVersion(ctx, a, cause))
	}
	_, _ = io.WriteString(f.Stderr, stderr)
	ended, is := errors.AsType[*exitError](err)
	switch {
	case !is:
		return applet.ExitOK, err
	case slices.Contains([]int{applet.ExitUsage, applet.ExitPast, applet.ExitUnknown}, ended.code):
		return ended.code, nil
	}
	return applet.ExitError, nil
}

// unknownCommand is the error of an agent that does not know a command (applet.Program).
const unknownCommand = ": unknown command "

// explained returns an error that names the cause if kubectl ended because the agent has another version, else nil.
func explained(err error, command string) error {
	ended, is := errors.AsType[*exitError](err)
	switch {
	case is && strings.Contains(ended.stderr, unknownCommand):
		return otherVersion(fmt.Errorf("it has no command %s", command))
	case is && strings.Contains(ended.stderr, "executable file not found"):
		return fmt.Errorf("its agent has no program istio-cni, it is no agent of this project or an old one; see --agent-selector: %w", err)
	}
	return nil
}

// versionError is the error of an agent whose version differs from this program's.
type versionError struct{ error }

func otherVersion(cause error) error {
	own := applet.Version()
	return &versionError{fmt.Errorf("its agent is of another version than kubectl-istio_cni (%s), upgrade the older one: %w", own, cause)}
}

// withVersion adds the agent's version to a versionError.
func (f *fleet) withVersion(ctx context.Context, a agent, err error) error {
	if _, is := errors.AsType[*versionError](err); is {
		if text, failed := f.kubectl(ctx, maxProblems, f.exec(a, "version")...); failed == nil {
			err = fmt.Errorf("%w; the agent is %s", err, printable.Text(strings.TrimSpace(string(text)), maxShown/4))
		}
	}
	return err
}

// node is a node in the output.
type node = document.Node

// failed reports whether some node did not answer.
func failed(nodes []node) bool {
	return slices.ContainsFunc(nodes, func(n node) bool { return n.Error != "" })
}

// each calls one for all agents, at most parallel at once. It names the nodes that did not answer or have no agent, and returns all of
// them. If the agents refuse the arguments, the error is a usageError.
func (f *fleet) each(ctx context.Context, parallel int, one func(context.Context, agent) error) ([]node, error) {
	agents, err := f.agents(ctx)
	if err != nil {
		return nil, err
	}
	var work sync.WaitGroup
	var mu sync.Mutex
	var without []node
	var notice string
	if len(f.nodes) == 0 && !f.ignoreWithout {
		work.Go(func() { without, notice = f.without(ctx, agents) })
	}
	problems := make([]error, len(agents))
	answered := 0
	slots := make(chan struct{}, parallel)
	f.show(answered, len(agents))
	for i, a := range agents {
		work.Go(func() {
			// The slot is free when the output is no longer in memory.
			slots <- struct{}{}
			defer func() { <-slots }()
			problem := f.withVersion(ctx, a, one(ctx, a))
			mu.Lock()
			defer mu.Unlock()
			problems[i] = problem
			answered++
			f.show(answered, len(agents))
			if f.steps {
				result := "done"
				if problem != nil {
					result = "failed"
				}
				_, _ = fmt.Fprintf(f.Stderr, "node %s: %s, %d of %d\n", printable.Text(a.name(), maxShown), result, answered, len(agents))
			}
		})
	}
	work.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	nodes, err := f.report(agents, problems)
	if err == nil && notice != "" {
		_, _ = fmt.Fprintf(f.Stderr, "error: %s; --ignore-nodes-without-agent accepts that\n", notice)
	}
	return append(nodes, without...), err
}

// report names the nodes that did not answer.
func (f *fleet) report(agents []agent, problems []error) ([]node, error) {
	refused := slices.IndexFunc(problems, func(err error) bool {
		ended, is := errors.AsType[*exitError](err)
		return is && ended.code == applet.ExitUsage
	})
	if refused >= 0 && !slices.Contains(problems, nil) {
		return nil, &usageError{problems[refused]}
	}
	nodes := make([]node, len(agents))
	for i, a := range agents {
		nodes[i].Name = a.node
		if a.pod != "" {
			nodes[i].Agent = a.key()
		}
		if problems[i] != nil {
			nodes[i].Error = printable.Text(problems[i].Error(), maxShown)
			_, _ = fmt.Fprintf(f.Stderr, "node %s: no answer: %s\n", printable.Text(a.name(), maxShown), nodes[i].Error)
		}
	}
	return nodes, nil
}

// without returns the nodes that have no agent, whose pods are not seen, and a text about them, "" without such nodes.
func (f *fleet) without(ctx context.Context, agents []agent) (nodes []node, notice string) {
	all, err := f.namesOf(ctx, "get", "nodes", "-l", "kubernetes.io/os=linux")
	if err != nil {
		notice = fmt.Sprintf("the nodes without a node agent are not known: kubectl get nodes: %v", err)
		return []node{{Error: notice}}, notice
	}
	var names []string
	for _, name := range all {
		if !slices.ContainsFunc(agents, func(a agent) bool { return a.node == name }) {
			names, nodes = append(names, name), append(nodes, node{Name: name, Error: noAgent})
		}
	}
	if len(names) > 0 {
		notice = "nodes without a node agent, whose pods are not seen: " + printable.Some(names, mostNames)
	}
	return nodes, notice
}

// show prints how many nodes have answered, in one line that it overwrites and removes at the end.
func (f *fleet) show(answered, all int) {
	if f.progress == nil || f.steps || all == 1 {
		return
	}
	text := strconv.Itoa(answered) + "/" + strconv.Itoa(all) + " nodes"
	if answered == all {
		text = strings.Repeat(" ", len(text)) + "\r"
	}
	_, _ = fmt.Fprint(f.progress, "\r"+text)
}

// Bounds of the data in memory, in bytes except rows and levels.
const (
	// maxObjects bounds an answer of the API server, which is trusted.
	maxObjects = 64 << 20
	// maxBundle bounds a node's bundle before compression, maxFile a file in it, maxFiles their number and maxDirs the parts of their names;
	// atOnce bounds the files in memory.
	maxBundle = 48 << 20
	maxFile   = 16 << 20
	maxFiles  = 10_000
	maxDirs   = 2
	atOnce    = 5
	// maxLog bounds the log of a proxy, in bytes, maxEvents the events in a file.
	maxLog    = 16 << 20
	maxEvents = 1000
	// maxList bounds a node's list; maxRow, maxLevels and maxRows bound its rows: as YAML a row can be hundreds of times as large, and each
	// level indents all lines in it. maxAll and maxAllRows bound the rows of all nodes: Kubernetes is made for 150,000 pods.
	maxList    = 8 << 20
	maxRow     = 256 << 10
	maxLevels  = 16
	maxRows    = 20_000
	maxAll     = 64 << 20
	maxAllRows = 200_000
	// parallel bounds the processes of kubectl, each with a list.
	parallel = 10
	// maxProblems bounds the error output, maxShown a printed part of it.
	maxProblems = 64 << 10
	maxShown    = 1 << 10
)

// exitError is an exit of kubectl with a code other than 0: 1 is its own or a container command's, others are a command's.
type exitError struct {
	code int
	// stderr is the beginning of the error output.
	stderr string
}

// Error returns the last lines of the error output without those of kubectl's log, which repeat the error before it, if there are others.
func (e *exitError) Error() string {
	const most = 3
	var lines, log []string
	for line := range strings.Lines(e.stderr) {
		switch line = strings.TrimSpace(line); {
		case strings.Contains(line, " memcache.go:"):
			log = append(log, line)
		case line != "":
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		lines = log
	}
	text := strings.Join(lines[max(0, len(lines)-most):], "; ")
	return printable.Text(cmp.Or(strings.TrimPrefix(text, "error: "), fmt.Sprintf("kubectl ended with exit code %d", e.code)), maxShown)
}

// kubectl runs kubectl with the user's flags, for at most f.timeout, and returns at most most bytes of its standard output.
func (f *fleet) kubectl(ctx context.Context, most int, args ...string) ([]byte, error) {
	out := &limited{most: most}
	_, err := f.stream(ctx, out, args...)
	if out.full {
		err = fmt.Errorf("more than %d MiB of output", most>>20)
	}
	return out.text, err
}

// stream is like start, and ends the command after f.timeout.
func (f *fleet) stream(ctx context.Context, out io.Writer, args ...string) (stderr string, err error) {
	ctx, cancel := f.limit(ctx)
	defer cancel()
	stderr, err = f.start(ctx, out, args...)
	if late, is := errors.AsType[*lateError](context.Cause(ctx)); is {
		err = late
	}
	return stderr, err
}

// limit bounds a context by f.timeout.
func (f *fleet) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, f.timeout, &lateError{f.timeout})
}

// lateError is the error of kubectl when f.timeout has passed.
type lateError struct{ after time.Duration }

func (e *lateError) Error() string { return fmt.Sprintf("no answer within %s", e.after) }

// start runs kubectl until it or the context ends, and returns the beginning of its error output, without the line that repeats
// the exit code of a command in a container, and with this program's help for the agent's. The error is an exitError if kubectl was started.
func (f *fleet) start(ctx context.Context, out io.Writer, args ...string) (stderr string, err error) {
	program := "kubectl"
	if other, _ := f.Getenv("KUBECTL"); other != "" {
		program = other
	}
	cmd := exec.CommandContext(ctx, program, slices.Concat(f.options.kubectl, args)...) //nolint:gosec // the user's kubectl
	// A credential plugin that outlives kubectl holds its pipes. The rest of a bundle in a pipe may take long to write.
	const patience = 2 * time.Second
	cmd.WaitDelay = patience
	if f.steps {
		cmd.WaitDelay = f.timeout
	}
	problems := &limited{most: maxProblems, drops: true}
	cmd.Stdout, cmd.Stderr = out, problems
	err = cmd.Run()
	for line := range strings.Lines(string(problems.text)) {
		if !strings.HasPrefix(line, "command terminated with exit code ") {
			stderr += strings.Replace(line, "see istio-cni ", "see kubectl istio-cni ", 1)
		}
	}
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		err = &exitError{ended.ExitCode(), stderr}
	case errors.Is(err, exec.ErrNotFound):
		err = fmt.Errorf("%w (install kubectl, or name it by the variable KUBECTL)", err)
	case err != nil:
		err = fmt.Errorf("running kubectl: %w", err)
	}
	return stderr, err
}

// limited is a buffer of most bytes. It drops further bytes if drops is set, else it fails. It has no ReadFrom, with which io.Copy would
// exceed the limit.
type limited struct {
	most        int
	text        []byte
	drops, full bool
}

func (l *limited) Write(text []byte) (int, error) {
	l.full = l.full || len(l.text)+len(text) > l.most
	switch {
	case !l.full:
		l.text = append(l.text, text...)
	case !l.drops:
		return 0, io.ErrShortWrite
	}
	return len(text), nil
}
