package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// row is an object of an agent's answer: the fields of the table, and the text for JSON and YAML.
type row[T any] struct {
	node  string
	shown T
	text  json.RawMessage
}

// MarshalJSON returns all fields of the answer, including a newer agent's. A row about the cluster has no node.
func (r row[T]) MarshalJSON() ([]byte, error) {
	fields := map[string]json.RawMessage{}
	err := json.Unmarshal(r.text, &fields)
	if err == nil && r.node != "" {
		fields["node"], err = json.Marshal(r.node)
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(fields)
}

// answers are all agents' answers to a command that prints a list.
type answers[T any] struct {
	rows []row[T]
	// size is the total size of the answers in bytes.
	size int
	// asked is the number of agents that answered; nothing counts the agents without anything that the flags name.
	asked, nothing int
}

// add adds the rows of a node's answer, whose command ended with an exit code.
func (a *answers[T]) add(node string, text []byte, code int, fit func(*row[T]) bool) error {
	rows, err := decode(node, text, fit)
	size := a.size + len(text)
	switch {
	case err != nil:
		return err
	case size > maxAll || len(a.rows)+len(rows) > maxAllRows:
		return fmt.Errorf("no room: all nodes have more than %d MiB or %d rows; choose nodes by --node, or rows by the flags of the command",
			maxAll>>20, maxAllRows)
	}
	a.asked++
	if len(rows) == 0 && code == applet.ExitError {
		a.nothing++
	}
	a.size, a.rows = size, append(a.rows, rows...)
	return nil
}

// decode reads a node's array row by row. fit makes a row smaller than its text, and reports whether it has the table's fields: other
// rows are from another version.
func decode[T any](node string, text []byte, fit func(*row[T]) bool) (rows []row[T], err error) {
	if !json.Valid(text) {
		return nil, unreadable(json.Unmarshal(text, &json.RawMessage{}))
	}
	in := json.NewDecoder(bytes.NewReader(text))
	if begin, err := in.Token(); begin != json.Delim('[') {
		return nil, unreadable(cmp.Or(err, errors.New("it is no JSON array")))
	}
	for in.More() {
		r := row[T]{node: node}
		if err := in.Decode(&r.text); err != nil {
			return nil, unreadable(err)
		}
		if len(rows) == maxRows || len(r.text) > maxRow || levels(r.text) > maxLevels {
			return nil, fmt.Errorf("more than %d rows, or a row of more than %d KiB or %d levels", maxRows, maxRow>>10, maxLevels)
		}
		if err := json.Unmarshal(r.text, &r.shown); err != nil {
			return nil, unreadable(err)
		}
		if r.text[0] != '{' || !fit(&r) {
			return nil, unreadable(fmt.Errorf("fields are missing: %s", printable.Text(string(r.text), maxShown/4)))
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// unreadable is the error of an answer that this program does not understand.
func unreadable(err error) error { return otherVersion(fmt.Errorf("reading its answer: %w", err)) }

// levels returns the nesting depth of a JSON text.
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

// listing has the command-specific parts of a list.
type listing[T any] struct {
	// command is the agent's command with the flag for JSON.
	command []string
	// field is the name of the rows in JSON and YAML, beside the nodes; without it the document is the array of the rows.
	field string
	// fit is decode's parameter, compare orders rows.
	fit     func(*row[T]) bool
	compare func(a, b row[T]) int
	// bad reports whether a row changes the exit code of the agents and this program to badCode.
	bad     func(T) bool
	badCode int
	table   func(rows []row[T]) error
	// more, if set, adds rows about the cluster.
	more func(nodes []node, rows []row[T]) []row[T]
	// empty is the message without rows, nothing the message if no node has what the value of the flags names.
	empty, nothing string
	flags          [2]string
}

// list runs a command in all agents and prints their rows.
func list[T any](ctx context.Context, f *fleet, args []string, l listing[T]) (int, error) {
	form, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	var all answers[T]
	var mu sync.Mutex
	nodes, err := f.each(ctx, parallel, func(ctx context.Context, a agent) error {
		text, code, failure := f.one(ctx, a, maxList, []int{l.badCode}, slices.Concat(l.command, args)...)
		if failure != nil {
			return failure
		}
		mu.Lock()
		defer mu.Unlock()
		return all.add(a.node, text, code, l.fit)
	})
	if err != nil {
		return 0, err
	}
	if l.more != nil {
		all.rows = l.more(nodes, all.rows)
	}
	slices.SortStableFunc(all.rows, l.compare)
	none := all.asked > 0 && all.nothing == all.asked
	switch {
	case form != output.Table:
		head := struct {
			Nodes []node `json:"nodes"`
		}{nodes}
		err = output.List(f.Stdout, form, head, l.field, all.rows)
	case len(all.rows) > 0:
		err = l.table(all.rows)
	case all.asked > 0 && !none:
		_, err = fmt.Fprintln(f.Stderr, l.empty)
	}
	if err == nil && none && l.nothing != "" {
		value, _, _ := last(args, l.flags[0], l.flags[1], "")
		err = fmt.Errorf(l.nothing, value)
	}
	code := applet.ExitOK
	switch {
	case failed(nodes):
		code = applet.ExitError
	case slices.ContainsFunc(all.rows, func(r row[T]) bool { return l.bad(r.shown) }):
		code = l.badCode
	}
	return code, err
}

// takeOutput takes -o from the arguments.
func takeOutput(args []string) (form output.Form, rest []string, err error) {
	text, rest, err := last(args, "--output", "-o", string(output.Table))
	if err != nil {
		return "", nil, err
	}
	if i := slices.Index(rest, "--json"); i >= 0 {
		text, rest = string(output.JSON), slices.Delete(rest, i, i+1)
	}
	form = output.Form(text)
	if !slices.Contains([]output.Form{output.Table, output.JSON, output.YAML}, form) {
		return "", nil, &usageError{fmt.Errorf("flag -o: value %q: want table, json or yaml", text)}
	}
	return form, rest, nil
}

// pods lists the pods of all nodes.
func (f *fleet) pods(ctx context.Context, args []string) (int, error) {
	// Without -n the pods of all namespaces are listed anyway.
	args = slices.DeleteFunc(args, func(arg string) bool { return arg == "-A" || arg == "--all-namespaces" })
	empty := "no pod of the mesh on the nodes that answered"
	selected := slices.ContainsFunc(args, byState)
	if selected {
		empty = "no pod in such a state on the nodes that answered"
	}
	return list(ctx, f, args, listing[audit.Status]{
		command: []string{"pods", "-o", "json"}, field: "pods", fit: fitPod,
		compare: func(a, b row[audit.Status]) int { return audit.Compare(a.shown, b.shown) },
		bad:     audit.Status.Faulty, badCode: exitBypass,
		table: func(rows []row[audit.Status]) error {
			var all []audit.Status
			for _, r := range rows {
				all = append(all, r.shown)
			}
			return output.Pods(f.Call, all, selected)
		},
		empty: empty, nothing: "namespace %q has no pod with a network of its own on the nodes that answered",
		flags: [2]string{"--namespace", "-n"},
	})
}

// fitPod keeps only the table's fields.
func fitPod(r *row[audit.Status]) bool {
	s := r.shown
	r.shown = audit.Status{
		Node: r.node, Namespace: s.Namespace, Pod: s.Pod,
		State: s.State, Sentence: s.Why(), Since: s.Since, Checked: s.Checked, Backend: s.Backend,
	}
	return s.Pod != "" && s.State != ""
}

// byState reports whether an argument of "istio-cni pods" selects pods by their state.
func byState(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return name == "bypassing" || name == "state"
}

// decision has the table's fields of a plugin's report.
type decision struct {
	Time                                          time.Time
	Namespace, Pod, Reason, Source, Detail, Error string
	Captured                                      bool
}

// decisions lists the last calls of the plugin on all nodes, the latest first.
func (f *fleet) decisions(ctx context.Context, args []string) (int, error) {
	return list(ctx, f, args, listing[decision]{
		command: []string{"decisions", "--json"}, fit: func(r *row[decision]) bool { return r.shown.Reason != "" || r.shown.Error != "" },
		compare: func(a, b row[decision]) int {
			return cmp.Or(b.shown.Time.Compare(a.shown.Time), strings.Compare(a.node, b.node), strings.Compare(a.shown.Pod, b.shown.Pod))
		},
		bad: func(decision) bool { return false },
		table: func(rows []row[decision]) error {
			table := [][]string{{"NODE", "AGE", "POD", "CAPTURED", "REASON", "SOURCE", "DETAIL"}}
			for _, r := range rows {
				d := r.shown
				table = append(table, []string{
					output.Cell(r.node), output.Age(d.Time), output.Cell(d.Namespace + "/" + d.Pod), strconv.FormatBool(d.Captured),
					output.Cell(d.Reason), output.Cell(d.Source), output.Cell(cmp.Or(d.Error, d.Detail)),
				})
			}
			return output.Show(f.Call, output.Columns(table, f.Columns()))
		},
		empty:   "the agents that answered hold no such decision",
		nothing: "the agents that answered hold no such decision about a pod with %q in its NAMESPACE/NAME", flags: [2]string{"--pod"},
	})
}

// doctor lists the checks of all nodes; equal results of several nodes are one line.
func (f *fleet) doctor(ctx context.Context, args []string) (int, error) {
	return list(ctx, f, args, listing[output.Check]{
		command: []string{"doctor", "-o", "json"},
		fit:     func(r *row[output.Check]) bool { return r.shown.Name != "" && r.shown.Result != "" },
		compare: func(a, b row[output.Check]) int { return strings.Compare(a.node, b.node) },
		bad:     func(c output.Check) bool { return c.Result == output.Fail }, badCode: applet.ExitError,
		table: f.checks,
		more: func(nodes []node, rows []row[output.Check]) []row[output.Check] {
			if slices.ContainsFunc(rows, func(r row[output.Check]) bool { return r.shown.Name == "ambient" }) {
				rows = f.withCluster(ctx, nodes, rows)
			}
			return rows
		},
	})
}

// checks prints each result once, with its nodes. A line end in a text could imitate another node's line.
func (f *fleet) checks(rows []row[output.Check]) error {
	var all []output.Check
	nodes := map[output.Check][]string{}
	for _, r := range rows {
		if nodes[r.shown] == nil {
			all = append(all, r.shown)
		}
		nodes[r.shown] = append(nodes[r.shown], printable.Text(r.node, maxShown))
	}
	for i, c := range all {
		where := fmt.Sprintf("%d nodes", len(nodes[c]))
		const most = 3
		if len(nodes[c]) <= most {
			where = cmp.Or(strings.Join(nodes[c], ", "), "the cluster")
		}
		all[i] = output.Check{
			Name: printable.Text(c.Name, maxShown), Result: c.Result,
			Text: printable.Text(c.Text, 4*maxShown) + " [" + where + "]", Remedy: printable.Text(c.Remedy, 4*maxShown),
		}
	}
	return output.Checks(f.Call, all)
}
