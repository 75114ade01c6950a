// Package fleet is the kubectl plugin "kubectl istio-cni": it runs commands of the node agents of a cluster through the user's own
// kubectl, and merges their answers.
//
// It promises that contexts, credentials and credential plugins are kubectl's, that only pods of the agents' DaemonSet answer, that a
// node which does not answer is named and changes the exit code, that no text of a node reaches the terminal unescaped or on another
// node's line, and that time, memory and the number of processes are bounded. It never talks to an API server itself and changes nothing. It builds for every system that kubectl runs on.
//
// Start at Run; kubectl.go starts the processes, agents.go finds the agents and asks all of them.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

const help = `NAME:
   kubectl istio-cni - shows which pods bypass the mesh, and why, for all nodes of a cluster

USAGE:
   kubectl istio-cni COMMAND [flags]

COMMANDS; "COMMAND --help" shows the flags, as a node agent of the cluster has them:
   pods [-n NS]           pods of all nodes with the state of their redirection
   why [-n NS] POD        a pod from injection to kernel, and the way of a packet
   trace [-n NS] POD      real packets of a pod
   decisions              the last calls of the plugin on all nodes
   doctor                 checks of all nodes
   bundle [[-n NS] POD]   a tar.gz file for a bug report, to standard output
   dashboard [POD]        forwards the page of an agent to localhost and opens it;
                          --port N is the port on localhost (9876; 0 for any)
   version                the version of this program
   POD is NAMESPACE/NAME, or a name in -n NS or in the namespace of kubectl's context. pods, decisions and doctor print a table,
   or with -o json or yaml an object or a list.

FLAGS:
   --agent-namespace NAME   namespace of the node agents (default: that of the only DaemonSets with their label)
   --agent-selector TEXT    label selector of the node agents and their DaemonSet (default: k8s-app=istio-cni-node)
   --agent-container NAME   their container (default: install-cni)
   --node NAME              only this node; can be repeated
   --ignore-nodes-without-agent
                            nodes without a node agent do not change the exit code
   --timeout DURATION       for each answer (default: 30s; 90s for doctor and pods --check, 2m for bundle)
   Flags of kubectl such as --context, --kubeconfig, --as, --token are passed to kubectl.

ENVIRONMENT:
   KUBECTL    the program to run (default: kubectl, by PATH)
   NO_COLOR   no colours on a terminal

EXIT CODES:
   0  done; of pods and why: as the mesh wants it
   1  kubectl failed; a node did not answer, has no node agent or more than one that runs; a check failed (doctor);
      no node has a pod of the namespace (pods -n) or a decision about the pod (decisions --pod)
   2  a bad flag or command, or node agents in more than one namespace without --agent-namespace
   3  some pod is not captured (pods), the packet goes past the mesh (why)
   4  unknown (why)
`

// Exit codes besides those of applet.
const (
	exitBypass  = 3
	exitUnknown = 4
)

// Screen is what the user looks at.
type Screen struct {
	// Colours reports whether the standard output shows colours.
	Colours bool
	// Progress is the standard error if it is a terminal, else nil.
	Progress io.Writer
}

// options are the flags of this program and those for kubectl.
type options struct {
	namespace, selector, container string
	nodes                          []string
	// ignoreWithout accepts nodes without an agent.
	ignoreWithout bool
	// timeout bounds each process of kubectl; 0 stands for the default of the command.
	timeout time.Duration
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
	o = options{selector: "k8s-app=istio-cni-node", container: "install-cni"}
	own := map[string]func(string) error{
		"--agent-namespace": func(v string) error { o.namespace = v; return nil },
		"--agent-selector":  func(v string) error { o.selector = v; return nil },
		"--agent-container": func(v string) error { o.container = v; return nil },
		"--node":            func(v string) error { o.nodes = append(o.nodes, v); return nil },
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
		case arg == "--ignore-nodes-without-agent":
			o.ignoreWithout = true
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

// take removes a flag with a value from the arguments, in the forms "-n V", "-nV", "-n=V", "--namespace V" and "--namespace=V". short
// can be "". The last value counts.
func take(args []string, short, long string) (value string, rest []string, err error) {
	for i := 0; i < len(args); i++ {
		name, text, attached := strings.Cut(args[i], "=")
		switch isShort := short != "" && strings.HasPrefix(args[i], short); {
		case name == long, isShort && name == short:
		case isShort:
			text, attached = args[i][len(short):], true
		default:
			rest = append(rest, args[i])
			continue
		}
		if !attached {
			if i++; i == len(args) {
				return "", nil, &usageError{fmt.Errorf("flag %s needs a value", name)}
			}
			text = args[i]
		}
		value = text
	}
	return value, rest, nil
}

// isHelp reports whether an argument asks for the help.
func isHelp(arg string) bool { return arg == "--help" || arg == "-h" }

// command is a command of the plugin.
type command struct {
	run func(context.Context, []string) (int, error)
	// timeout is the default for each answer.
	timeout time.Duration
	// ofAgent reports whether the agents have it, too.
	ofAgent bool
}

func (f *fleet) commands() map[string]command {
	const usual, long, longest = 30 * time.Second, 90 * time.Second, 2 * time.Minute
	pods := command{f.pods, usual, true}
	if slices.Contains(f.rest, "--check") {
		pods.timeout = long
	}
	return map[string]command{
		"pods": pods, "decisions": {f.decisions, usual, true}, "doctor": {f.doctor, long, true}, "bundle": {f.bundle, longest, true},
		"why":       {func(ctx context.Context, args []string) (int, error) { return f.onePod(ctx, "why", args) }, usual, true},
		"trace":     {func(ctx context.Context, args []string) (int, error) { return f.onePod(ctx, "trace", args) }, usual, true},
		"dashboard": {f.dashboard, usual, false},
		"version": {func(_ context.Context, args []string) (int, error) {
			return applet.Build().Run(applet.Call{Args: args, Stdout: f.Stdout, Stderr: f.Stderr}), nil
		}, usual, false},
	}
}

// Run runs the plugin and returns the exit code.
func Run(c applet.Call, screen Screen) int {
	c.Stderr = printable.NewWriter(c.Stderr)
	fail := func(code int, err error) int {
		more := ""
		if code == applet.ExitUsage {
			more = "; see kubectl istio-cni --help"
		}
		_, _ = fmt.Fprintf(c.Stderr, "error: %v%s\n", err, more)
		return code
	}
	o, err := parse(c.Args)
	if err != nil {
		return fail(applet.ExitUsage, err)
	}
	if len(o.rest) == 0 || o.rest[0] == "help" || isHelp(o.rest[0]) {
		_, _ = io.WriteString(c.Stdout, help)
		return applet.ExitOK
	}
	f := &fleet{options: o, Call: c, screen: screen}
	chosen, known := f.commands()[o.rest[0]]
	if !known {
		return fail(applet.ExitUsage, fmt.Errorf("unknown command %q", o.rest[0]))
	}
	f.timeout = cmp.Or(f.timeout, chosen.timeout)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	run, args := chosen.run, o.rest[1:]
	if chosen.ofAgent && slices.ContainsFunc(args, isHelp) {
		run, args = f.helpOfAgent, o.rest[:1]
	}
	code, err := run(ctx, args)
	var usage *usageError
	switch {
	case ctx.Err() != nil && err != nil:
		return fail(applet.ExitError, errors.New("interrupted"))
	case errors.As(err, &usage):
		return fail(applet.ExitUsage, err)
	case err != nil:
		return fail(applet.ExitError, err)
	}
	return code
}

// usageError is a wrong argument.
type usageError struct{ error }
