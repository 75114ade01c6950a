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
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// fleet is one run of the plugin.
type fleet struct {
	applet.Call
	options
	screen Screen
}

// Bounds of what is held in memory, in bytes but for rows and levels.
const (
	// maxObjects bounds an answer of the API server, which is trusted.
	maxObjects = 64 << 20
	// maxBundle bounds the bundle of a node, which has 32 MiB of files at most, and atOnce the number that are held.
	maxBundle = 40 << 20
	atOnce    = 3
	// maxList bounds the list of a node, maxRow, maxLevels and maxRows its rows: as YAML a row can be hundreds of times as large, and each
	// level indents all lines in it. maxAll and maxAllRows bound the rows of all nodes: Kubernetes is made for 150,000 pods.
	maxList    = 8 << 20
	maxRow     = 256 << 10
	maxLevels  = 16
	maxRows    = 20_000
	maxAll     = 64 << 20
	maxAllRows = 200_000
	// parallel bounds the processes of kubectl, each with a list.
	parallel = 10
	// maxProblems bounds the error output, maxShown what is shown of it.
	maxProblems = 64 << 10
	maxShown    = 1 << 10
)

// exitError is the end of kubectl with another code than 0: 1 is its own or that of a command in a container, others are a command's.
type exitError struct {
	code int
	// stderr is the beginning of the error output.
	stderr string
}

// Error has the last lines, without those that only repeat the exit code.
func (e *exitError) Error() string {
	const most = 3
	var lines []string
	for line := range strings.Lines(e.stderr) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	text := strings.Join(lines[max(0, len(lines)-most):], "; ")
	return printable.Text(cmp.Or(strings.TrimPrefix(text, "error: "), fmt.Sprintf("kubectl ended with exit code %d", e.code)), maxShown)
}

// kubectl runs kubectl with the user's flags, for f.timeout at most, and returns its standard output, most bytes of it.
func (f *fleet) kubectl(ctx context.Context, most int, args ...string) ([]byte, error) {
	late := fmt.Errorf("no answer within %s", f.timeout)
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, late)
	defer cancel()
	out := &limited{most: most}
	err := f.start(ctx, out, io.Discard, args...)
	switch {
	case out.full:
		err = fmt.Errorf("more than %d MiB of output", most>>20)
	case errors.Is(context.Cause(ctx), late):
		err = late
	}
	return out.text, err
}

// start runs kubectl until it ends or the context does. The error is an exitError if it began.
func (f *fleet) start(ctx context.Context, out, problems io.Writer, args ...string) error {
	program := "kubectl"
	if other, _ := f.Getenv("KUBECTL"); other != "" {
		program = other
	}
	cmd := exec.CommandContext(ctx, program, slices.Concat(f.options.kubectl, args)...) //nolint:gosec // the user's kubectl
	// A credential plugin that outlives kubectl holds its pipes.
	const patience = 2 * time.Second
	cmd.WaitDelay = patience
	stderr := &notices{to: problems}
	cmd.Stdout, cmd.Stderr = out, stderr
	err := cmd.Run()
	stderr.end()
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		return &exitError{ended.ExitCode(), stderr.text.String()}
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w (install kubectl, or name it by the variable KUBECTL)", err)
	case err != nil:
		return fmt.Errorf("running kubectl: %w", err)
	}
	return nil
}

// limited is a buffer that fails above most bytes. It has no ReadFrom, by which io.Copy would pass the limit.
type limited struct {
	most int
	text []byte
	full bool
}

func (l *limited) Write(text []byte) (int, error) {
	if l.full = l.full || len(l.text)+len(text) > l.most; l.full {
		return 0, io.ErrShortWrite
	}
	l.text = append(l.text, text...)
	return len(text), nil
}

// notices passes the error output of kubectl on, line by line, and keeps its beginning. It drops the line by which kubectl repeats the
// exit code, and everything from an agent that does not know the command, as a list of its commands follows.
type notices struct {
	to      io.Writer
	text    bytes.Buffer
	partial []byte
	unknown bool
}

func (n *notices) Write(text []byte) (int, error) {
	n.partial = append(n.partial, text...)
	for {
		at := bytes.IndexByte(n.partial, '\n')
		if at < 0 && len(n.partial) < maxProblems {
			return len(text), nil
		}
		if at < 0 {
			at = len(n.partial) - 1
		}
		n.line(n.partial[:at+1])
		n.partial = n.partial[at+1:]
	}
}

func (n *notices) line(text []byte) {
	if bytes.HasPrefix(text, []byte("command terminated with exit code ")) {
		return
	}
	if n.text.Len()+len(text) <= maxProblems {
		n.text.Write(text)
	}
	if n.unknown = n.unknown || bytes.Contains(text, []byte(unknownCommand)); !n.unknown {
		_, _ = n.to.Write(text)
	}
}

func (n *notices) end() {
	if len(n.partial) > 0 {
		n.line(n.partial)
	}
}
