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
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/completion"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

const help = `NAME:
   kubectl istio-cni - shows which pods bypass the mesh, and why, for all nodes of a cluster

USAGE:
   kubectl istio-cni COMMAND [flags]

COMMANDS; "COMMAND --help" shows the flags:
%s   POD is NAMESPACE/NAME, or a name in -n NS or in the namespace of kubectl's context. KIND/NAME stands for a pod
   of a workload, such as deploy/web; KIND is deploy, ds, sts, rs or job. bundle, dashboard and completion excepted,
   the output is a table or, with -o json or yaml, a document for scripts.

` + common

// common ends each help.
const common = `FLAGS OF ALL COMMANDS:
   --agent-namespace NAME   namespace of the node agents (default: the only namespace with DaemonSets of their label)
   --agent-selector TEXT    label selector of the node agents and their DaemonSet
                            (default: k8s-app in (istio-cni-node, istio-cni-observer);
                            if observers exist, only they answer)
   --agent-container NAME   their container (default: install-cni)
   --node NAME              only this node; can be repeated
   --ignore-nodes-without-agent
                            nodes without a node agent do not change the exit code
   --timeout DURATION       for each answer (default: 30s; 90s for doctor and pods --check, 2m for bundle)
   Flags of kubectl such as --context, --kubeconfig, --as, --token are passed to kubectl.

ENVIRONMENT:
   KUBECTL   the program to run (default: kubectl, found in PATH)

EXIT CODES:
   0  done; for pods, why and trace: as the mesh wants it
   1  kubectl failed; a node did not answer, has no node agent or more than one running; a check failed (doctor) or
      left out pods (pods --check); no node has a pod of the namespace or name (pods) or a decision about the pod
      (decisions --pod)
   2  a bad flag or command, or node agents in more than one namespace without --agent-namespace
   3  some pod is not captured (pods), a packet goes past the mesh (why, trace)
   4  unknown (why), or no packet was seen (trace)
`

// fleet is one run of the plugin.
type fleet struct {
	applet.Call
	options
	// progress is a terminal, or nil.
	progress io.Writer
	// steps is whether each node's answer is a line of the error output.
	steps bool
	// command is the command, with a blank, once it is known.
	command string
	// home is the namespace of the agents, once it is known, and sets are their DaemonSets.
	home string
	sets []object
}

// options are the flags of this program.
type options struct {
	namespace, selector, container string
	nodes                          []string
	// ignoreWithout accepts nodes without an agent.
	ignoreWithout bool
	// timeout bounds each process of kubectl; 0 means the command's default.
	timeout time.Duration
	// kubectl are flags for kubectl.
	kubectl []string
}

// rows are the flags of this program.
func (o *options) rows() []settings.Setting {
	return []settings.Setting{
		{Name: "agent-namespace", Arg: "NAME", Use: "namespace of the node agents", Value: settings.Text(&o.namespace, nil)},
		{
			Name: "agent-selector", Arg: "TEXT", Default: "k8s-app in (istio-cni-node, " + observer + ")",
			Use: "label selector of the node agents and their DaemonSet", Value: settings.Text(&o.selector, nil),
		},
		{Name: "agent-container", Arg: "NAME", Default: "install-cni", Use: "their container", Value: settings.Text(&o.container, nil)},
		{Name: "node", Arg: "NAME", Repeated: true, Use: "only this node", Value: settings.List(&o.nodes, ",", 0, settings.Check(func(string) error { return nil }))},
		{Name: "ignore-nodes-without-agent", Default: "false", Use: "nodes without a node agent do not change the exit code", Value: settings.Bool(&o.ignoreWithout)},
		{Name: "timeout", Arg: "DURATION", Use: "for each answer", Value: settings.Duration(&o.timeout, time.Nanosecond, 0)},
	}
}

// passed are kubectl's flags that select the cluster and the user (kubectl options).
func passed() (rows []settings.Setting) {
	row := settings.Setting{Arg: "VALUE", Use: "flag of kubectl", Value: settings.Text(new(string), nil)}
	for _, name := range []string{
		"context", "kubeconfig", "cluster", "user", "as", "as-group", "as-uid", "token", "server", "certificate-authority",
		"client-certificate", "client-key", "tls-server-name", "request-timeout", "cache-dir",
	} {
		row.Name, row.Aliases = name, nil
		if name == "server" {
			row.Aliases = []string{"s"}
		}
		rows = append(rows, row)
	}
	return append(rows, settings.Setting{Name: "insecure-skip-tls-verify", Use: "flag of kubectl", Value: settings.Bool(new(bool))})
}

