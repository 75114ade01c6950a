package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// row is an object of an agent's answer: the fields that a table shows, and the text, which JSON and YAML have.
type row[T any] struct {
	node  string
	shown T
	// text is nil for a table.
	text json.RawMessage
}

// MarshalJSON has all fields of the answer, those of a newer agent, too.
func (r row[T]) MarshalJSON() ([]byte, error) {
	all := map[string]any{}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(r.text, &fields); err != nil {
		return nil, err
	}
	for name, value := range fields {
		all[name] = value
	}
	all["node"] = r.node
	return json.Marshal(all)
}

// answers are the answers of all agents to a command that prints a list.
type answers[T any] struct {
	form  output.Form
	nodes []node
	rows  []row[T]
	// size is that of the rows' texts in bytes.
	size int
	// asked is the number of agents that answered, and nothing that of those which have nothing that the flags name.
	asked, nothing int
}

// none reports whether no agent has what the flags name.
func (a *answers[T]) none() bool { return a.asked > 0 && a.nothing == a.asked }

// add has the rows of a node's answer, whose command ended with an exit code.
func (a *answers[T]) add(node string, text []byte, code int, fit func(*T) bool) error {
	rows, size, err := decode(text, a.form == output.JSON || a.form == output.YAML, fit)
	switch {
	case err != nil:
		return err
	case a.size+size > maxAll || len(a.rows)+len(rows) > maxAllRows:
		return fmt.Errorf("no room: all nodes have more than %d MiB or %d rows; choose nodes by --node, or rows by the flags of the command",
			maxAll>>20, maxAllRows)
	}
	a.asked++
	if len(rows) == 0 && code == applet.ExitError {
		a.nothing++
	}
	for i := range rows {
		rows[i].node = node
	}
	a.size, a.rows = a.size+size, append(a.rows, rows...)
	return nil
}

// gather runs a command, whose answer is a JSON array, in all agents, and has the rows in no order. fit makes a row smaller than its
// text, and reports whether it has what a table needs: others are of another version.
func gather[T any](ctx context.Context, f *fleet, form output.Form, command []string, ok []int, fit func(*T) bool) (*answers[T], error) {
	all := &answers[T]{form: form}
	nodes, err := f.each(ctx, question{command, ok, maxList, parallel}, func(a agent, text []byte, code int) error {
		return all.add(a.node, text, code, fit)
	})
	all.nodes = nodes
	return all, err
}

// decode reads an array row by row. size is that of their texts, which the rows have if keep is set.
func decode[T any](text []byte, keep bool, fit func(*T) bool) (rows []row[T], size int, err error) {
	in := json.NewDecoder(bytes.NewReader(text))
	if begin, err := in.Token(); err != nil {
		return nil, 0, &unreadable{err}
	} else if begin != json.Delim('[') {
		return nil, 0, &unreadable{errors.New("it is no JSON array")}
	}
	for in.More() {
		r, err := decodeRow(in, len(rows), fit)
		if err != nil {
			return nil, 0, err
		}
		if size += len(r.text); !keep {
			r.text = nil
		}
		rows = append(rows, r)
	}
	if err := decodeEnd(in); err != nil {
		return nil, 0, err
	}
	return rows, size, nil
}

// decodeRow reads the next row of an array and checks it. before is the number of the rows ahead of it.
func decodeRow[T any](in *json.Decoder, before int, fit func(*T) bool) (r row[T], err error) {
	if err = in.Decode(&r.text); err != nil {
		return r, &unreadable{err}
	}
	if before == maxRows || len(r.text) > maxRow || levels(r.text) > maxLevels {
		return r, fmt.Errorf("more than %d rows, or a row of more than %d KiB or %d levels", maxRows, maxRow>>10, maxLevels)
	}
	if err = json.Unmarshal(r.text, &r.shown); err != nil {
		return r, &unreadable{err}
	}
	if r.text[0] != '{' || !fit(&r.shown) {
		return r, &unreadable{fmt.Errorf("fields are missing: %s", printable.Text(string(r.text), maxShown/4))}
	}
	return r, nil
}

// decodeEnd reads the end of an array, after which nothing may follow.
func decodeEnd(in *json.Decoder) error {
	if _, err := in.Token(); err != nil {
		return &unreadable{err}
	}
	if _, err := in.Token(); err != io.EOF {
		return &unreadable{errors.New("there is more than a JSON array")}
	}
	return nil
}

// levels is how deep a JSON text is nested.
func levels(text []byte) (deepest int) {
	level, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{', c == '[':
			level++
			deepest = max(deepest, level)
		case c == '}', c == ']':
			level--
		}
	}
	return deepest
}

