// Package fleet is the kubectl plugin "kubectl istio-cni": it runs commands of a cluster's node agents through the user's own
// kubectl, and merges their answers.
//
// It promises that contexts, credentials and credential plugins are kubectl's, that only pods of the agents' DaemonSet answer, that it
// names a node which does not answer and changes the exit code, that a node's text reaches the terminal only escaped and on the node's
// own lines, and that time, memory and the number of processes are bounded. It never talks to an API server itself and changes
// nothing. It builds for every system that kubectl runs on.
//
// Start at Run; agents.go finds the agents, ask.go queries all of them with kubectl, lists.go merges their lists, bundle.go their files.
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

COMMANDS; "COMMAND --help" shows the flags of a node agent in the cluster:
   pods [-n NS]           pods of all nodes with the state of their redirection
   why [-n NS] POD        a pod from injection to kernel, and the way of a packet
   trace [-n NS] POD      real packets of a pod
   decisions              the last calls of the plugin on all nodes
   doctor                 checks of all nodes; with --for ambient also of what ambient mode needs
   bundle [[-n NS] POD]   a tar.gz file for a bug report, to standard output: Kubernetes objects,
                          and the files of all nodes, or of the pod's node
   dashboard [POD]        forwards the page of an agent to localhost;
                          --port N is the port on localhost (9876)
   version                the version of this program
   POD is NAMESPACE/NAME, or a name in -n NS or in the namespace of kubectl's context. pods, decisions and doctor print a table,
   or with -o json or yaml an object or a list.

FLAGS:
   --agent-namespace NAME   namespace of the node agents (default: the only namespace with DaemonSets of their label)
   --agent-selector TEXT    label selector of the node agents and their DaemonSet
                            (default: k8s-app in (istio-cni-node, istio-cni-observer); if observers exist, only they answer)
   --agent-container NAME   their container (default: install-cni)
   --node NAME              only this node; can be repeated
   --ignore-nodes-without-agent
                            nodes without a node agent do not change the exit code
   --timeout DURATION       for each answer (default: 30s; 90s for doctor and pods --check, 2m for bundle)
   Flags of kubectl such as --context, --kubeconfig, --as, --token are passed to kubectl.

ENVIRONMENT:
   KUBECTL   the program to run (default: kubectl, found in PATH)

EXIT CODES:
   0  done; for pods and why: as the mesh wants it
   1  kubectl failed; a node did not answer, has no node agent or more than one running; a check failed (doctor);
      no node has a pod of the namespace (pods -n) or a decision about the pod (decisions --pod)
   2  a bad flag or command, or node agents in more than one namespace without --agent-namespace
   3  some pod is not captured (pods), the packet goes past the mesh (why)
   4  unknown (why)
