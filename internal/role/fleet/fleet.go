// Package fleet is the kubectl plugin "kubectl istio-cni": it runs commands of the node agents of a cluster through the user's own
// kubectl, and merges their answers.
//
// It promises that contexts, credentials and credential plugins are kubectl's, that a node which does not answer is named and
// changes the exit code, and that no text of a node reaches the terminal unescaped. It never talks to an API server itself and
// changes nothing.
//
// Start at Run; kubectl.go starts the processes.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
)

const help = `NAME:
   kubectl istio-cni - shows which pods bypass the mesh, and why, for all nodes of a cluster

USAGE:
   kubectl istio-cni COMMAND [flags]

COMMANDS, as of istio-cni on a node; "COMMAND --help" shows the flags:
   pods                   pods of all nodes with the state of their redirection
   why [-n NS] POD        a pod from injection to kernel, and the way of a packet
   trace [-n NS] POD      real packets of a pod
   decisions              the last calls of the plugin on all nodes
   doctor                 checks of all nodes
   bundle [-n NS] [POD]   a file for a bug report, to standard output
   dashboard [POD]        forwards the page of an agent to localhost and prints its address

FLAGS:
   --agent-namespace NAME   namespace of the node agents (default: all namespaces)
   --agent-selector TEXT    label selector of the node agents (default: k8s-app=istio-cni-node)
   --agent-container NAME   container of the node agent (default: install-cni)
   --node NAME              only this node; may be repeated
   --timeout DURATION       for each node (default: 30s)
   --port N                 of the dashboard on localhost (default: 9876)
   Flags of kubectl such as --context, --kubeconfig, --as, --token are passed to kubectl.

EXIT CODES:
   0  done; of pods and why: as the mesh wants it
   1  kubectl failed, or a node did not answer
   2  a bad flag or command
   3  some pod is not captured (pods), the packet goes past the mesh (why)
   4  unknown (why)
`

// Exit codes besides those of applet.
const (
	exitBypass  = 3
	exitUnknown = 4
)

// options are the flags of this program and those for kubectl.
type options struct {
	namespace, selector, container string
	nodes                          []string
	timeout                        time.Duration
	port                           string
	// kubectl are flags for kubectl, rest the command and its arguments.
	kubectl, rest []string
}

// passed are kubectl's flags with a value that select the cluster and the user (kubectl options).
var passed = map[string]bool{ //nolint:gochecknoglobals // a constant table
	"--context": true, "--kubeconfig": true, "--cluster": true, "--user": true, "--as": true, "--as-group": true, "--as-uid": true,
	"--token": true, "--server": true, "-s": true, "--certificate-authority": true, "--client-certificate": true, "--client-key": true,
	"--tls-server-name": true, "--request-timeout": true, "--cache-dir": true,
}

// parse divides the arguments.
func parse(args []string) (o options, err error) {
	o = options{selector: "k8s-app=istio-cni-node", container: "install-cni", timeout: 30 * time.Second, port: "9876"}
	own := map[string]func(string) error{
		"--agent-namespace": func(v string) error { o.namespace = v; return nil },
		"--agent-selector":  func(v string) error { o.selector = v; return nil },
		"--agent-container": func(v string) error { o.container = v; return nil },
		"--node":            func(v string) error { o.nodes = append(o.nodes, v); return nil },
		"--port":            func(v string) error { o.port = v; return nil },
		"--timeout": func(v string) error {
			if o.timeout, err = time.ParseDuration(v); err != nil || o.timeout <= 0 {
				return fmt.Errorf("flag --timeout: value %q: want a duration such as 30s", v)
			}
			return nil
		},
	}
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, value, attached := strings.Cut(arg, "=")
		set, isOwn := own[name]
		switch {
		case name == "--insecure-skip-tls-verify":
			o.kubectl = append(o.kubectl, arg)
			continue
		case !isOwn && !passed[name]:
			o.rest = append(o.rest, arg)
			continue
		case !attached && len(args) == 0:
			return o, fmt.Errorf("flag %s needs a value", name)
		case !attached:
			value, args = args[0], args[1:]
		}
		if passed[name] {
			o.kubectl = append(o.kubectl, name+"="+value)
		} else if err := set(value); err != nil {
			return o, err
		}
	}
	return o, nil
}

// Run runs the plugin and returns the exit code.
func Run(c applet.Call) int {
	o, err := parse(c.Args)
	if err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v; see kubectl istio-cni --help\n", err)
		return applet.ExitUsage
	}
	if len(o.rest) == 0 || o.rest[0] == "help" || o.rest[0] == "--help" || o.rest[0] == "-h" {
		_, _ = io.WriteString(c.Stdout, help)
		return applet.ExitOK
	}
	commands := map[string]func(context.Context, []string) (int, error){}
	f := &fleet{options: o, Call: c}
	for _, name := range []string{"why", "trace"} {
		commands[name] = func(ctx context.Context, args []string) (int, error) { return f.onePod(ctx, name, args) }
	}
	commands["pods"], commands["decisions"], commands["doctor"] = f.pods, f.decisions, f.doctor
	commands["bundle"], commands["dashboard"] = f.bundle, f.dashboard
	run, known := commands[o.rest[0]]
	if !known {
		_, _ = fmt.Fprintf(c.Stderr, "error: unknown command %q; see kubectl istio-cni --help\n", o.rest[0])
		return applet.ExitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	code, err := run(ctx, o.rest[1:])
	if usage := (*usageError)(nil); errors.As(err, &usage) {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v; see kubectl istio-cni --help\n", err)
		return applet.ExitUsage
	}
	if err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v\n", err)
		return applet.ExitError
	}
	return code
}

// usageError is a wrong argument.
type usageError struct{ error }
