package fleet

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// onePod runs a command of the agent on a pod's node, and passes its output on.
func (f *fleet) onePod(ctx context.Context, command string, args []string) (int, error) {
	a, key, rest, err := f.target(ctx, args)
	if err != nil {
		return 0, err
	}
	err = f.start(ctx, printable.NewWriter(f.Stdout), f.Stderr, f.exec(a, slices.Concat([]string{command, key}, rest)...)...)
	if ended, is := errors.AsType[*exitError](err); is {
		if better := explained(err, command); better != err { //nolint:errorlint // the same one is not explained
			return 0, fmt.Errorf("node %s: %w", a.node, better)
		}
		// The error output is passed on already.
		if slices.Contains([]int{applet.ExitUsage, exitBypass, exitUnknown}, ended.code) {
			return ended.code, nil
		}
		return applet.ExitError, nil
	}
	return applet.ExitOK, err
}

// target finds the agent on the node of the pod that the arguments name, as NAMESPACE/NAME or as NAME with -n NAMESPACE. key is the pod
// as the agent's commands take it, rest are the other arguments.
func (f *fleet) target(ctx context.Context, args []string) (a agent, key string, rest []string, err error) {
	namespace, rest, err := take(args, "-n", "--namespace")
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
		return a, key, nil, fmt.Errorf("pod %s is on no node yet", key)
	}
	agents, err := f.agents(ctx, "--field-selector=spec.nodeName="+node)
	switch {
	case err != nil:
		return a, key, nil, err
	case len(agents) == 0:
		return a, key, nil, fmt.Errorf("node %s of pod %s has no node agent", node, key)
	case agents[0].problem != "":
		return a, key, nil, fmt.Errorf("node %s of pod %s: %s", node, key, agents[0].problem)
	}
	return agents[0], key, rest, nil
}

// partial is the exit code of an agent's command bundle that names in the file what is missing.
var partial = []int{applet.ExitError} //nolint:gochecknoglobals // a constant

// bundle writes the bundle of a pod's node, or a tar.gz file with those of all nodes.
func (f *fleet) bundle(ctx context.Context, args []string) (int, error) {
	if f.Terminal != nil && f.Terminal() > 0 {
		return 0, &usageError{errors.New("the bundle is a tar.gz file: redirect the standard output to a file")}
	}
	if len(args) > 0 && (!strings.HasPrefix(args[0], "-") || strings.HasPrefix(args[0], "-n") || strings.HasPrefix(args[0], "--namespace")) {
		a, key, rest, err := f.target(ctx, args)
		if err != nil {
			return 0, err
		}
		text, _, err := f.one(ctx, a, maxBundle, partial, slices.Concat([]string{"bundle", key}, rest)...)
		if err != nil {
			return 0, fmt.Errorf("node %s: no answer: %w", a.node, err)
		}
		_, err = f.Stdout.Write(text)
		return applet.ExitOK, err
	}
	zipped := gzip.NewWriter(f.Stdout)
	out := tar.NewWriter(zipped)
	q := question{slices.Concat([]string{"bundle"}, args), partial, maxBundle, atOnce}
	nodes, err := f.each(ctx, q, func(a agent, text []byte, _ int) error {
		// The name is the API server's; a path in it must not leave the directory in which the file is unpacked.
		name := strings.NewReplacer("/", "_", `\`, "_").Replace(printable.Text(a.node, maxShown/4)) + ".tar.gz"
		header := &tar.Header{Name: "istio-cni/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: clock(), Format: tar.FormatPAX}
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

// pagePort is the port of an agent's page.
const pagePort = "9876"

// dashboard forwards the page of an agent, of a pod's node if one is named, and opens it.
func (f *fleet) dashboard(ctx context.Context, args []string) (int, error) {
	port, args, err := take(args, "", "--port")
	if err != nil {
		return 0, err
	}
	switch port {
	case "":
		port = pagePort
	case "0":
		port = "" // kubectl chooses one
	}
	a, page, err := f.pageOf(ctx, args)
	if err != nil {
		return 0, err
	}
	lines, out := io.Pipe()
	opened := make(chan struct{})
	go func() {
		defer close(opened)
		f.open(ctx, a, page, lines)
	}()
	err = f.start(ctx, out, f.Stderr, "port-forward", "-n", a.namespace, "pod/"+a.pod, port+":"+pagePort)
	_ = out.Close()
	<-opened
	if ctx.Err() != nil {
		return applet.ExitOK, nil //nolint:nilerr // the user ended it
	}
	if ended := (*exitError)(nil); errors.As(err, &ended) {
		err = nil // its error output is passed on already
	}
	return applet.ExitError, err
}

// pageOf is the agent whose page is shown, and the fragment that chooses the pod.
func (f *fleet) pageOf(ctx context.Context, args []string) (a agent, page string, err error) {
	if len(args) > 0 {
		a, page, _, err = f.target(ctx, args)
		return a, "#" + page, err
	}
	agents, err := f.agents(ctx)
	if err != nil {
		return a, "", err
	}
	at := slices.IndexFunc(agents, func(a agent) bool { return a.problem == "" })
	if at < 0 {
		return a, "", errors.New("no node agent is running")
	}
	return agents[at], "", nil
}

// open reads kubectl's output, and shows the address once the port is forwarded.
func (f *fleet) open(ctx context.Context, a agent, page string, output io.Reader) {
	shown := false
	for lines := bufio.NewScanner(output); lines.Scan(); {
		// "Forwarding from 127.0.0.1:9876 -> 9876", and a line for [::1]
		local, isForward := strings.CutPrefix(lines.Text(), "Forwarding from ")
		local, _, _ = strings.Cut(local, " ")
		if !isForward || shown {
			continue
		}
		shown = true
		address := "http://" + printable.Text(local, maxShown) + "/" + printable.Text(page, maxShown)
		_, _ = fmt.Fprintf(f.Stdout, "%s of node %s (Ctrl-C ends it)\n", address, printable.Text(a.node, maxShown))
		if f.Terminal != nil && f.Terminal() > 0 {
			f.browse(ctx, address)
		}
	}
	_, _ = io.Copy(io.Discard, output)
}

// browse opens an address in the user's browser, if there is one.
func (f *fleet) browse(ctx context.Context, address string) {
	command := []string{"xdg-open"}
	switch runtime.GOOS {
	case "darwin":
		command = []string{"open"}
	case "windows":
		command = []string{"rundll32", "url.dll,FileProtocolHandler"}
	default:
		// Without a graphical session it would start a browser in this terminal.
		x11, _ := f.Getenv("DISPLAY")
		wayland, _ := f.Getenv("WAYLAND_DISPLAY")
		if x11 == "" && wayland == "" {
			return
		}
	}
	opener := exec.CommandContext(context.WithoutCancel(ctx), command[0], append(command[1:], address)...) //nolint:gosec // constants, and kubectl's address
	if opener.Start() == nil {
		go func() { _ = opener.Wait() }()
	}
}
