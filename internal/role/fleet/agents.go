package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// agent is the pod of a node agent.
type agent struct {
	// node is "" as long as the pod is on none.
	namespace, pod, node string
	// problem is why it cannot be used, "" if it runs.
	problem string
}

// name is the node, or the pod if it is on none.
func (a agent) name() string {
	if a.node == "" {
		return "of pod " + a.namespace + "/" + a.pod
	}
	return a.node
}

// podObject has the fields of a pod that are read.
type podObject struct {
	Metadata struct{ Namespace, Name, DeletionTimestamp string }
	Spec     struct{ NodeName string }
	Status   struct{ Phase string }
}

// agents finds the node agents by their labels, one for each node: a running one if there is any. more are arguments for kubectl.
func (f *fleet) agents(ctx context.Context, more ...string) ([]agent, error) {
	where := []string{"get", "pods", "-o", "json", "-l", f.selector, "--all-namespaces"}
	if f.namespace != "" {
		where = append(where[:len(where)-1], "-n", f.namespace)
	}
	text, err := f.kubectl(ctx, append(where, more...)...)
	if err != nil {
		return nil, fmt.Errorf("kubectl get pods: %w", err)
	}
	var list struct{ Items []podObject }
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("kubectl get pods: reading its output: %w", err)
	}
	var all []agent
	for _, item := range list.Items {
		a := agent{namespace: item.Metadata.Namespace, pod: item.Metadata.Name, node: item.Spec.NodeName}
		switch {
		case item.Status.Phase != "Running":
			a.problem = "the agent's pod is " + cmp.Or(item.Status.Phase, "in no phase")
		case item.Metadata.DeletionTimestamp != "":
			a.problem = "the agent's pod is terminating"
		}
		if len(f.nodes) == 0 || slices.Contains(f.nodes, a.node) {
			all = append(all, a)
		}
	}
	for _, node := range f.nodes {
		if !slices.ContainsFunc(all, func(a agent) bool { return a.node == node }) {
			all = append(all, agent{node: node, problem: "it has no node agent"})
		}
	}
	if len(all) == 0 && len(more) == 0 {
		return nil, fmt.Errorf("no node agent was found by the label selector %q in %s", f.selector, cmp.Or(f.namespace, "all namespaces"))
	}
	slices.SortFunc(all, func(a, b agent) int {
		return cmp.Or(strings.Compare(a.name(), b.name()), strings.Compare(a.problem, b.problem), strings.Compare(a.pod, b.pod))
	})
	return slices.CompactFunc(all, func(a, b agent) bool { return a.name() == b.name() }), nil
}

// exec are kubectl's arguments for a command in an agent.
func (f *fleet) exec(a agent, command ...string) []string {
	return slices.Concat([]string{"exec", "-n", a.namespace, a.pod, "-c", f.container, "--", "istio-cni"}, command)
}

// one runs a command in one agent. Exit codes besides those of ok are errors.
func (f *fleet) one(ctx context.Context, a agent, ok []int, command ...string) ([]byte, error) {
	if a.problem != "" {
		return nil, errors.New(a.problem)
	}
	text, err := f.kubectl(ctx, f.exec(a, command...)...)
	var ended *exitError
	if errors.As(err, &ended) && slices.Contains(ok, ended.code) && len(text) > 0 {
		err = nil
	}
	return text, explained(err, command[0])
}

// unknownCommand is the error of an agent that does not know a command (applet.Program).
const unknownCommand = ": unknown command "

// explained names the cause where the agent is of another version.
func explained(err error, command string) error {
	var ended *exitError
	if !errors.As(err, &ended) {
		return err
	}
	if strings.Contains(ended.stderr, unknownCommand) {
		version := ""
		for line := range strings.Lines(ended.stderr) {
			if strings.HasPrefix(line, "version ") {
				version = strings.TrimSpace(line)
			}
		}
		return otherVersion(version, fmt.Errorf("it has no command %s", command))
	}
	if strings.Contains(ended.stderr, "executable file not found") {
		return fmt.Errorf("its agent has no program istio-cni, it is no agent of this project or an old one; see --agent-selector: %w", err)
	}
	return err
}

