package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// agent is a node agent's pod.
type agent struct {
	// node is "" until the pod is scheduled.
	namespace, pod, node string
	// problem is why the agent cannot be used, "" if it runs.
	problem string
}

// name returns the node, or the pod if it has no node.
func (a agent) name() string {
	if a.node == "" {
		return "of pod " + a.key()
	}
	return a.node
}

// key returns NAMESPACE/NAME of the pod.
func (a agent) key() string { return a.namespace + "/" + a.pod }

// object has the fields of a pod or a workload that the plugin reads.
type object struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		NodeName string
		Selector *metav1.LabelSelector // of a workload
	}
	Status struct{ Phase string }
}

// key returns NAMESPACE/NAME.
func (o *object) key() string { return o.Namespace + "/" + o.Name }

// agent returns the agent of a pod.
func (o *object) agent() agent {
	a := agent{namespace: o.Namespace, pod: o.Name, node: o.Spec.NodeName}
	switch {
	case o.Status.Phase != "Running":
		a.problem = "the agent's pod is " + cmp.Or(o.Status.Phase, "in no phase")
	case o.DeletionTimestamp != nil:
		a.problem = "the agent's pod is terminating"
	}
	return a
}

// selector returns the selector of a workload's pods in kubectl's form.
func (o *object) selector() (string, error) {
	selector, err := metav1.LabelSelectorAsSelector(o.Spec.Selector)
	if err != nil {
		return "", err
	}
	if selector.String() == "" {
		err = errors.New("its selector is empty")
	}
	return selector.String(), err
}

// query returns objects of the API server. kubectl prints a list, the object itself if one was named, or nothing.
func query[T any](ctx context.Context, f *fleet, args ...string) ([]T, error) {
	text, err := f.kubectl(ctx, maxObjects, slices.Concat([]string{"get", "-o", "json"}, args)...)
	if err != nil || len(text) == 0 {
		return nil, err
	}
	var list struct {
		Kind  string
		Items []T
	}
	if err = json.Unmarshal(text, &list); err == nil && !strings.HasSuffix(list.Kind, "List") && list.Items == nil {
		list.Items = make([]T, 1)
		err = json.Unmarshal(text, &list.Items[0])
	}
	if err != nil {
		return nil, fmt.Errorf("reading its output: %w", err)
	}
	return list.Items, nil
}

// observer is the label of observers, which answer in place of another plugin's agents in their namespace.
const observer = "istio-cni-observer"

// where returns the namespace of the node agents and their DaemonSets in it. A label proves little about a pod or a DaemonSet:
// everyone who may create one in some namespace chooses its labels. So the user must choose between agents of two namespaces.
func (f *fleet) where(ctx context.Context) (namespace string, sets []object, err error) {
	if f.home != "" {
		return f.home, f.sets, nil
	}
	args := []string{"daemonsets.apps", "--all-namespaces", "-l", f.selector}
	if f.namespace != "" {
		args = slices.Replace(args, 1, 2, "-n", f.namespace)
	}
	found, err := query[object](ctx, f, args...)
	if err != nil {
		return "", nil, fmt.Errorf("kubectl get daemonsets.apps: %w", err)
	}
	observes := func(o object) bool { return o.Labels["k8s-app"] == observer }
	beside := slices.ContainsFunc(found, observes)
	var namespaces []string
	for _, set := range found {
		namespaces = append(namespaces, set.Namespace)
		if !beside || observes(set) {
			sets = append(sets, set)
		}
	}
	slices.Sort(namespaces)
	switch namespaces = slices.Compact(namespaces); len(namespaces) {
	case 0:
		return "", nil, f.notFound()
	case 1:
		namespace = namespaces[0]
	default:
		return "", nil, &usageError{fmt.Errorf("DaemonSets with the label of the node agents are in the namespaces %s: name the agents' namespace by --agent-namespace",
			printable.Some(namespaces, mostNames))}
	}
	if f.namespace == "" && namespace != "istio-system" && namespace != "kube-system" {
		_, _ = fmt.Fprintf(f.Stderr, "note: taking the node agents of namespace %s; --agent-namespace=%[1]s confirms that\n", namespace)
	}
	f.home, f.sets = namespace, sets
	return namespace, sets, nil
}

// notFound is the error without an agent.
func (f *fleet) notFound() error {
	return fmt.Errorf("no node agent was found by the label selector %q of a DaemonSet and its pods in %s", f.selector, cmp.Or(f.namespace, "all namespaces"))
}

// mostNames bounds the names in a message.
const mostNames = 10

// agents finds the node agents, the pods of their DaemonSets. It returns one for each node, a running agent if possible. more are
// arguments for kubectl.
func (f *fleet) agents(ctx context.Context, more ...string) ([]agent, error) {
	namespace, sets, err := f.where(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := query[object](ctx, f, slices.Concat([]string{"pods", "-n", namespace}, more, []string{"-l", f.selector})...)
	if err != nil {
		return nil, fmt.Errorf("kubectl get pods: %w", err)
	}
	var all []agent
	for _, pod := range pods {
		own := slices.ContainsFunc(sets, func(set object) bool { return metav1.IsControlledBy(&pod, &set) })
		if own && (len(f.nodes) == 0 || slices.Contains(f.nodes, pod.Spec.NodeName)) {
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

// onePerNode leaves one agent for each node. If two of them run, it cannot know which answers are right.
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

// running returns an agent that runs.
func (f *fleet) running(ctx context.Context) (agent, error) {
	agents, err := f.agents(ctx)
	if err != nil {
		return agent{}, err
	}
	at := slices.IndexFunc(agents, func(a agent) bool { return a.problem == "" })
	if at < 0 {
		return agent{}, errors.New("no node agent is running")
	}
	return agents[at], nil
}