`

// Exit codes besides the codes of package applet.
const (
	exitBypass  = 3
	exitUnknown = 4
)

// fleet is one run of the plugin.
type fleet struct {
	applet.Call
	options
	// progress is a terminal, or nil.
	progress io.Writer
	// steps is whether each node's answer is a line of the error output.
	steps bool
	// home is the namespace of the agents, once it is known, and sets are the UIDs of their DaemonSets.
	home string
	sets []string
}

// options are the flags of this program and the flags for kubectl.
type options struct {
	namespace, selector, container string
	nodes                          []string
	// ignoreWithout accepts nodes without an agent.
	ignoreWithout bool
	// timeout bounds each process of kubectl; 0 means the command's default.
	timeout time.Duration
	// kubectl are flags for kubectl, rest the command and its arguments.
	kubectl, rest []string
}

// passed are kubectl's flags with a value that select the cluster and the user (kubectl options).
var passed = []string{ //nolint:gochecknoglobals // a constant table
	"--context", "--kubeconfig", "--cluster", "--user", "--as", "--as-group", "--as-uid", "--token", "--server", "-s",
	"--certificate-authority", "--client-certificate", "--client-key", "--tls-server-name", "--request-timeout", "--cache-dir",
}

// parse separates this program's flags, kubectl's flags and the command.
func parse(args []string) (o options, err error) {
	o = options{selector: "k8s-app in (istio-cni-node, " + observer + ")", container: "install-cni"}
	for _, name := range passed {
		var values []string
		if values, args, err = take(args, name, ""); err != nil {
			return o, err
		}
		for _, value := range values {
			o.kubectl = append(o.kubectl, name+"="+value)
		}
	}
	timeout := ""
	for _, own := range []struct {
		name  string
		value *string
	}{
		{"--agent-namespace", &o.namespace}, {"--agent-selector", &o.selector}, {"--agent-container", &o.container}, {"--timeout", &timeout},
	} {
		if *own.value, args, err = last(args, own.name, "", *own.value); err != nil {
			return o, err
		}
	}
	if timeout != "" {
		if o.timeout, err = time.ParseDuration(timeout); err != nil || o.timeout <= 0 {
			return o, fmt.Errorf("flag --timeout: value %q: want a duration such as 30s", timeout)
		}
	}
	o.nodes, args, err = take(args, "--node", "")
	for _, arg := range args {
		switch name, _, _ := strings.Cut(arg, "="); {
		case name == "--insecure-skip-tls-verify":
			o.kubectl = append(o.kubectl, arg)
		case arg == "--ignore-nodes-without-agent":
			o.ignoreWithout = true
		default:
			o.rest = append(o.rest, arg)
		}
	}
	return o, err
}

// take removes a flag with a value from the arguments, in the forms "--namespace V" and "--namespace=V" and, unless short is "", also
// "-n V", "-n=V" and "-nV".
func take(args []string, long, short string) (values, rest []string, err error) {
	for i := 0; i < len(args); i++ {
		name, value, attached := strings.Cut(args[i], "=")
		switch isShort := short != "" && strings.HasPrefix(args[i], short); {
		case name == long, isShort && name == short:
		case isShort:
			value, attached = args[i][len(short):], true
		default:
			rest = append(rest, args[i])
			continue
		}
		if !attached {
			if i++; i == len(args) {
				return nil, nil, &usageError{fmt.Errorf("flag %s needs a value", name)}
			}
			value = args[i]
		}
		values = append(values, value)
	}
	return values, rest, nil
}

// last is take for a flag whose last value applies; without the flag it returns otherwise.
func last(args []string, long, short, otherwise string) (value string, rest []string, err error) {
	values, rest, err := take(args, long, short)
	if len(values) > 0 {
		otherwise = values[len(values)-1]
	}
	return otherwise, rest, err
}

// isHelp reports whether an argument requests the help.
func isHelp(arg string) bool { return arg == "--help" || arg == "-h" }

// command is a command of the plugin.
type command struct {
	run func(context.Context, []string) (int, error)
	// timeout is the default time limit of each answer.
	timeout time.Duration
	// ofAgent reports whether the agents have the command, too.
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
			return applet.PrintVersion(applet.Call{Args: args, Stdout: f.Stdout, Stderr: f.Stderr}), nil
		}, usual, false},
	}
}

// Run runs the plugin and returns the exit code. Progress is a terminal, or nil.
func Run(c applet.Call, progress io.Writer) int {
	c.Stderr = printable.NewWriter(c.Stderr)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	f := &fleet{Call: c, progress: progress}
	code, err := f.run(ctx)
	if err == nil {
		return code
	}
	code, more := applet.ExitError, ""
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	} else if _, is := errors.AsType[*usageError](err); is {
		code, more = applet.ExitUsage, "; see kubectl istio-cni --help"
	}
	_, _ = fmt.Fprintf(c.Stderr, "error: %v%s\n", err, more)
	return code
}

func (f *fleet) run(ctx context.Context) (code int, err error) {
	if f.options, err = parse(f.Args); err != nil {
		return 0, &usageError{err}
	}
	if len(f.rest) == 0 || f.rest[0] == "help" || isHelp(f.rest[0]) {
		_, err = io.WriteString(f.Stdout, help)
		return applet.ExitOK, err
	}
	name, args := f.rest[0], f.rest[1:]
	chosen, known := f.commands()[name]
	if !known {
		return 0, &usageError{fmt.Errorf("unknown command %q", name)}
	}
	f.timeout = cmp.Or(f.timeout, chosen.timeout)
	if chosen.ofAgent && slices.ContainsFunc(args, isHelp) {
		a, err := f.running(ctx)
		if err != nil {
			return 0, err
		}
		return f.pass(ctx, a, name, "--help")
	}
	return chosen.run(ctx, args)
}

// usageError is a wrong argument.
type usageError struct{ error }
