// Package decisions is the role "istio-cni decisions": what the plugin decided lately on this node, and why.
//
// It promises the node agent's own record, the latest first. It never changes anything.
//
// Start at Run.
package decisions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/settings"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/agentcall"
)

const head = `NAME:
   istio-cni decisions - what the plugin decided lately on this node, and why (root)

USAGE:
   istio-cni decisions [flags]

The node agent remembers the last 512 pods that plugins reported; those that the runtime's annotations showed to be outside of the
mesh are not among them.

EXIT CODES:
   %d  done
   %d  the node agent cannot be asked
   %d  a bad value or flag

FLAGS:
`

// patience bounds the whole question.
const patience = 5 * time.Second

type config struct {
	socket, pod string
	asJSON      bool
}

func (c *config) rows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "socket", Arg: "FILE", Env: []string{"ISTIO_CNI_POD_SOCKET"}, Default: path.Join(cniconf.DefaultRunDir, agentcall.SocketName),
			Use: "the node agent's socket", Set: func(s string) error { c.socket = s; return nil },
		},
		{
			Name: "pod", Arg: "TEXT", Use: "only pods whose NAMESPACE/NAME has this in it",
			Set: func(s string) error { c.pod = s; return nil },
		},
		{Name: "json", Default: "false", Use: "print JSON", Set: func(s string) error { return settings.Toggle(&c.asJSON, s) }},
	}
}

// Run is the role.
func Run(c applet.Call) int {
	var cfg config
	rows := cfg.rows()
	found, err := settings.Find("istio-cni decisions", rows, c.Args, c.Getenv)
	if errors.Is(err, settings.ErrHelp) {
		_, _ = fmt.Fprintf(c.Stdout, head, applet.ExitOK, applet.ExitError, applet.ExitUsage)
		settings.Help(c.Stdout, rows)
		return applet.ExitOK
	}
	if err = errors.Join(err, found.Apply(rows)); err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %s\nsee istio-cni decisions --help\n", strings.ReplaceAll(err.Error(), "\n", "\nerror: "))
		return applet.ExitUsage
	}
	all, err := ask(cfg.socket)
	if err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v\n", err)
		return applet.ExitError
	}
	if err := show(c.Stdout, all, cfg); err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: printing: %v\n", err)
		return applet.ExitError
	}
	return applet.ExitOK
}

func ask(socket string) ([]agentcall.Report, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	agent, err := agentcall.Dial(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w (is the node agent running, and does it know the name of its node? KUBERNETES_NODE_NAME)", err)
	}
	if err != nil {
		return nil, err
	}
	defer agent.Close() //nolint:errcheck // all is said
	return agent.Decisions(ctx)
}

func show(w io.Writer, all []agentcall.Report, cfg config) error {
	var some []agentcall.Report
	for _, r := range all {
		if strings.Contains(r.Namespace+"/"+r.Pod, cfg.pod) {
			some = append(some, r)
		}
	}
	if cfg.asJSON {
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(some)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "TIME\tPOD\tCAPTURED\tREASON\tSOURCE\tBACKEND\tMS\tPROCESSES\tREQUESTS\tERROR")
	for _, r := range some {
		reason := strings.TrimSpace(r.Reason + " " + r.Detail)
		_, _ = fmt.Fprintf(table, "%s\t%s/%s\t%v\t%s\t%s\t%s\t%.1f\t%d\t%d\t%s\n", r.Time.Format(time.RFC3339), r.Namespace, r.Pod,
			r.Captured, reason, r.Source, r.Backend, 1000*r.Seconds[agentcall.PhaseTotal], r.Processes, r.Requests,
			strings.ReplaceAll(r.Error, "\n", "; "))
	}
	return table.Flush()
}
