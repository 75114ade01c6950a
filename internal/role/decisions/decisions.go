// Package decisions is the role "istio-cni decisions": it prints the plugin's last decisions on this node, with their reasons.
//
// It promises the node agent's own record, the latest first, in full, and that no text of a decision reaches the terminal as a
// control character or imitates a cell or row of its own. It never changes anything.
//
// Start at Run.
package decisions

import (
	"context"
	"fmt"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

const head = `NAME:
   istio-cni decisions - the last decisions of the plugin on this node, with their reasons (root)

USAGE:
   istio-cni decisions [flags]

The node agent remembers the last 512 calls that plugins reported and, with source watch, the last 512 pods that the
plugin leaves alone without a report: their AGE is that of the pod. A restart of the agent keeps them. Long texts are
truncated, and texts of several words are quoted: a pod's author may have written them.

EXIT CODES:
   %d  done
   %d  the node agent does not answer, or has no decision about a pod that --pod names
   %d  a bad value or flag

`

const (
	// timeout bounds the request, interval is the time between two requests of a watch.
	timeout  = 30 * time.Second
	interval = 2 * time.Second
)

type config struct{ command.Decisions }

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "decisions", cfg.Rows(), head); done {
		return code
	}
	if err := cfg.Check(); err != nil {
		return c.Refuse("decisions", err)
	}
	if cfg.Watch {
		return cfg.watch(c)
	}
	list, err := query(context.Background(), cfg, output.NewHead(c.Getenv))
	if err == nil {
		err = output.Print(c.Stdout, list, cfg.Output, func() error { return cfg.show(c, list.Items) })
	}
	if err == nil && len(list.Items) == 0 && cfg.Pod != "" {
		err = fmt.Errorf("the agent of this node holds no such decision about a pod with %q in its NAMESPACE/NAME", cfg.Pod)
	}
	return c.End(err)
}

// query asks the agent for its decisions, and returns those that the flags select.
func query(ctx context.Context, cfg config, head document.Head) (list document.DecisionList, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	all, err := agentapi.Ask(ctx, cfg.Socket, "", func(agent *agentapi.Agent) ([]agentapi.Report, error) { return agent.Decisions(ctx) })
	slices.SortStableFunc(all, func(a, b agentapi.Report) int { return b.Time.Compare(a.Time) })
	list.Head = head
	for _, r := range all {
		if strings.Contains(r.Namespace+"/"+r.Pod, cfg.Pod) && (cfg.Namespace == "" || r.Namespace == cfg.Namespace) && (cfg.Since == 0 || time.Since(r.Time) <= cfg.Since) {
			list.Items = append(list.Items, r.Decision())
		}
		if cfg.Limit > 0 && len(list.Items) == cfg.Limit {
			break
		}
	}
	list.Omitted = len(all) - len(list.Items)
	return list, err
}

// show prints decisions; their texts are printable and bounded.
func (c *config) show(call applet.Call, some []document.Decision) error {
	if len(some) == 0 && c.Pod == "" {
		_, err := fmt.Fprintln(call.Stderr, "the agent of this node holds no such decision")
		return err
	}
	return output.Decisions(call, some, true)
}

// watch prints the decisions, and then each new one, until a signal ends it.
func (c *config) watch(call applet.Call) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	w := output.WatchDecisions(call, interval)
	w.Request = func(ctx context.Context) ([]document.Decision, func(document.Decision) bool, error) {
		list, err := query(ctx, *c, document.Head{})
		return list.Items, nil, err
	}
	return call.End(w.Run(ctx))
}