// otherVersion is the error of an agent with another version than this program's.
func otherVersion(version string, cause error) error {
	own := applet.Build().Version()
	return fmt.Errorf("its agent is of another version (%s; kubectl-istio_cni has version %s), upgrade the older one: %w",
		printable.Text(cmp.Or(version, "unknown"), maxShown), own, cause)
}

// parallel bounds the processes of kubectl.
const parallel = 10

// each runs a command in all agents and calls done with the output of each, one call at a time and in no order. It names the
// nodes that did not answer, and returns their number. If the agents refuse the arguments, the error is a usageError.
func (f *fleet) each(ctx context.Context, command []string, ok []int, done func(agent, []byte) error) (failed int, err error) {
	agents, err := f.agents(ctx)
	if err != nil {
		return 0, err
	}
	var work sync.WaitGroup
	var mu sync.Mutex
	var without string
	if len(f.nodes) == 0 {
		work.Go(func() { without = f.without(ctx, agents) })
	}
	problems := make([]error, len(agents))
	answered := 0
	slots := make(chan struct{}, parallel)
	f.progress(answered, len(agents))
	for i, a := range agents {
		work.Go(func() {
			slots <- struct{}{}
			text, problem := f.one(ctx, a, ok, command...)
			<-slots
			mu.Lock()
			defer mu.Unlock()
			if problem == nil {
				problem = done(a, text)
			}
			problems[i] = problem
			answered++
			f.progress(answered, len(agents))
		})
	}
	work.Wait()
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	failed, err = f.report(agents, problems)
	if without != "" && err == nil {
		_, _ = fmt.Fprintln(f.Stderr, without)
	}
	return failed, err
}

// report names the nodes that did not answer.
func (f *fleet) report(agents []agent, problems []error) (failed int, err error) {
	refused := slices.IndexFunc(problems, func(err error) bool {
		ended, is := err.(*exitError) //nolint:errorlint // a wrapped one is explained already
		return is && ended.code == applet.ExitUsage
	})
	if refused >= 0 && !slices.Contains(problems, nil) {
		return 0, &usageError{problems[refused]}
	}
	for i, a := range agents {
		if problems[i] != nil {
			failed++
			_, _ = fmt.Fprintf(f.Stderr, "node %s: no answer: %v\n", a.name(), problems[i])
		}
	}
	return failed, nil
}

// without names the nodes that have no agent, for the user to judge: an agent can be meant for some nodes only. It is "" if the
// user may not list nodes.
func (f *fleet) without(ctx context.Context, agents []agent) string {
	text, err := f.kubectl(ctx, "get", "nodes", "-o", "name", "-l", "kubernetes.io/os=linux")
	if err != nil {
		return ""
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		name := strings.TrimPrefix(strings.TrimSpace(line), "node/")
		if name != "" && !slices.ContainsFunc(agents, func(a agent) bool { return a.node == name }) {
			names = append(names, name)
		}
	}
	const most = 10
	switch n := len(names); {
	case n == 0:
		return ""
	case n > most:
		names = append(names[:most], fmt.Sprintf("and %d more", n-most))
	}
	return "note: nodes without a node agent, whose pods are not seen: " + strings.Join(names, ", ")
}

// progress shows how many nodes have answered, in one line that is overwritten and removed at the end.
func (f *fleet) progress(answered, all int) {
	if f.screen.Progress == nil || all == 1 {
		return
	}
	text := strconv.Itoa(answered) + "/" + strconv.Itoa(all) + " nodes"
	if answered == all {
		text = strings.Repeat(" ", len(text)) + "\r"
	}
	_, _ = fmt.Fprint(f.screen.Progress, "\r"+text)
}

// helpOfAgent shows the help of a command as the first agent that answers has it.
func (f *fleet) helpOfAgent(ctx context.Context, args []string) (int, error) {
	agents, err := f.agents(ctx)
	if err != nil {
		return 0, err
	}
	for _, a := range agents {
		var text []byte
		if text, err = f.one(ctx, a, nil, args[0], "--help"); err == nil {
			_, err = f.Stdout.Write(printable.Lines(text))
			return applet.ExitOK, err
		}
		err = fmt.Errorf("node %s: no answer: %w", a.name(), err)
	}
	return 0, err
}
