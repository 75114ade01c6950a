// Package doctor is the role "istio-cni doctor": it checks everything around the plugin that decides whether pods of the mesh are
// redirected on this node: the container runtime, other programs, the API server, the kernel.
//
// It promises a result with a remedy for every check, within a bounded time. If the node, the agent or the API server is
// not accessible, the result says so. It changes nothing; its self-test works in its own network namespaces.
//
// Start at Run and the table in checks; view.go has the inputs of the checks, and the other files the checks.
package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

const head = `NAME:
   istio-cni doctor - checks the prerequisites of redirection on this node (root)

USAGE:
   istio-cni doctor [flags]

In the node agent's container it needs no flag. On a node, and before the installation: with the node's file system mounted at
/host, istio-cni doctor --host-root /host (manifests/examples/doctor.yaml). A check that cannot run there gives the reason, marked "!".

EXIT CODES:
   %d  no check failed
   %d  a check failed (✗)
   %d  a bad value or flag

`

// timeout bounds the checks, which all run at once. After it, a check has grace to report what it waited for.
const (
	timeout = 18 * time.Second
	grace   = time.Second
)

func ok(format string, args ...any) output.Check {
	return output.Check{Result: output.OK, Text: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) output.Check {
	return output.Check{Result: output.Warn, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(remedy, format string, args ...any) output.Check {
	return output.Check{Result: output.Fail, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

type config struct {
	hostRoot, runDir, netDir, serviceAccount, node, namespace string
	binDirs                                                   []string
	purpose                                                   string
	output                                                    output.Form
}

// The agent's default directories.
const (
	defaultNetDir = "/host/etc/cni/net.d"
	defaultBinDir = "/host/opt/cni/bin"
)

// rows are the settings. The node agent's settings have its names, variables and defaults.
func (c *config) rows() []settings.Setting {
	return settings.Named("", []settings.Setting{
		output.Flag(&c.output, "table, json or yaml", output.Table, output.JSON, output.YAML),
		{
			Name: "for", FlagOnly: true, Arg: "MODE", Use: "ambient: check as well what ambient mode needs; the default if the agent serves it",
			Value: settings.Choice(&c.purpose, "", forAmbient),
		},
		{
			Name: "host-root", FlagOnly: true, Arg: "DIR", Use: "where the node's file system is seen; without it /host or the root of the node's first process",
			Value: settings.Text(&c.hostRoot, settings.Optional(settings.AbsolutePath)),
		},
		{Name: "cni-agent-run-dir", Arg: "DIR", Default: cniconf.DefaultRunDir, Use: "the agent's run directory", Value: settings.Text(&c.runDir, settings.AbsolutePath)},
		{
			Name: "mounted-cni-net-dir", Arg: "DIR", Default: defaultNetDir, Use: "where the agent installs configuration, as mounted in its container",
			Value: settings.Text(&c.netDir, settings.AbsolutePath),
		},
		{
			Name: "mounted-cni-bin-dirs", Arg: "DIRS", Default: defaultBinDir, Use: "where the agent installs the plugin, as mounted in its container",
			Value: settings.List(&c.binDirs, ",", 1, settings.AbsolutePath),
		},
		{
			Name: "service-account-dir", Arg: "DIR", Default: "/var/run/secrets/kubernetes.io/serviceaccount", Use: "directory of token and ca.crt",
			Value: settings.Text(&c.serviceAccount, settings.AbsolutePath),
		},
		{
			Name: "node-name", Arg: "NAME", Env: []string{"NODE_NAME", "KUBERNETES_NODE_NAME"}, Use: "this node; without it the host's name",
			Value: settings.Text(&c.node, nil),
		},
		{Name: "pod-namespace", Arg: "NAME", Use: "the agent's namespace; by default the namespace in its token", Value: settings.Text(&c.namespace, nil)},
	}...)
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "doctor", cfg.rows(), head); done {
		return code
	}
	if info, err := os.Stat(cfg.hostRoot); cfg.hostRoot != "" && (err != nil || !info.IsDir()) {
		_, _ = fmt.Fprintf(c.Stderr, "error: flag --host-root: value %q: want a directory with the node's file system\n", cfg.hostRoot)
		return applet.ExitUsage
	}
	end, cancel := context.WithTimeout(context.Background(), timeout+grace)
	defer cancel()
	ctx, cancel := context.WithTimeout(end, timeout)
	defer cancel()
	v := newView(cfg, c.Getenv)
	defer v.close()
	list := checks()
	if cfg.purpose == forAmbient || v.features.ambient {
		list = append(list, ambientChecks()...)
	}
	all := run(ctx, end, v, list)
	if err := output.Print(c.Stdout, all, cfg.output, func() error { return output.Checks(c, all) }); err != nil {
		return c.Fail(err)
	}
	if slices.ContainsFunc(all, func(c output.Check) bool { return c.Result == output.Fail }) {
		return applet.ExitError
	}
	return applet.ExitOK
}

// named is a check with its name.
type named struct {
	name string
	make func(context.Context, *view) output.Check
}

// checks returns all checks in the order of the output.
func checks() []named {
	return []named{
		{"directories", directories},
		{"primary", primary},
		{"socket-lb", socketLB},
		{"self-test", selfTest},
		{"token", token},
		{"rights", rights},
		{"injection", injection},
	}
}

// run runs all checks at once. It abandons a check that has not ended with end, because the check may hang in the kernel.
func run(ctx, end context.Context, v *view, list []named) []output.Check {
	answers := make([]chan output.Check, len(list))
	for i, one := range list {
		answers[i] = make(chan output.Check, 1)
		go func() { answers[i] <- one.make(ctx, v) }()
	}
	all := make([]output.Check, len(list))
	for i, one := range list {
		select {
		case all[i] = <-answers[i]:
		case <-end.Done():
			all[i] = warn("see whether a mount or the API server hangs, and try again", "the check did not end in time")
			if len(answers[i]) > 0 {
				all[i] = <-answers[i]
			}
		}
		all[i].Name = one.name
		all[i].Text = printable.Text(strings.Join(strings.Fields(all[i].Text), " "), maxText)
		all[i].Remedy = printable.Text(all[i].Remedy, maxText)
	}
	return all
}

// maxText bounds a sentence, which may quote files and servers.
const maxText = 2000

// mostNames bounds the names in a sentence.
const mostNames = 5
