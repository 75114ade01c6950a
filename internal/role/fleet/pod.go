package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// onePod runs a command in the agent of a pod's node, and passes its output on while it runs.
func (f *fleet) onePod(ctx context.Context, name string, rows []settings.Setting, namespace string, form output.Form, lasts time.Duration, c call) (int, error) {
	operand, err := c.single()
	if err != nil {
		return 0, err
	}
	a, key, err := f.target(ctx, operand, namespace)
	if err != nil {
		return 0, err
	}
	f.timeout += lasts
	return f.pass(ctx, a, form, slices.Concat([]string{name, command.PodKey(key)}, given(c.in, rows, "namespace"))...)
}

// target finds the agent on the node of the pod that an operand names. key is NAMESPACE/NAME of the pod, if it was found.
func (f *fleet) target(ctx context.Context, operand, namespace string) (a agent, key string, err error) {
	t, err := command.ParseTarget(operand, namespace)
	if err != nil {
		return a, "", &usageError{err}
	}
	found, err := f.object(ctx, t)
	if err == nil && t.Kind != command.Pod {
		found, err = f.podOf(ctx, operand, found)
	}
	if err != nil {
		return a, "", err
	}
	key = found.key()
	node := found.Spec.NodeName
	if node == "" {
		return a, key, fmt.Errorf("pod %s is on no node yet", key)
	}
	f.nodes = []string{node}
	agents, err := f.agents(ctx, "--field-selector=spec.nodeName="+node)
	switch {
	case err != nil:
		return a, key, err
	case agents[0].problem != "":
		return a, key, fmt.Errorf("node %s of pod %s: %s", node, key, agents[0].problem)
	}
	return agents[0], key, nil
}

// object requests one object.
func (f *fleet) object(ctx context.Context, t command.Target) (found object, err error) {
	args := []string{t.Kind, "--", t.Name}
	if t.Namespace != "" {
		args = slices.Insert(args, 1, "-n", t.Namespace)
	}
	all, err := query[object](ctx, f, args...)
	switch {
	case err != nil:
		return found, fmt.Errorf("kubectl get %s: %w", t.Kind, err)
	case len(all) != 1:
		return found, fmt.Errorf("kubectl get %s: want one object, got %d", t.Kind, len(all))
	}
	return all[0], nil
}

// podOf chooses a pod of a workload that an operand names: one that runs, if possible.
func (f *fleet) podOf(ctx context.Context, operand string, of object) (object, error) {
	selector, err := of.selector()
	if err != nil {
		return object{}, fmt.Errorf("%s: %w", operand, err)
	}
	pods, err := query[object](ctx, f, "pods", "-n", of.Namespace, "-l", selector)
	if err != nil {
		return object{}, fmt.Errorf("kubectl get pods: %w", err)
	}
	other := func(o object) bool { return !metav1.IsControlledBy(&o, &of) }
	if slices.ContainsFunc(pods, func(o object) bool { return !other(o) }) { // a Deployment's are controlled by its ReplicaSets
		pods = slices.DeleteFunc(pods, other)
	}
	if len(pods) == 0 {
		return object{}, fmt.Errorf("%s has no pods", operand)
	}
	chosen := slices.MinFunc(pods, func(a, b object) int {
		return cmp.Or(strings.Compare(a.agent().problem, b.agent().problem), strings.Compare(a.Name, b.Name))
	})
	_, _ = fmt.Fprintf(f.Stderr, "note: %s is 1 of %d pods of %s\n", chosen.key(), len(pods), operand)
	return chosen, nil
}

// errNamespaceAlone is the error for a namespace that has no effect.
var errNamespaceAlone = &usageError{errors.New("--namespace without the name of a pod")}

// pagePort is an agent's default.
const pagePort = "9876"

// dashboard are the flags of the command dashboard.
type dashboard struct {
	port      uint16
	namespace string
}

func (d *dashboard) rows() []settings.Setting {
	return []settings.Setting{
		{Name: "port", Arg: "N", Default: pagePort, Use: "the port on localhost", Value: settings.Port(&d.port, 1)},
		{Name: "namespace", Aliases: []string{"n"}, Arg: "NAME", Use: "the pod's namespace", Value: settings.Text(&d.namespace, nil)},
	}
}

// dashboard forwards the page of the agent on a pod's node, or of any agent without a pod, until the user ends it.
func (f *fleet) dashboard(ctx context.Context, flags dashboard, c call) (int, error) {
	var a agent
	var err error
	page, port := "", strconv.Itoa(int(flags.port)) // the fragment that chooses the pod
	switch {
	case len(c.operands) == 0 && flags.namespace != "":
		err = errNamespaceAlone
	case len(c.operands) == 0:
		a, err = f.running(ctx)
	default:
		a, page, err = f.target(ctx, c.operands[0], flags.namespace)
		page = "#" + page
	}
	if err != nil {
		return 0, err
	}
	out := printable.NewWriter(f.Stdout)
	_, _ = fmt.Fprintf(out, "http://localhost:%s/%s of node %s while kubectl forwards the port (Ctrl-C ends it)\n", port,
		printable.Text(page, maxShown), printable.Text(a.node, maxShown))
	stderr, err := f.start(ctx, out, "port-forward", "-n", a.namespace, "pod/"+a.pod, port+":"+pagePort)
	_, _ = io.WriteString(f.Stderr, stderr)
	switch _, ended := errors.AsType[*exitError](err); {
	case ctx.Err() != nil:
		return applet.ExitOK, nil //nolint:nilerr // the user ended it
	case ended:
		err = nil // the error output is passed on already
	}
	return applet.ExitError, err
}
