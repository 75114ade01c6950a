package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// row is an object of an agent's answer: the fields that a table shows, and all fields, which JSON and YAML have.
type row[T any] struct {
	node  string
	shown T
	all   map[string]json.RawMessage
}

// gather runs a command, whose answer is a JSON array, in all agents, and returns the rows in no order. Rows without what a table
// needs, by valid, are those of another version.
func gather[T any](ctx context.Context, f *fleet, command []string, ok []int, valid func(T) bool) (rows []row[T], failed int, err error) {
	failed, err = f.each(ctx, command, ok, func(a agent, text []byte) error {
		some, unreadable := decode(text, valid)
		if unreadable != nil {
			version, _ := f.one(ctx, a, nil, "version")
			return otherVersion(strings.TrimSpace(string(version)), fmt.Errorf("reading its answer: %w", unreadable))
		}
		name, unreadable := json.Marshal(a.node)
		for _, r := range some {
			r.node, r.all["node"] = a.node, name
			rows = append(rows, r)
		}
		return unreadable
	})
	return rows, failed, err
}

func decode[T any](text []byte, valid func(T) bool) ([]row[T], error) {
	var objects []json.RawMessage
	if err := json.Unmarshal(text, &objects); err != nil {
		return nil, err
	}
	rows := make([]row[T], len(objects))
	for i, object := range objects {
		r := &rows[i]
		if err := json.Unmarshal(object, &r.shown); err != nil {
			return nil, err
		}
		if err := json.Unmarshal(object, &r.all); err != nil {
			return nil, err
		}
		if r.all == nil || !valid(r.shown) {
			return nil, fmt.Errorf("fields are missing: %s", printable.Text(string(object), maxShown/4))
		}
	}
	return rows, nil
}

// list prints the rows in one of the forms, and is the end of a command.
func list[T any](f *fleet, rows []row[T], form output.Form, failed, otherwise int, table func() error) (int, error) {
	objects := make([]map[string]json.RawMessage, len(rows))
	for i, r := range rows {
		objects[i] = r.all
	}
	if failed > 0 {
		otherwise = applet.ExitError
	}
	return otherwise, output.Print(f.Stdout, objects, form, table)
}

// takeOutput takes -o from the arguments.
func takeOutput(args []string) (form output.Form, rest []string, err error) {
	text, rest, err := take(args, "-o", "--output")
	if err != nil {
		return "", nil, err
	}
	if i := slices.Index(rest, "--json"); i >= 0 {
		text, rest = string(output.JSON), slices.Delete(rest, i, i+1)
	}
	form = cmp.Or(output.Form(text), output.Table)
	if !slices.Contains([]output.Form{output.Table, output.Wide, output.JSON, output.YAML}, form) {
		return "", nil, &usageError{fmt.Errorf("flag -o: value %q: want table, wide, json or yaml", text)}
	}
	return form, rest, nil
}

// clock is the time of day.
func clock() time.Time { return time.Now() } //nolint:forbidigo // the only clock of the plugin

// The colours of ANSI terminals (ECMA-48, SGR).
const (
	red    = "31"
	green  = "32"
	yellow = "33"
)

