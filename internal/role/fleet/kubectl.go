package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// fleet is one run of the plugin.
type fleet struct {
	applet.Call
	options
}

// agent is the pod of a node agent.
type agent struct {
	namespace, pod, node string
	// problem is why it cannot be used, "" if it runs.
	problem string
}

// kubectl starts kubectl with the user's flags. The result is its standard output, up to maxOutput bytes.
func (f *fleet) kubectl(ctx context.Context, args ...string) ([]byte, int, error) {
	var out, problems limited
	code, err := f.start(ctx, nil, &out, &problems, args...)
	if err != nil {
		text := strings.TrimSpace(problems.String())
		return out.Bytes(), code, fmt.Errorf("kubectl %s: %w: %s", args[0], err, printable.Text(cmp.Or(text, "no error text"), maxProblem))
	}
	return out.Bytes(), code, nil
}

// start runs kubectl until it ends. The exit code of a command in a container is no error; that of kubectl itself is 1, with a text.
func (f *fleet) start(ctx context.Context, in io.Reader, out, problems io.Writer, args ...string) (int, error) {
	cmd := exec.CommandContext(ctx, "kubectl", slices.Concat(f.options.kubectl, args)...) //nolint:gosec // the user's kubectl
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, problems
	err := cmd.Run()
	if ended := (*exec.ExitError)(nil); errors.As(err, &ended) && ended.ExitCode() > 0 {
		return ended.ExitCode(), err
	}
	return 0, err
}

// Bounds of the output that is held in memory, and of an error's text.
const (
	maxOutput  = 64 << 20
	maxProblem = 2 << 10
)

// limited is a buffer that fails above maxOutput.
type limited struct{ bytes.Buffer }

func (l *limited) Write(text []byte) (int, error) {
	if l.Len()+len(text) > maxOutput {
		return 0, fmt.Errorf("more than %d MiB of output", maxOutput>>20)
	}
	return l.Buffer.Write(text)
}

// agents finds the node agents by their labels.
func (f *fleet) agents(ctx context.Context) ([]agent, error) {
	where := []string{"get", "pods", "-l", f.selector, "-o", "json", "--all-namespaces"}
	if f.namespace != "" {
		where = append(where[:len(where)-1], "-n", f.namespace)
	}
	text, _, err := f.kubectl(ctx, where...)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Namespace, Name string }
			Spec     struct{ NodeName string }
			Status   struct{ Phase string }
		}
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("kubectl get pods: reading its output: %w", err)
	}
	var all []agent
	for _, item := range list.Items {
		a := agent{namespace: item.Metadata.Namespace, pod: item.Metadata.Name, node: item.Spec.NodeName}
		if item.Status.Phase != "Running" {
			a.problem = "the agent's pod is " + cmp.Or(item.Status.Phase, "in no phase")
		}
		if len(f.nodes) == 0 || slices.Contains(f.nodes, a.node) {
			all = append(all, a)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no node agent was found by the label selector %q%s", f.selector, f.scope())
	}
	slices.SortFunc(all, func(a, b agent) int { return strings.Compare(a.node, b.node) })
	return all, nil
}

func (f *fleet) scope() string {
	text := ""
	if f.namespace != "" {
		text = fmt.Sprintf(" in namespace %q", f.namespace)
	}
	if len(f.nodes) > 0 {
		text += fmt.Sprintf(" on the nodes %q", f.nodes)
	}
	return text
}

// exec are kubectl's arguments for a command in an agent.
func (f *fleet) exec(a agent, command ...string) []string {
	return slices.Concat([]string{"exec", "-n", a.namespace, a.pod, "-c", f.container, "--", "istio-cni"}, command)
}

// parallel bounds the processes of kubectl.
const parallel = 16

// each runs a command in all agents and calls done with the output of each, one call at a time. It reports how many nodes did
// not answer, each with its problem. Exit codes besides those of ok are problems.
func (f *fleet) each(ctx context.Context, command []string, ok []int, done func(agent, []byte) error) (failed int, err error) {
	agents, err := f.agents(ctx)
	if err != nil {
		return 0, err
	}
	var work sync.WaitGroup
	var mu sync.Mutex
	var answered atomic.Int64
	slots := make(chan struct{}, parallel)
	for _, a := range agents {
		work.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			text, err := f.one(ctx, a, command, ok)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				err = done(a, text)
			}
			f.progress(answered.Add(1), len(agents))
			if err != nil {
				failed++
				_, _ = fmt.Fprintf(f.Stderr, "node %s: no answer: %v\n", a.node, err)
			}
		})
	}
	work.Wait()
	return failed, ctx.Err()
}

// one runs a command in one agent.
func (f *fleet) one(ctx context.Context, a agent, command []string, ok []int) ([]byte, error) {
	if a.problem != "" {
		return nil, errors.New(a.problem)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no answer within %s", f.timeout))
	defer cancel()
	text, code, err := f.kubectl(ctx, f.exec(a, command...)...)
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if err != nil && slices.Contains(ok, code) {
		err = nil
	}
	return text, err
}

// progress shows how many nodes have answered, in one line that is overwritten.
func (f *fleet) progress(answered int64, all int) {
	if f.Terminal != nil && f.Terminal() > 0 && all > 1 {
		end := "\r"
		if int(answered) == all {
			end = "\r\x1b[K"
		}
		_, _ = fmt.Fprintf(f.Stderr, "%d of %d nodes%s", answered, all, end)
	}
}
