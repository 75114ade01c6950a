package fleet

import (
	"bytes"
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
		return "of pod " + a.key()
	}
	return a.node
}

// key is the pod.
func (a agent) key() string { return a.namespace + "/" + a.pod }

// object has the fields of a pod or a DaemonSet that are read.
type object struct {
	Metadata struct {
		Namespace, Name, UID, DeletionTimestamp string
		OwnerReferences                         []struct {
			UID        string
			Controller bool
		}
	}
	Spec   struct{ NodeName string }
	Status struct{ Phase string }
}

// controlledBy reports whether one of the UIDs is that of the object's controller.
func (o *object) controlledBy(uids []string) bool {
	for _, owner := range o.Metadata.OwnerReferences {
		if owner.Controller && slices.Contains(uids, owner.UID) {
			return true
		}
	}
	return false
}

// agent returns the agent whose pod the object is.
func (o *object) agent() agent {
	a := agent{namespace: o.Metadata.Namespace, pod: o.Metadata.Name, node: o.Spec.NodeName}
	switch {
	case o.Status.Phase != "Running":
		a.problem = "the agent's pod is " + cmp.Or(o.Status.Phase, "in no phase")
	case o.Metadata.DeletionTimestamp != "":
		a.problem = "the agent's pod is terminating"
	}
	return a
}

// list requests objects from the API server.
func (f *fleet) list(ctx context.Context, args ...string) ([]object, error) {
	text, err := f.kubectl(ctx, maxObjects, slices.Concat([]string{"get"}, args, []string{"-o", "json", "-l", f.selector})...)
	if err != nil {
		return nil, err
	}
	var list struct{ Items []object }
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("reading its output: %w", err)
	}
	return list.Items, nil
}

// where is the namespace of the node agents, and the UIDs of their DaemonSets in it. A label says little about a pod or a DaemonSet:
// whoever may create one in a namespace of his own chooses its labels. So the agents of two namespaces need the user's choice.
func (f *fleet) where(ctx context.Context) (namespace string, sets []string, err error) {
	args := []string{"daemonsets.apps", "--all-namespaces"}
	if f.namespace != "" {
		args = []string{"daemonsets.apps", "-n", f.namespace}
	}
	found, err := f.list(ctx, args...)
	if err != nil {
		return "", nil, fmt.Errorf("kubectl get daemonsets.apps: %w", err)
	}
	var namespaces []string
	for _, set := range found {
		namespaces, sets = append(namespaces, set.Metadata.Namespace), append(sets, set.Metadata.UID)
	}
	slices.Sort(namespaces)
	switch namespaces = slices.Compact(namespaces); len(namespaces) {
	case 0:
		return "", nil, f.notFound()
	case 1:
		namespace = namespaces[0]
	default:
		return "", nil, &usageError{fmt.Errorf("DaemonSets with the label of the node agents are in the namespaces %s: name that of the agents by --agent-namespace",
			some(namespaces))}
	}
	if f.namespace == "" && namespace != "istio-system" && namespace != "kube-system" {
		_, _ = fmt.Fprintf(f.Stderr, "note: the node agents are those of namespace %s; --agent-namespace=%[1]s confirms that\n", namespace)
	}
	return namespace, sets, nil
}

// notFound is the error if there is no agent.
func (f *fleet) notFound() error {
	return fmt.Errorf("no node agent was found by the label selector %q of a DaemonSet and its pods in %s", f.selector, cmp.Or(f.namespace, "all namespaces"))
}

