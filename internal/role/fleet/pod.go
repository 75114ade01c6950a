package fleet

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// onePod runs an agent's command on a pod's node, and passes its output on.
func (f *fleet) onePod(ctx context.Context, command string, rows []settings.Setting, namespace string, form output.Form, c call) (int, error) {
	operand, err := c.single()
	if err != nil {
		return 0, err
	}
	a, key, err := f.target(ctx, operand, namespace)
	if err != nil {
		return 0, err
	}
	return f.pass(ctx, a, form, slices.Concat([]string{command, key}, given(c.in, rows, "namespace"))...)
}

// target finds the agent on the node of the pod that an operand names. key is the pod in the form for the agent's commands.
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
	key = command.PodKey(found.Metadata.Namespace, found.Metadata.Name)
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
	get := []string{"get", t.Kind, "-o", "json", "--", t.Name}
	if t.Namespace != "" {
		get = slices.Insert(get, 2, "-n", t.Namespace)
	}
	text, err := f.kubectl(ctx, maxObjects, get...)
	if err == nil {
		if err = json.Unmarshal(text, &found); err != nil {
			err = fmt.Errorf("reading its output: %w", err)
		}
	}
	if err != nil {
		err = fmt.Errorf("kubectl get %s: %w", t.Kind, err)
	}
	return found, err
}

// podOf chooses a pod of a workload that an operand names: one that runs, if possible.
func (f *fleet) podOf(ctx context.Context, operand string, of object) (object, error) {
	selector, err := of.Spec.Selector.text()
	if err != nil {
		return object{}, fmt.Errorf("%s: %w", operand, err)
	}
	pods, err := f.objects(ctx, selector, "pods", "-n", of.Metadata.Namespace)
	if err != nil {
		return object{}, fmt.Errorf("kubectl get pods: %w", err)
	}
	other := func(o object) bool { return !o.controlledBy([]string{of.Metadata.UID}) }
	if slices.ContainsFunc(pods, func(o object) bool { return !other(o) }) { // a Deployment's are controlled by its ReplicaSets
		pods = slices.DeleteFunc(pods, other)
	}
	if len(pods) == 0 {
		return object{}, fmt.Errorf("%s has no pods", operand)
	}
	chosen := slices.MinFunc(pods, func(a, b object) int {
		return cmp.Or(strings.Compare(a.agent().problem, b.agent().problem), strings.Compare(a.Metadata.Name, b.Metadata.Name))
	})
	_, _ = fmt.Fprintf(f.Stderr, "note: %s is 1 of %d pods of %s\n", chosen.Metadata.Namespace+"/"+chosen.Metadata.Name, len(pods), operand)
	return chosen, nil
}

// errNamespaceAlone is the error for a namespace that has no effect.
var errNamespaceAlone = &usageError{errors.New("--namespace without the name of a pod")}

// partial is the exit code of an agent's command bundle whose file lists missing parts.
var partial = []int{applet.ExitError} //nolint:gochecknoglobals // a constant

// bundle writes the bundle of a pod's node, or a tar.gz file with the bundles of all nodes.
func (f *fleet) bundle(ctx context.Context, flags *command.Bundle, c call) (int, error) {
	args := given(c.in, flags.Rows(), "namespace")
	switch {
	case f.Columns() > 0:
		return 0, &usageError{errors.New("the bundle is a tar.gz file: redirect the standard output to a file")}
	case len(c.operands) == 0 && flags.Namespace != "":
		return 0, errNamespaceAlone
	}
	if len(c.operands) > 0 {
		a, key, err := f.target(ctx, c.operands[0], flags.Namespace)
		if err != nil {
			return 0, err
		}
		text, _, err := f.one(ctx, a, maxBundle, partial, slices.Concat([]string{"bundle", key}, args)...)
		if err != nil {
			return 0, fmt.Errorf("node %s: no answer: %w", a.node, err)
		}
		_, err = f.Stdout.Write(text)
		return applet.ExitOK, err
	}
	now := time.Now() //nolint:forbidigo // the only clock of the plugin
	zipped := gzip.NewWriter(f.Stdout)
	out := tar.NewWriter(zipped)
	q := question{slices.Concat([]string{"bundle"}, args), partial, maxBundle, atOnce}
	nodes, err := f.each(ctx, q, func(a agent, text []byte, _ int) error {
		// The name is the API server's; a path in it must not leave the directory of the extraction.
		name := strings.NewReplacer("/", "_", `\`, "_").Replace(printable.Text(a.node, maxShown/4)) + ".tar.gz"
		header := &tar.Header{Name: "istio-cni/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: now, Format: tar.FormatPAX}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		_, err := out.Write(text)
		return err
	})
	if err != nil {
		return 0, err
	}
	code := applet.ExitOK
	if failed(nodes) {
		code = applet.ExitError
	}
	return code, errors.Join(out.Close(), zipped.Close())
}

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
		page = "#" + strings.Replace(page, "/"+command.Pod+"/", "/", 1) // see command.PodKey
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