// print prints the rows in one of the forms, JSON and YAML as an object with the nodes if the list has a name, and is the end of a
// command.
func (a *answers[T]) print(f *fleet, name string, otherwise int, table func() error) (int, error) {
	if failed(a.nodes) {
		otherwise = applet.ExitError
	}
	if a.form == output.JSON || a.form == output.YAML {
		head := struct {
			Nodes []node `json:"nodes"`
		}{a.nodes}
		return otherwise, output.List(f.Stdout, a.form, head, name, a.rows)
	}
	return otherwise, table()
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
	if !slices.Contains([]output.Form{output.Table, output.JSON, output.YAML}, form) {
		return "", nil, &usageError{fmt.Errorf("flag -o: value %q: want table, json or yaml", text)}
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
	all, err := gather(ctx, f, form, slices.Concat([]string{"pods", "-o", "json"}, args), []int{exitBypass}, fitPod)
	if err != nil {
		return 0, err
	}
	shown := make([]audit.Status, len(all.rows))
	for i := range all.rows {
		all.rows[i].shown.Node = all.rows[i].node
	}
	slices.SortFunc(all.rows, func(a, b row[audit.Status]) int { return audit.Compare(a.shown, b.shown) })
	for i, r := range all.rows {
		shown[i] = r.shown
	}
	code := applet.ExitOK
	if slices.ContainsFunc(shown, audit.Status.Faulty) {
		code = exitBypass
	}
	selected := slices.ContainsFunc(args, byState)
	code, err = all.print(f, "pods", code, func() error {
		switch {
		case all.none(), len(shown) == 0 && all.asked == 0:
			return nil
		case len(shown) == 0:
			return f.noPod(selected)
		}
		return output.Pods(f.Stdout, shown, selected)
	})
	if err == nil && all.none() {
		namespace, _, _ := take(args, "-n", "--namespace")
		err = fmt.Errorf("namespace %q has no pod with a network of its own on the nodes that answered", namespace)
	}
	return code, err
}

// fitPod leaves what the table shows.
func fitPod(s *audit.Status) bool {
	*s = audit.Status{
		Namespace: s.Namespace, Pod: s.Pod, State: s.State, Sentence: s.Why(), Since: s.Since, Checked: s.Checked, Backend: s.Backend,
	}
	return s.Pod != "" && s.State != ""
}

// byState reports whether an argument of "istio-cni pods" selects pods by their state.
func byState(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return name == "bypassing" || name == "state"
}

// noPod means that no pod is listed.
func (f *fleet) noPod(selected bool) error {
	text := "no pod of the mesh"
	if selected {
		text = "no pod in such a state"
	}
	_, err := fmt.Fprintln(f.Stderr, text+" on the nodes that answered")
	return err
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
	all, err := gather(ctx, f, form, slices.Concat([]string{"decisions", "--json"}, args), nil, func(d *decision) bool { return d.Reason != "" || d.Error != "" })
	if err != nil {
		return 0, err
	}
	slices.SortFunc(all.rows, func(a, b row[decision]) int {
		return cmp.Or(b.shown.Time.Compare(a.shown.Time), strings.Compare(a.node, b.node), strings.Compare(a.shown.Pod, b.shown.Pod))
	})
	code, err := all.print(f, "", applet.ExitOK, func() error {
		switch {
		case all.none(), len(all.rows) == 0 && all.asked == 0:
			return nil
		case len(all.rows) == 0:
			_, failed := fmt.Fprintln(f.Stderr, "the agents that answered hold no such decision")
			return failed
		}
		return f.decided(all.rows)
	})
	if err == nil && all.none() {
		pod, _, _ := take(args, "", "--pod")
		err = fmt.Errorf("the agents that answered hold no such decision about a pod with %q in its NAMESPACE/NAME", pod)
	}
	return code, err
}

// decided prints the table of decisions.
func (f *fleet) decided(rows []row[decision]) error {
	table := [][]string{{"NODE", "TIME", "POD", "CAPTURED", "REASON", "SOURCE", "DETAIL"}}
	for _, r := range rows {
		d := r.shown
		table = append(table, []string{
			output.Cell(r.node), d.Time.UTC().Format(time.RFC3339), output.Cell(d.Namespace + "/" + d.Pod), strconv.FormatBool(d.Captured),
			output.Cell(d.Reason), output.Cell(d.Source), output.Cell(cmp.Or(d.Error, d.Detail)),
		})
	}
	return output.Columns(f.Stdout, table)
}

// check is a result of the command doctor on a node.
type check struct{ Name, Result, Text, Remedy string }

// doctor lists the checks of all nodes; equal results of several nodes are one line.
func (f *fleet) doctor(ctx context.Context, args []string) (int, error) {
	form, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	all, err := gather(ctx, f, form, slices.Concat([]string{"doctor", "-o", "json"}, args), []int{applet.ExitError}, func(c *check) bool {
		return c.Name != "" && c.Result != ""
	})
	if err != nil {
		return 0, err
	}
	slices.SortStableFunc(all.rows, func(a, b row[check]) int { return strings.Compare(a.node, b.node) })
	code := applet.ExitOK
	if slices.ContainsFunc(all.rows, func(r row[check]) bool { return r.shown.Result == "fail" }) {
		code = applet.ExitError
	}
	return all.print(f, "", code, func() error { return f.checks(all.rows) })
}

func (f *fleet) checks(rows []row[check]) error {
	signs := map[string]string{"ok": f.paint(green, "✓"), "warn": f.paint(yellow, "!"), "fail": f.paint(red, "✗")}
	var order []check
	nodes := map[check][]string{}
	for _, r := range rows {
		if nodes[r.shown] == nil {
			order = append(order, r.shown)
		}
		nodes[r.shown] = append(nodes[r.shown], printable.Text(r.node, maxShown))
	}
	for _, c := range order {
		where := fmt.Sprintf("%d nodes", len(nodes[c]))
		const most = 3
		if len(nodes[c]) <= most {
			where = strings.Join(nodes[c], ", ")
		}
		// A line end in a text would begin a line of another node.
		line := fmt.Sprintf("%s %s: %s [%s]\n", cmp.Or(signs[c.Result], "?"), printable.Text(c.Name, maxShown), printable.Text(c.Text, 4*maxShown), where)
		if c.Remedy != "" && c.Result != "ok" {
			line += "  " + printable.Text(c.Remedy, 4*maxShown) + "\n"
		}
		if _, err := io.WriteString(f.Stdout, line); err != nil {
			return err
		}
	}
	return nil
}