// given returns the flags of the table in the command line, but those in without.
func given(in settings.Input, rows []settings.Setting, without ...string) (flags []string) {
	for _, s := range rows {
		texts := in.Texts(s)
		switch {
		case len(texts) == 0 || slices.Contains(without, s.Name):
			continue
		case s.Name != "as-group":
			texts = texts[len(texts)-1:]
		}
		for _, text := range texts {
			flags = append(flags, strings.TrimSuffix(s.String()+"="+text, map[bool]string{true: "=true"}[s.Arg == ""]))
		}
	}
	return flags
}

// call is a valid command line of a command: its operands and the flags for the agents.
type call struct {
	operands []string
	in       settings.Input
}

// single returns the only operand.
func (c call) single() (string, error) {
	if len(c.operands) != 1 {
		return "", &usageError{errors.New("name one pod: NAMESPACE/NAME, -n NAMESPACE NAME, or KIND/NAME of a workload")}
	}
	return c.operands[0], nil
}

// subcommand is a command of the plugin.
type subcommand struct {
	name, operands, summary string
	// rows are its flags, the same as on a node where the agents have the command, too.
	rows []settings.Setting
	// most is the number of operands.
	most int
	run  func(context.Context, call) (int, error)
	// timeout is the default time limit of each answer, or longer with the flag slow.
	timeout time.Duration
	slow    *bool
}

func (f *fleet) commands() []subcommand {
	const usual, long, longest, many = 30 * time.Second, 90 * time.Second, 2 * time.Minute, 100
	var pods command.Pods
	var decisions command.Decisions
	var doctor command.Doctor
	var why command.Why
	var trace command.Trace
	var bundle command.Bundle
	var page dashboard
	return []subcommand{
		{"pods", "[POD...]", "pods of all nodes with the state of their redirection", pods.Rows(), many, func(ctx context.Context, c call) (int, error) { return f.pods(ctx, &pods, c) }, usual, &pods.Check},
		{"why", "POD", "a pod from injection to kernel, and the way of a packet", why.Rows(), 1, func(ctx context.Context, c call) (int, error) {
			return f.onePod(ctx, "why", why.Rows(), why.Namespace, why.Output, 0, c)
		}, usual, nil},
		{"trace", "POD", "real packets of a pod", trace.Rows(), 1, func(ctx context.Context, c call) (int, error) {
			lasts, _ := time.ParseDuration(trace.For) // the agent refuses a bad one
			return f.onePod(ctx, "trace", trace.Rows(), trace.Namespace, trace.Output, lasts, c)
		}, usual, nil},
		{"decisions", "", "the last calls of the plugin on all nodes", decisions.Rows(), 0, func(ctx context.Context, c call) (int, error) { return f.decisions(ctx, &decisions, c) }, usual, nil},
		{"doctor", "", "checks of all nodes; with --for ambient also of what ambient mode needs", doctor.Rows(), 0, func(ctx context.Context, c call) (int, error) { return f.doctor(ctx, &doctor, c) }, long, nil},
		{"bundle", "[POD]", "a tar.gz file for a bug report, to standard output: of all nodes, or of the pod's node", bundle.Rows(), 1, func(ctx context.Context, c call) (int, error) { return f.bundle(ctx, &bundle, c) }, longest, nil},
		{"dashboard", "[POD]", "forwards the page of an agent to localhost", page.rows(), 1, func(ctx context.Context, c call) (int, error) { return f.dashboard(ctx, page, c) }, usual, nil},
		{"completion", "bash|zsh|fish", "the completion for a shell", nil, many, func(_ context.Context, c call) (int, error) { return f.completion(c.operands...) }, usual, nil},
		{"version", "", "the version of this program", output.VersionRows(), 0, func(_ context.Context, c call) (int, error) {
			args := append(given(c.in, output.VersionRows()), c.operands...)
			return output.PrintVersion(applet.Call{Args: args, Stdout: f.Stdout, Stderr: f.Stderr, Getenv: f.Getenv}), nil
		}, usual, nil},
	}
}

// all are the flags that a command knows.
func (f *fleet) all(c subcommand) []settings.Setting {
	return slices.Concat(c.rows, f.rows(), passed())
}

// every are the flags of all commands, with which a command's name is found behind flags.
func (f *fleet) every() (rows []settings.Setting) {
	for _, c := range f.commands() {
		rows = append(rows, c.rows...)
	}
	return slices.Concat(rows, f.rows(), passed())
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
		code = applet.ExitUsage
		if !strings.HasSuffix(err.Error(), " --help") { // an agent's error
			more = "; see kubectl istio-cni " + f.command + "--help"
		}
	}
	_, _ = fmt.Fprintf(c.Stderr, "error: %s%s\n", strings.ReplaceAll(err.Error(), "\n", "\nerror: "), more)
	return code
}

