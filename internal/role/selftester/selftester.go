// Package selftester is the role "istio-cni selftest": it tests with real packets in a scratch namespace which backend
// redirects pods on this node.
//
// It promises to change nothing on the node except the file of --record. It never needs the node agent.
//
// Start at Run.
package selftester

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// exitUnable is the exit code for a node on which the backend cannot redirect pods.
const exitUnable = 3

const head = `NAME:
   istio-cni selftest - tests with real packets which backend redirects pods on this node (root)

USAGE:
   istio-cni selftest [flags]

It works in two temporary network namespaces. The node agent does the same when it starts.

EXIT CODES:
   %d  pods can be redirected
   %d  the test could not run
   %d  a bad value or flag
   %d  pods cannot be redirected

`

type config struct {
	record  string
	backend redirect.Backend
	asJSON  bool
	output  output.Form
}

// Rows are the flags for the completion.
func Rows() []settings.Setting { return new(config).rows() }

func (c *config) rows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "backend", Arg: "WAY", Env: []string{"CNI_BACKEND"}, Default: string(redirect.Auto),
			Use:   "backend that must work for exit code 0: auto, netlink, native or iptables",
			Value: settings.Of(&c.backend, redirect.ParseBackend, func(b redirect.Backend) string { return string(b) }),
		},
		{Name: "record", Arg: "DIR", Use: "write the verdict for the plugin, into the agent's run directory", Value: settings.Text(&c.record, nil)},
		output.Flag(&c.output),
		{Name: "json", Default: "false", Use: "the same as -o json", Value: settings.Bool(&c.asJSON)},
	}
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "selftest", cfg.rows(), head, exitUnable); done {
		return code
	}
	path, _ := c.Getenv("PATH")
	verdict, err := selfcheck.Run(context.Background(), path, true, slog.New(slog.DiscardHandler))
	if err == nil && cfg.record != "" {
		err = verdict.Record(hostfs.Disk{}, cfg.record)
	}
	if err == nil {
		if cfg.asJSON {
			cfg.output = output.JSON
		}
		err = output.Print(c.Stdout, report(verdict, output.NewHead(c.Getenv)), cfg.output, func() error {
			return output.Show(c, output.Fold(verdict.Text(), c.Columns()))
		})
	}
	if err != nil {
		return c.Fail(err)
	}
	if err := verdict.Served(cfg.backend); err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v\n", err)
		return exitUnable
	}
	return applet.ExitOK
}

// report is the verdict for users.
func report(v selfcheck.Verdict, head document.Head) document.SelfTestReport {
	r := document.SelfTestReport{Head: head, Kernel: v.Kernel, Auto: string(v.Choice)}
	for _, one := range v.Results {
		b := document.BackendReport{Backend: string(one.Backend), Works: one.Untried == "" && len(one.Problems) == 0, NotTried: one.Untried}
		for _, p := range one.Problems {
			b.Problems = append(b.Problems, document.BackendProblem{Family: p.Family, Mode: p.Mode, Text: p.Text})
		}
		r.Items = append(r.Items, b)
	}
	return r
}
