// Package pods is the role "istio-cni pods": it lists the pods of this node with the state of their redirection.
//
// It promises the node agent's own view, and an exit code for scripts. It never changes anything and never reads a namespace
// itself.
//
// Start at Run.
package pods

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

const head = `NAME:
   istio-cni pods - the pods of this node and whether they are redirected (root)

USAGE:
   istio-cni pods [flags]

The node agent inspects each pod of the mesh at its start, after changes and every few minutes. "istio-cni why NAMESPACE/NAME" shows
one pod in detail.

EXIT CODES:
   %d  every pod is captured, or the node has no pod of the mesh
   %d  the node agent does not answer, its audit is off, or the namespace has no pod here
   %d  a bad value or flag
   3  some pod is not captured

`

// exitBypass is the exit code if a listed pod is not captured.
const exitBypass = 3

// Timeouts of the request: without and with an inspection of all pods.
const (
	timeout      = 10 * time.Second
	checkTimeout = 70 * time.Second
)

type config struct {
	socket, namespace     string
	states                []string
	bypassing, all, check bool
	output                output.Form
}

func (c *config) rows() []settings.Setting {
	states := func(text string) error {
		known := append(audit.States(), audit.Outside)
		if !slices.Contains(known, audit.State(text)) {
			return fmt.Errorf("want one of %s", strings.Trim(fmt.Sprint(known), "[]"))
		}
		return nil
	}
	return []settings.Setting{
		{Name: "bypassing", Default: "false", Use: "only pods that are not captured", Value: settings.Bool(&c.bypassing)},
		{Name: "state", Arg: "STATES", Use: "only pods in one of these states, between commas", Value: settings.List(&c.states, ",", 0, settings.Check(states))},
		{Name: "namespace", Aliases: []string{"n"}, Arg: "NAME", Use: "only pods of this namespace", Value: settings.Text(&c.namespace, nil)},
		{Name: "all", Aliases: []string{"a"}, Default: "false", Use: "also pods that the plugin leaves alone", Value: settings.Bool(&c.all)},
		{Name: "check", Default: "false", Use: "inspect every pod now", Value: settings.Bool(&c.check)},
		output.Flag(&c.output, "table, json or yaml", output.Table, output.JSON, output.YAML),
		agentapi.SocketSetting(&c.socket),
	}
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "pods", cfg.rows(), head); done {
		return code
	}
	all, err := ask(cfg)
	if err == nil {
		known := cfg.namespace == "" || slices.ContainsFunc(all, func(s audit.Status) bool { return s.Namespace == cfg.namespace })
		all = slices.DeleteFunc(all, func(s audit.Status) bool { return !cfg.selects(s) })
		err = show(c, all, cfg, known)
	}
	if err != nil {
		return c.Fail(err)
	}
	if slices.ContainsFunc(all, audit.Status.Faulty) {
		return exitBypass
	}
	return applet.ExitOK
}

// selects reports whether the flags select a pod.
func (c *config) selects(s audit.Status) bool {
	switch {
	case c.namespace != "" && s.Namespace != c.namespace, c.bypassing && !s.Faulty():
		return false
	case len(c.states) > 0:
		return slices.Contains(c.states, string(s.State))
	}
	return c.all || s.State != audit.Outside
}

// ask requests the pods from the agent.
func ask(c config) (all []audit.Status, err error) {
	limit := timeout
	if c.check {
		limit = checkTimeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err = agentapi.Ask(ctx, c.socket, "", func(agent *agentapi.Agent) (err error) {
		all, err = agent.Audit(ctx, c.check)
		return err
	})
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == 404 {
		err = fmt.Errorf("%w (the node agent is of a version without the audit)", err)
	}
	if slices.ContainsFunc(all, func(s audit.Status) bool { return s.Pod == "" || s.State == "" }) {
		err = errors.New("an answer without the name or the state of a pod: the node agent is of another version; see istio-cni version")
	}
	return all, err
}

// show prints the pods, or that no pod is listed. It fails if the node has no pod of the namespace.
func show(c applet.Call, all []audit.Status, cfg config, known bool) error {
	err := output.Print(c.Stdout, all, cfg.output, func() error {
		switch {
		case !known:
			return nil
		case len(all) == 0:
			return cfg.none(c)
		}
		return output.Pods(c, all, cfg.byState())
	})
	if err == nil && !known {
		err = fmt.Errorf("namespace %q has no pod with a network of its own on this node", cfg.namespace)
	}
	return err
}

// byState reports whether the flags select pods by their state.
func (c *config) byState() bool { return c.bypassing || len(c.states) > 0 }

// none prints that no pod is listed.
func (c *config) none(call applet.Call) error {
	text := "no pod of the mesh on this node"
	if c.byState() {
		text = "no pod in such a state on this node"
	}
	if c.namespace != "" {
		text += fmt.Sprintf(", in namespace %q", c.namespace)
	}
	_, err := fmt.Fprintln(call.Stderr, text)
	return err
}