// paint colours a text that is printable.
func (f *fleet) paint(colour, text string) string {
	if !f.screen.Colours {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// pods lists the pods of all nodes.
func (f *fleet) pods(ctx context.Context, args []string) (int, error) {
	form, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	// Without -n the pods of all namespaces are listed anyway.
	args = slices.DeleteFunc(args, func(arg string) bool { return arg == "-A" || arg == "--all-namespaces" })
	rows, failed, err := gather(ctx, f, slices.Concat([]string{"pods", "-o", "json"}, args), []int{exitBypass}, func(s audit.Status) bool {
		return s.Pod != "" && s.State != ""
	})
	if err != nil {
		return 0, err
	}
	all := make([]audit.Status, len(rows))
	for i := range rows {
		rows[i].shown.Node = rows[i].node
	}
	slices.SortFunc(rows, func(a, b row[audit.Status]) int { return audit.Compare(a.shown, b.shown) })
	for i, r := range rows {
		all[i] = r.shown
	}
	code := applet.ExitOK
	if slices.ContainsFunc(all, audit.Status.Faulty) {
		code = exitBypass
	}
	return list(f, rows, form, failed, code, func() error {
		style := audit.Style{Paint: func(s audit.State, cell string) string { return f.paint(colourOf(s), cell) }}
		if form == output.Table && f.Terminal != nil {
			style.Width = f.Terminal()
		}
		return audit.Table(f.Stdout, all, style, clock())
	})
}

func colourOf(s audit.State) string {
	if colour, known := map[audit.State]string{audit.Captured: green, audit.Outside: green, audit.NotInspected: yellow}[s]; known {
		return colour
	}
	return red
}

// decision has the fields of a plugin's report that the table shows.
type decision struct {
	Time                                          time.Time
	Namespace, Pod, Reason, Source, Detail, Error string
	Captured                                      bool
}

// decisions lists the last calls of the plugin on all nodes, the latest first.
func (f *fleet) decisions(ctx context.Context, args []string) (int, error) {
	form, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	rows, failed, err := gather(ctx, f, slices.Concat([]string{"decisions", "--json"}, args), nil, func(d decision) bool { return d.Reason != "" || d.Error != "" })
	if err != nil {
		return 0, err
	}
	slices.SortFunc(rows, func(a, b row[decision]) int {
		return cmp.Or(b.shown.Time.Compare(a.shown.Time), strings.Compare(a.node, b.node), strings.Compare(a.shown.Pod, b.shown.Pod))
	})
	return list(f, rows, form, failed, applet.ExitOK, func() error {
		table := tabwriter.NewWriter(f.Stdout, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintln(table, "NODE\tTIME\tPOD\tCAPTURED\tREASON\tSOURCE\tDETAIL")
		for _, r := range rows {
			d := r.shown
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%v\t%s\t%s\t%s\n", audit.Cell(r.node), d.Time.UTC().Format(time.RFC3339),
				audit.Cell(d.Namespace+"/"+d.Pod), d.Captured, audit.Cell(d.Reason), audit.Cell(d.Source), audit.Cell(cmp.Or(d.Error, d.Detail)))
		}
		return table.Flush()
	})
}

// check is a result of the command doctor on a node.
type check struct{ Name, Result, Text, Remedy string }

// doctor lists the checks of all nodes; equal results of several nodes are one line.
func (f *fleet) doctor(ctx context.Context, args []string) (int, error) {
	form, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	rows, failed, err := gather(ctx, f, slices.Concat([]string{"doctor", "-o", "json"}, args), []int{applet.ExitError}, func(c check) bool {
		return c.Name != "" && c.Result != ""
	})
	if err != nil {
		return 0, err
	}
	slices.SortStableFunc(rows, func(a, b row[check]) int { return strings.Compare(a.node, b.node) })
	code := applet.ExitOK
	if slices.ContainsFunc(rows, func(r row[check]) bool { return r.shown.Result == "fail" }) {
		code = applet.ExitError
	}
	return list(f, rows, form, failed, code, func() error { return f.checks(rows) })
}

func (f *fleet) checks(rows []row[check]) error {
	signs := map[string]string{"ok": f.paint(green, "✓"), "warn": f.paint(yellow, "!"), "fail": f.paint(red, "✗")}
	var order []check
	nodes := map[check][]string{}
	for _, r := range rows {
		if nodes[r.shown] == nil {
			order = append(order, r.shown)
		}
		nodes[r.shown] = append(nodes[r.shown], r.node)
	}
	for _, c := range order {
		where := fmt.Sprintf("%d nodes", len(nodes[c]))
		const most = 3
		if len(nodes[c]) <= most {
			where = strings.Join(nodes[c], ", ")
		}
		line := fmt.Sprintf("%s: %s [%s]\n", c.Name, c.Text, where)
		if c.Remedy != "" && c.Result != "ok" {
			line += "  " + c.Remedy + "\n"
		}
		if _, err := fmt.Fprintf(f.Stdout, "%s %s", cmp.Or(signs[c.Result], "?"), printable.Lines([]byte(line))); err != nil {
			return err
		}
	}
	return nil
}
