// Package decisions is the role "istio-cni decisions": it prints the plugin's last decisions on this node, with their reasons.
//
// It promises the node agent's own record, the latest first, in full, and that no text of a decision reaches the terminal as a
// control character or imitates a cell or row of its own. It never changes anything.
//
// Start at Run.
package decisions

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

const head = `NAME:
   istio-cni decisions - the last decisions of the plugin on this node, with their reasons (root)

USAGE:
   istio-cni decisions [flags]

The node agent remembers the last 512 calls that plugins reported and, with source watch, the last 512 pods that the plugin leaves
alone without a report: their AGE is that of the pod. A restart of the agent keeps them. Long texts are truncated, and texts of
several words are quoted: a pod's author may have written them.

EXIT CODES:
   %d  done
   %d  the node agent does not answer, or has no decision about a pod that --pod names
   %d  a bad value or flag

`

// timeout bounds the request.
const timeout = 30 * time.Second

type config struct {
	socket, pod string
	asJSON      bool
	output      output.Form
	limit       int
	since       time.Duration
}

func (c *config) rows() []settings.Setting {
	return []settings.Setting{
		agentapi.SocketSetting(&c.socket),
		{Name: "pod", Arg: "TEXT", Use: "only pods whose NAMESPACE/NAME contains this text", Value: settings.Text(&c.pod, nil)},
		{Name: "limit", Arg: "N", Use: "only the N latest decisions; 0 for all", Value: settings.Number(&c.limit, math.MaxInt32)},
		{
			Name: "since", Arg: "DURATION", Use: "only decisions of the last DURATION, such as 10m",
			Value: settings.Duration(&c.since, time.Nanosecond, 0),
		},
		output.Flag(&c.output, "table, json or yaml", output.Table, output.JSON, output.YAML),
		{Name: "json", Default: "false", Use: "the same as -o json", Value: settings.Bool(&c.asJSON)},
	}
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if code, done := service.Settings(c, "decisions", cfg.rows(), head); done {
		return code
	}
	if cfg.asJSON {
		cfg.output = output.JSON
	}
	some, err := query(cfg)
	if err == nil {
		err = output.Print(c.Stdout, some, cfg.output, func() error { return cfg.show(c, some) })
	}
	if err == nil && len(some) == 0 && cfg.pod != "" {
		err = fmt.Errorf("the agent of this node holds no such decision about a pod with %q in its NAMESPACE/NAME", cfg.pod)
	}
	if err != nil {
		return c.Fail(err)
	}
	return applet.ExitOK
}

// query returns the request's parameters for the flags.
func query(cfg config) (some []agentapi.Report, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var all []agentapi.Report
	err = agentapi.Ask(ctx, cfg.socket, "", func(agent *agentapi.Agent) (err error) {
		all, err = agent.Decisions(ctx)
		return err
	})
	slices.SortStableFunc(all, func(a, b agentapi.Report) int { return b.Time.Compare(a.Time) })
	some = []agentapi.Report{} // an array in JSON
	for _, r := range all {
		if strings.Contains(r.Namespace+"/"+r.Pod, cfg.pod) && (cfg.since == 0 || time.Since(r.Time) <= cfg.since) {
			some = append(some, r)
		}
		if cfg.limit > 0 && len(some) == cfg.limit {
			break
		}
	}
	return some, err
}

// show prints decisions; their texts are printable and bounded.
func (c *config) show(call applet.Call, some []agentapi.Report) error {
	switch {
	case len(some) == 0 && c.pod == "":
		_, err := fmt.Fprintln(call.Stderr, "the agent of this node holds no such decision")
		return err
	case len(some) == 0:
		return nil
	}
	rows := [][]string{{"AGE", "POD", "CAPTURED", "REASON", "SOURCE", "MS", "DETAIL"}}
	for _, r := range some {
		rows = append(rows, []string{
			output.Age(r.Time), cell(r.Namespace + "/" + r.Pod), strconv.FormatBool(r.Captured), cell(r.Reason), cell(string(r.Source)),
			fmt.Sprintf("%.0f", 1000*r.Seconds[agentapi.PhaseTotal]), cell(cmp.Or(r.Error, r.Detail)),
		})
	}
	return output.Show(call, output.Columns(rows, call.Columns()))
}

// cell formats a text as one cell that cannot imitate another. It quotes the text unless it is a single plain word.
func cell(text string) string {
	special := func(r rune) bool { return r > 0x7e || r <= ' ' || r == '"' || r == '\\' }
	switch {
	case text == "":
		return "-"
	case strings.ContainsFunc(text, special):
		return printable.Quote(text, 2*len(text)+2)
	default:
		return text
	}
}
