// Package pods is the role "istio-cni pods": it lists the pods of this node with the state of their redirection.
//
// It promises the node agent's own view, and an exit code for scripts. It never changes anything and never reads a namespace
// itself.
//
// Start at Run.
package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

const head = `NAME:
   istio-cni pods - the pods of this node and whether they are redirected (root)

USAGE:
   istio-cni pods [NAME...] [flags]   only pods with these names, also NAMESPACE/NAME

The node agent inspects each pod of the mesh at its start, after changes and every few minutes. "istio-cni why
NAMESPACE/NAME" shows one pod in detail.

EXIT CODES:
   %d  every pod is captured, or the node has no pod of the mesh
   %d  the node agent does not answer, its audit is off, the namespace or name has no pod here, or --check left out
       pods
   %d  a bad value or flag
   3  some pod is not captured

`

// Timeouts of the request: without and with an inspection of all pods.
const (
	timeout      = 10 * time.Second
	checkTimeout = 70 * time.Second
	// interval is the time between two requests of a watch.
	interval = 2 * time.Second
)

// Run runs the role.
func Run(c applet.Call) int {
	var cfg command.Pods
	operands, args := settings.Operands(cfg.Rows(), c.Args)
	c.Args = args
	if code, done := service.Settings(c, "pods", cfg.Rows(), head); done {
		return code
	}
	if err := cfg.Named(operands); err != nil {
		return c.Refuse("pods", err)
	}
	if cfg.Watch {
		return watch(c, cfg)
	}
	all, err := ask(context.Background(), cfg)
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == 400 {
		return c.Refuse("pods", errors.New(refusal.Message))
	}
	if err == nil {
		missing := cfg.Missing(all, "on this node")
		head := output.NewHead(c.Getenv)
		head.Omitted = len(all)
		all = slices.DeleteFunc(all, func(s audit.Status) bool { return !cfg.Selects(s) })
		head.Omitted -= len(all)
		err = errors.Join(show(c, document.PodList{Head: head, Items: all}, cfg, missing), command.LeftOut(all))
	}
	if err != nil {
		return c.Fail(err)
	}
	if slices.ContainsFunc(all, audit.Status.Faulty) {
		return applet.ExitPast
	}
	return applet.ExitOK
}

// watch prints the pods, and then those that change, until a signal ends it.
func watch(c applet.Call, cfg command.Pods) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	w := output.WatchPods(c, interval, cfg.ByState())
	w.Request = func(ctx context.Context) ([]audit.Status, func(audit.Status) bool, error) {
		all, err := ask(ctx, cfg)
		return slices.DeleteFunc(all, func(s audit.Status) bool { return !cfg.Selects(s) }), nil, err
	}
	return c.End(w.Run(ctx))
}

// ask requests the pods from the agent.
func ask(ctx context.Context, c command.Pods) (all []audit.Status, err error) {
	limit := timeout
	if c.Check {
		limit = checkTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	all, err = agentapi.Ask(ctx, c.Socket, "", func(agent *agentapi.Agent) ([]audit.Status, error) {
		return agent.Audit(ctx, c.Check, c.Selector)
	})
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == 404 {
		err = fmt.Errorf("%w (the node agent is of a version without the audit)", err)
	}
	if slices.ContainsFunc(all, func(s audit.Status) bool { return s.Pod == "" || s.State == "" }) {
		err = errors.New("an answer without the name or the state of a pod: the node agent is of another version; see istio-cni version")
	}
	return all, err
}

// show prints the pods, or that no pod is listed. Missing is its error if flags or operands name what the node has not.
func show(c applet.Call, list document.PodList, cfg command.Pods, missing error) error {
	err := output.Print(c.Stdout, list, cfg.Output, func() error {
		switch {
		case missing != nil && len(list.Items) == 0:
			return nil
		case len(list.Items) == 0:
			return none(c, cfg)
		}
		return output.Pods(c, list.Items, cfg.ByState())
	})
	return cmp.Or(err, missing)
}

// none prints that no pod is listed.
func none(call applet.Call, cfg command.Pods) error {
	text := "no pod of the mesh on this node"
	if cfg.ByState() {
		text = "no pod in such a state on this node"
	}
	if cfg.Namespace != "" {
		text += fmt.Sprintf(", in namespace %q", cfg.Namespace)
	}
	_, err := fmt.Fprintln(call.Stderr, text)
	return err
}
