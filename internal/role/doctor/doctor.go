// Package doctor is the role "istio-cni doctor": it checks everything around the plugin that decides whether pods of the mesh are
// redirected on this node: the container runtime, other programs, the API server, the kernel.
//
// It promises a result with a remedy for every check, within a bounded time. If the node, the agent or the API server is
// not accessible, the result says so. It changes nothing; its self-test works in its own network namespaces.
//
// Start at Run and the table in checks; view.go has the inputs of the checks, and the other files the checks.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

const head = `NAME:
   istio-cni doctor - checks the prerequisites of redirection on this node (root)

USAGE:
   istio-cni doctor [flags]

In the node agent's container it needs no flag. On a node, and before the installation: with the node's file system
mounted at /host, istio-cni doctor --host-root /host (manifests/examples/doctor.yaml). A check that cannot run there
gives the reason, marked "!".

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

func ok(format string, args ...any) document.Check {
	return document.Check{Result: document.OK, Text: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) document.Check {
	return document.Check{Result: document.Warn, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(remedy, format string, args ...any) document.Check {
	return document.Check{Result: document.Fail, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

type config struct{ command.Doctor }

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "doctor", cfg.Rows(), head); done {
		return code
	}
	if info, err := os.Stat(cfg.HostRoot); cfg.HostRoot != "" && (err != nil || !info.IsDir()) {
		_, _ = fmt.Fprintf(c.Stderr, "error: flag --host-root: value %q: want a directory with the node's file system\n", cfg.HostRoot)
		return applet.ExitUsage
	}
	end, cancel := context.WithTimeout(context.Background(), timeout+grace)
	defer cancel()
	ctx, cancel := context.WithTimeout(end, timeout)
	defer cancel()
	v := newView(cfg, c.Getenv)
	defer v.close()
	list := checks()
	if cfg.For == command.ForAmbient || v.features.ambient {
		list = append(list, ambientChecks()...)
	}
	all := run(ctx, end, v, list)
	report := document.DoctorReport{Head: output.NewHead(c.Getenv), Items: all}
	report.Node = cmp.Or(cfg.Node, report.Node)
	if err := output.Print(c.Stdout, report, cfg.Output, func() error { return output.Checks(c, all) }); err != nil {
		return c.Fail(err)
	}
	if slices.ContainsFunc(all, func(c document.Check) bool { return c.Result == document.Fail }) {
		return applet.ExitError
	}
	return applet.ExitOK
}

// named is a check with its name.
type named struct {
	name string
	make func(context.Context, *view) document.Check
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
func run(ctx, end context.Context, v *view, list []named) []document.Check {
	answers := make([]chan document.Check, len(list))
	for i, one := range list {
		answers[i] = make(chan document.Check, 1)
		go func() { answers[i] <- one.make(ctx, v) }()
	}
	all := make([]document.Check, len(list))
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
