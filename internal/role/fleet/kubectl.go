package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

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

// Error has the last lines.
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
	_, err := f.start(ctx, out, args...)
	switch {
	case out.full:
		err = fmt.Errorf("more than %d MiB of output", most>>20)
	case errors.Is(context.Cause(ctx), late):
		err = late
	}
	return out.text, err
}

// start runs kubectl until it ends or the context does, and returns the beginning of its error output, without the line that repeats
// the exit code of a command in a container. The error is an exitError if kubectl began.
func (f *fleet) start(ctx context.Context, out io.Writer, args ...string) (stderr string, err error) {
	program := "kubectl"
	if other, _ := f.Getenv("KUBECTL"); other != "" {
		program = other
	}
	cmd := exec.CommandContext(ctx, program, slices.Concat(f.options.kubectl, args)...) //nolint:gosec // the user's kubectl
	// A credential plugin that outlives kubectl holds its pipes.
	const patience = 2 * time.Second
	cmd.WaitDelay = patience
	problems := &limited{most: maxProblems, drops: true}
	cmd.Stdout, cmd.Stderr = out, problems
	err = cmd.Run()
	for line := range strings.Lines(string(problems.text)) {
		if !strings.HasPrefix(line, "command terminated with exit code ") {
			stderr += line
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

// limited is a buffer of most bytes. Further ones are dropped or, as drops says, an error. It has no ReadFrom, by which io.Copy would
// pass the limit.
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