func (f *fleet) run(ctx context.Context) (code int, err error) {
	if len(f.Args) > 0 && f.Args[0] == completion.Command {
		return applet.ExitOK, completion.Print(f.Stdout, f.candidates(ctx, f.Args[1:]))
	}
	operands, flags := settings.Operands(f.every(), f.Args)
	if len(operands) > 0 && operands[0] == "help" {
		operands, flags = operands[1:], []string{"--help"}
	}
	none := settings.Group{Title: "Flags", Rows: slices.Concat(f.rows(), passed())}
	if slices.Equal(f.Args, []string{"--version"}) {
		operands, flags = []string{"version"}, nil
	}
	if len(operands) == 0 {
		if _, err = f.read(none.Rows, flags); err == nil || errors.Is(err, settings.ErrHelp) {
			err = f.about()
		}
		return applet.ExitOK, err
	}
	all := f.commands()
	at := slices.IndexFunc(all, func(c subcommand) bool { return c.name == operands[0] })
	if at < 0 {
		return 0, &usageError{fmt.Errorf("unknown command %q%s", operands[0], settings.Suggestion(operands[0], names(all)))}
	}
	chosen := all[at]
	f.command = chosen.name + " "
	in, err := f.read(f.all(chosen), flags)
	switch {
	case errors.Is(err, settings.ErrHelp):
		return applet.ExitOK, f.describe(chosen)
	case err != nil:
		return 0, err
	case len(operands)-1 > chosen.most:
		return 0, &usageError{fmt.Errorf("stray argument %q", operands[chosen.most+1])}
	}
	if f.timeout == 0 {
		if f.timeout = chosen.timeout; chosen.slow != nil && *chosen.slow {
			f.timeout *= 3
		}
	}
	return chosen.run(ctx, call{operands[1:], in})
}

// read reads flags by a table. The error is settings.ErrHelp or a usageError.
func (f *fleet) read(rows []settings.Setting, flags []string) (in settings.Input, err error) {
	for i, s := range rows {
		if s.Local {
			rows[i].Default, rows[i].Value = "", settings.Checked(new(string), func(string) error {
				return errors.New("only istio-cni on a node has this flag")
			})
		}
	}
	in, err = settings.Parse(rows, flags, func(string) (string, bool) { return "", false }) // variables are the node's
	if err != nil {
		return in, err
	}
	if _, err = in.Read(rows); err != nil {
		err = &usageError{err}
	}
	f.options.kubectl = given(in, passed())
	return in, err
}

func names(all []subcommand) (names []string) {
	for _, c := range all {
		names = append(names, c.name)
	}
	return names
}

// about prints the help.
func (f *fleet) about() error {
	var b strings.Builder
	for _, c := range f.commands() {
		fmt.Fprintf(&b, "   %-26s %s\n", c.name+" "+c.operands, c.summary)
	}
	_, err := fmt.Fprintf(f.Stdout, help, b.String())
	return err
}

// describe prints the help of a command.
func (f *fleet) describe(c subcommand) error {
	if c.name == "completion" {
		_, err := f.completion("--help")
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "NAME:\n   kubectl istio-cni %s - %s\n\nUSAGE:\n   kubectl istio-cni %[1]s %[3]s[flags]\n\n", c.name, c.summary,
		strings.TrimLeft(c.operands+" ", " "))
	if strings.Contains(c.operands, "POD") {
		b.WriteString("POD is NAMESPACE/NAME, or a name in -n NS or " + where(c.name) + ".\n" +
			"KIND/NAME stands for a workload's, such as deploy/web; KIND is deploy, ds, sts, rs or job.\n\n")
	}
	if examples := examples(c.name); examples != "" {
		b.WriteString("EXAMPLES:\n" + examples + "\n")
	}
	if rows := slices.DeleteFunc(c.rows, func(s settings.Setting) bool { return s.Local }); len(rows) > 0 {
		for i := range rows {
			rows[i].Env = nil // a variable counts on the node only
		}
		settings.Help(&b, settings.Group{Title: "Flags", Rows: rows})
		b.WriteString("\n")
	}
	_, err := io.WriteString(f.Stdout, b.String()+common)
	return err
}

// examples returns examples of a command, one in each line.
func examples(command string) (text string) {
	for _, args := range map[string][]string{
		"pods":      {"-n shop --bypassing", "deploy/web -n shop -w", "-l app=web --check"},
		"why":       {"-n shop web-0", "deploy/web -n shop --to postgres.shop.svc:5432", "shop/web-0 --from 10.1.2.3 --port 8080"},
		"trace":     {"deploy/web -n shop --port 5432"},
		"decisions": {"--since 10m", "-n shop -w"},
		"bundle":    {"> all-nodes.tar.gz", "-n shop web-0 > web-0.tar.gz"},
		"dashboard": {"deploy/web -n shop"},
	}[command] {
		text += "   kubectl istio-cni " + command + " " + args + "\n"
	}
	return text
}

// where says where a pod without a namespace is looked for.
func where(command string) string {
	if command == "pods" {
		return "in any namespace"
	}
	return "in the namespace of kubectl's context"
}

// usageError is a wrong argument.
type usageError struct{ error }
