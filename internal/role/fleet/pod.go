package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// onePod runs an agent's command on a pod's node, and passes its output on.
func (f *fleet) onePod(ctx context.Context, command string, args []string) (int, error) {
	a, key, rest, err := f.target(ctx, args)
	if err != nil {
		return 0, err
	}
	return f.pass(ctx, a, slices.Concat([]string{command, key}, rest)...)
}

// target finds the agent on the node of the pod that the arguments name, as NAMESPACE/NAME or as NAME with -n NAMESPACE. key is the pod
// in the form for the agent's commands, rest are the other arguments; both are set if the pod was found.
func (f *fleet) target(ctx context.Context, args []string) (a agent, key string, rest []string, err error) {
	namespace, rest, err := last(args, "--namespace", "-n", "")
	if err != nil {
		return a, "", nil, err
	}
	if len(rest) == 0 || rest[0] == "" || strings.HasPrefix(rest[0], "-") {
		return a, "", nil, &usageError{errors.New("name a pod before the flags: NAMESPACE/NAME, or -n NAMESPACE NAME")}
	}
	pod, rest := rest[0], rest[1:]
	if before, after, both := strings.Cut(strings.TrimPrefix(pod, "pod/"), "/"); both {
		namespace, pod = before, after
	}
	get := []string{"get", "pod", "-o", "json", "--", pod}
	if namespace != "" {
		get = slices.Insert(get, 2, "-n", namespace)
	}
	text, err := f.kubectl(ctx, maxObjects, get...)
	if err != nil {
		return a, "", nil, fmt.Errorf("kubectl get pod: %w", err)
	}
	var found object
	if err = json.Unmarshal(text, &found); err != nil {
		return a, "", nil, fmt.Errorf("kubectl get pod: reading its output: %w", err)
	}
	key = found.Metadata.Namespace + "/" + found.Metadata.Name
	node := found.Spec.NodeName
	if node == "" {
		return a, key, rest, fmt.Errorf("pod %s is on no node yet", key)
	}
	f.nodes = []string{node}
	agents, err := f.agents(ctx, "--field-selector=spec.nodeName="+node)
	switch {
	case err != nil:
		return a, key, rest, err
	case agents[0].problem != "":
		return a, key, rest, fmt.Errorf("node %s of pod %s: %s", node, key, agents[0].problem)
	}
	return agents[0], key, rest, nil
}

// dashboard forwards the page of the agent on a pod's node, or of any agent without a pod, until the user ends it.
func (f *fleet) dashboard(ctx context.Context, args []string) (int, error) {
	const pagePort = "9876" // an agent's default
	port, args, err := last(args, "--port", "", pagePort)
	if err != nil {
		return 0, err
	}
	var a agent
	page := "" // the fragment that chooses the pod
	if len(args) == 0 {
		a, err = f.running(ctx)
	} else {
		a, page, _, err = f.target(ctx, args)
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