// some joins the first names.
func some(names []string) string {
	const most = 10
	if more := len(names) - most; more > 0 {
		names = append(slices.Clone(names[:most]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}

// agents finds the node agents, the pods of their DaemonSets, one for each node: a running one if there is any. more are arguments
// for kubectl.
func (f *fleet) agents(ctx context.Context, more ...string) ([]agent, error) {
	namespace, sets, err := f.where(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := f.list(ctx, slices.Concat([]string{"pods", "-n", namespace}, more)...)
	if err != nil {
		return nil, fmt.Errorf("kubectl get pods: %w", err)
	}
	var all []agent
	for _, pod := range pods {
		if pod.controlledBy(sets) && (len(f.nodes) == 0 || slices.Contains(f.nodes, pod.Spec.NodeName)) {
			all = append(all, pod.agent())
		}
	}
	for _, node := range f.nodes {
		if !slices.ContainsFunc(all, func(a agent) bool { return a.node == node }) {
			all = append(all, agent{node: node, problem: noAgent})
		}
	}
	if len(all) == 0 && len(more) == 0 {
		return nil, f.notFound()
	}
	return onePerNode(all), nil
}

// noAgent is the problem of a node.
const noAgent = "it has no node agent"

// onePerNode leaves one agent for each node. Of two that run nobody knows which one tells the truth.
func onePerNode(all []agent) (agents []agent) {
	slices.SortFunc(all, func(a, b agent) int {
		return cmp.Or(strings.Compare(a.name(), b.name()), strings.Compare(a.problem, b.problem), strings.Compare(a.pod, b.pod))
	})
	for i, a := range all {
		switch last := len(agents) - 1; {
		case i == 0 || a.name() != all[i-1].name():
			agents = append(agents, a)
		case a.problem == "" && agents[last].problem == "":
			agents[last].problem = fmt.Sprintf("more than one node agent runs there: %s and %s", agents[last].key(), a.key())
		}
	}
	return agents
}

// exec are kubectl's arguments for a command in an agent.
func (f *fleet) exec(a agent, command ...string) []string {
	return slices.Concat([]string{"exec", "-n", a.namespace, "pod/" + a.pod, "-c", f.container, "--", "istio-cni"}, command)
}

// one runs a command in one agent, of whose output most bytes are held. Exit codes besides those of ok are errors, but for an empty
// list, with which a command says that there is nothing that its flags name.
func (f *fleet) one(ctx context.Context, a agent, most int, ok []int, command ...string) (text []byte, code int, err error) {
	if a.problem != "" {
		return nil, 0, errors.New(a.problem)
	}
	text, err = f.kubectl(ctx, most, f.exec(a, command...)...)
	if ended, is := errors.AsType[*exitError](err); is {
		empty := ended.code == applet.ExitError && string(bytes.TrimSpace(text)) == "[]"
		if code = ended.code; empty || slices.Contains(ok, code) && len(text) > 0 {
			err = nil
		}
	}
	return text, code, explained(err, command[0])
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

// unreadable is an answer that this program does not understand.
type unreadable struct{ error }

// versioned has the version of an agent whose answer is unreadable.
func (f *fleet) versioned(ctx context.Context, a agent, problem error) error {
	if answer, is := errors.AsType[*unreadable](problem); is {
		version, _, _ := f.one(ctx, a, maxList, nil, "version")
		return otherVersion(strings.TrimSpace(string(version)), fmt.Errorf("reading its answer: %w", answer.error))
	}
	return problem
}

// otherVersion is the error of an agent with another version than this program's.
func otherVersion(version string, cause error) error {
	own := applet.Build().Version()
	return fmt.Errorf("its agent is of another version (%s; kubectl-istio_cni has version %s), upgrade the older one: %w",
		printable.Text(cmp.Or(version, "unknown"), maxShown), own, cause)
}

// node is a node in the answer.
type node struct {
	// Name is "" for an agent that is on no node.
	Name  string `json:"name"`
	Agent string `json:"agent,omitempty"`
	// Error is why there is no answer, "" if there is one.
	Error string `json:"error,omitempty"`
}

// failed reports whether some node did not answer.
func failed(nodes []node) bool {
	return slices.ContainsFunc(nodes, func(n node) bool { return n.Error != "" })
}

// question is a command for all agents.
type question struct {
	command []string
	// ok are the exit codes besides 0 that come with an answer.
	ok []int
	// most bounds the output of each agent that is held, parallel the processes of kubectl.
	most, parallel int
}

// each runs a command in all agents and calls done with the output and the exit code of each, one call at a time and in no order. It
// names the nodes that did not answer or have no agent, and returns all of them. If the agents refuse the arguments, the error is a
// usageError.
func (f *fleet) each(ctx context.Context, q question, done func(a agent, text []byte, code int) error) ([]node, error) {
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
	slots := make(chan struct{}, q.parallel)
	f.progress(answered, len(agents))
	for i, a := range agents {
		work.Go(func() {
			// The slot is held until the output is no longer.
			slots <- struct{}{}
			defer func() { <-slots }()
			text, code, problem := f.one(ctx, a, q.most, q.ok, q.command...)
			if problem == nil {
				mu.Lock()
				problem = done(a, text, code)
				mu.Unlock()
			}
			problem = f.versioned(ctx, a, problem)
			mu.Lock()
			defer mu.Unlock()
			problems[i] = problem
			answered++
			f.progress(answered, len(agents))
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
		ended, is := err.(*exitError) //nolint:errorlint // a wrapped one is explained already
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

// without are the nodes that have no agent, whose pods are not seen, and a text about them, "" if there is none.
func (f *fleet) without(ctx context.Context, agents []agent) (nodes []node, notice string) {
	text, err := f.kubectl(ctx, maxObjects, "get", "nodes", "-o", "name", "-l", "kubernetes.io/os=linux")
	if err != nil {
		notice = fmt.Sprintf("the nodes without a node agent are not known: kubectl get nodes: %v", err)
		return []node{{Error: notice}}, notice
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		name := strings.TrimPrefix(strings.TrimSpace(line), "node/")
		if name != "" && !slices.ContainsFunc(agents, func(a agent) bool { return a.node == name }) {
			names, nodes = append(names, name), append(nodes, node{Name: name, Error: noAgent})
		}
	}
	if len(names) > 0 {
		notice = "nodes without a node agent, whose pods are not seen: " + some(names)
	}
	return nodes, notice
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
		if text, _, err = f.one(ctx, a, maxList, nil, args[0], "--help"); err == nil {
			_, err = f.Stdout.Write(printable.Lines(text))
			return applet.ExitOK, err
		}
		err = fmt.Errorf("node %s: no answer: %w", a.name(), err)
	}
	return 0, err
}
