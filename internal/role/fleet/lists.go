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
	"strings"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
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
	// asked is the number of agents that answered; nothing counts the agents without anything that the flags name; omitted counts the
	// rows that the flags have left out.
	asked, nothing, omitted int
}

// add adds the rows of a node's answer, whose command ended with an exit code.
func (a *answers[T]) add(node string, text []byte, code int, fit func(*row[T]) bool) error {
	rows, omitted, err := decode(node, text, fit)
	size := a.size + len(text)
	switch {
	case err != nil:
		return err
	case size > maxAll || len(a.rows)+len(rows) > maxAllRows:
		return fmt.Errorf("no room: all nodes have more than %d MiB or %d rows; choose nodes by --node, or rows by the flags of the command",
			maxAll>>20, maxAllRows)
	}
	a.asked, a.omitted = a.asked+1, a.omitted+omitted
	if len(rows) == 0 && code == applet.ExitError {
		a.nothing++
	}
	a.size, a.rows = size, append(a.rows, rows...)
	return nil
}

// decode reads the items of a node's list row by row. An agent before the documents prints the items alone. fit makes a row smaller
// than its text, and reports whether it has the table's fields: other rows are from another version.
func decode[T any](node string, text []byte, fit func(*row[T]) bool) (rows []row[T], omitted int, err error) {
	if !json.Valid(text) {
		return nil, 0, unreadable(json.Unmarshal(text, &json.RawMessage{}))
	}
	if bytes.TrimSpace(text)[0] == '[' {
		rows, err = decodeRows(node, text, fit)
		return rows, 0, err
	}
	var list struct {
		APIVersion string
		Omitted    int
		Items      json.RawMessage
	}
	if err = json.Unmarshal(text, &list); err != nil {
		return nil, 0, unreadable(err)
	}
	if list.APIVersion != document.APIVersion {
		return nil, 0, unreadable(fmt.Errorf("its apiVersion is %s", printable.Quote(list.APIVersion, maxShown/4)))
	}
	rows, err = decodeRows(node, list.Items, fit)
	return rows, max(0, list.Omitted), err
}

func decodeRows[T any](node string, items []byte, fit func(*row[T]) bool) (rows []row[T], err error) {
	in := json.NewDecoder(bytes.NewReader(items))
	if begin, _ := in.Token(); begin != json.Delim('[') {
		return nil, unreadable(errors.New("it has no array of items"))
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
	// list is a document of the kind.
	list any
	// fit is decode's parameter, compare orders rows.
	fit     func(*row[T]) bool
	compare func(a, b row[T]) int
	// bad reports whether a row changes the exit code of the agents and this program to badCode.
	bad     func(T) bool
	badCode int
	table   func(all []T) error
	// more, if set, adds rows about the cluster.
	more func(rows []row[T]) []row[T]
	// shows reports whether a row is listed, nil for all rows; most is the number of listed rows, 0 for all.
	shows func(T) bool
	most  int
	// empty is the message without rows. missing is the error about all rows before shows if something that the flags name is missing; none
	// reports whether that is what each node said.
	empty   string
	missing func(all []T, none bool) error
}

// gather runs a command in all agents and returns their sorted rows, with the error about what is missing.
func gather[T any](ctx context.Context, f *fleet, l listing[T]) (all answers[T], nodes []node, missing, err error) {
	ok := []int{l.badCode}
	if l.badCode == applet.ExitPast { // pods --check exits with 1 if it left out pods
		ok = append(ok, applet.ExitError)
	}
	var mu sync.Mutex
	nodes, err = f.each(ctx, parallel, func(ctx context.Context, a agent) error {
		text, code, failure := f.one(ctx, a, ok, l.command...)
		if failure != nil {
			return failure
		}
		mu.Lock()
		defer mu.Unlock()
		return all.add(a.node, text, code, l.fit)
	})
	if err != nil {
		return all, nil, nil, err
	}
	if l.more != nil {
		all.rows = l.more(all.rows)
	}
	slices.SortStableFunc(all.rows, l.compare)
	if l.missing != nil && all.asked > 0 {
		missing = l.missing(all.shown(), all.nothing == all.asked)
	}
	if l.shows != nil {
		all.omitted += len(all.rows)
		all.rows = slices.DeleteFunc(all.rows, func(r row[T]) bool { return !l.shows(r.shown) })
		all.omitted -= len(all.rows)
	}
	if more := len(all.rows) - l.most; l.most > 0 && more > 0 { // each node has sent as many
		all.rows, all.omitted = all.rows[:l.most], all.omitted+more
	}
	return all, nodes, missing, nil
}

// list runs a command in all agents and prints their rows.
func list[T any](ctx context.Context, f *fleet, form output.Form, l listing[T]) (int, error) {
	all, nodes, missing, err := gather(ctx, f, l)
	if err != nil {
		return 0, err
	}
	switch {
	case form != output.Table:
		head := output.NewHead(f.Getenv)
		head.Node, head.Nodes, head.Omitted = "", nodes, all.omitted
		err = output.List(f.Stdout, form, l.list, head, all.rows)
	case len(all.rows) > 0:
		err = l.table(all.shown())
	case all.asked > 0 && missing == nil:
		_, err = fmt.Fprintln(f.Stderr, l.empty)
	}
	code := applet.ExitOK
	switch {
	case failed(nodes):
		code = applet.ExitError
	case slices.ContainsFunc(all.rows, func(r row[T]) bool { return l.bad(r.shown) }):
		code = l.badCode
	}
	return code, cmp.Or(err, missing)
}

// shown are the fields of the table.
func (a answers[T]) shown() (all []T) {
	for _, r := range a.rows {
		all = append(all, r.shown)
	}
	return all
}

// pods lists the pods of all nodes.
func (f *fleet) pods(ctx context.Context, flags *command.Pods, c call) (int, error) {
	if err := f.workload(ctx, flags, &c); err != nil {
		return 0, err
	}
	if err := flags.Named(c.operands); err != nil {
		return 0, &usageError{err}
	}
	args := given(c.in, flags.Rows(), "output", "watch", "all-namespaces", "namespace", "selector")
	if len(c.operands) > 0 { // a pod that has a name is listed in any state, and missing only if it is in none
		args = append(given(c.in, flags.Rows(), "output", "watch", "all-namespaces", "namespace", "selector", "all", "state", "bypassing"), "--all")
	}
	for name, value := range map[string]string{"namespace": flags.Namespace, "selector": flags.Selector} {
		if value != "" {
			args = append(args, "--"+name+"="+value)
		}
	}
	slices.Sort(args)
	const on = "on the nodes that answered"
	l := listing[audit.Status]{
		command: slices.Concat([]string{"pods", "-o", "json"}, args), list: document.PodList{}, fit: fitPod,
		compare: func(a, b row[audit.Status]) int { return audit.Compare(a.shown, b.shown) },
		bad:     audit.Status.Faulty, badCode: applet.ExitPast, shows: flags.Selects,
		table: func(all []audit.Status) error { return output.Pods(f.Call, all, flags.ByState()) },
		empty: "no pod of the mesh " + on,
		missing: func(all []audit.Status, none bool) (err error) {
			if none || len(flags.Names) > 0 {
				err = flags.Missing(all, on)
			}
			return errors.Join(err, command.LeftOut(slices.DeleteFunc(all, func(s audit.Status) bool { return !flags.Selects(s) })))
		},
	}
	if flags.ByState() {
		l.empty = "no pod in such a state " + on
	}
	if flags.Watch {
		return watch(ctx, f, l, output.WatchPods(f.Call, 0, flags.ByState()), func(s audit.Status) string { return s.Node })
	}
	return list(ctx, f, flags.Output, l)
}

// workload replaces a workload among the operands by its namespace and selector.
func (f *fleet) workload(ctx context.Context, flags *command.Pods, c *call) error {
	for _, operand := range c.operands {
		t, err := command.ParseTarget(operand, flags.Namespace)
		switch {
		case err != nil:
			return &usageError{err}
		case t.Kind == command.Pod:
			continue
		case len(c.operands) > 1 || flags.Selector != "" || flags.Everywhere:
			return &usageError{fmt.Errorf("name %s alone, without other pods, -l and -A", operand)}
		}
		found, err := f.object(ctx, t)
		if err != nil {
			return err
		}
		flags.Namespace, c.operands = found.Namespace, nil
		if flags.Selector, err = found.selector(); err != nil {
			return fmt.Errorf("%s: %w", operand, err)
		}
	}
	return nil
}

// watch watches the rows of all nodes. It prints the problem of a node once, and does not report the rows of such a node as gone.
func watch[T any](ctx context.Context, f *fleet, l listing[T], w output.Watch[T], of func(T) string) (int, error) {
	f.progress, f.Stderr = nil, &once{w: f.Stderr, said: map[string]bool{}}
	w.Err, w.Every = f.Stderr, 5*time.Second
	w.Request = func(ctx context.Context) ([]T, func(T) bool, error) {
		all, nodes, _, err := gather(ctx, f, l)
		return all.shown(), func(row T) bool {
			return slices.ContainsFunc(nodes, func(n node) bool { return n.Error != "" && n.Name == of(row) })
		}, err
	}
	return applet.ExitOK, w.Run(ctx)
}

// once writes each text once, and forgets the texts when they are many.
type once struct {
	w    io.Writer
	said map[string]bool
}

func (o *once) Write(text []byte) (int, error) {
	const most = 1000
	if len(o.said) >= most {
		clear(o.said)
	}
	if o.said[string(text)] {
		return len(text), nil
	}
	o.said[string(text)] = true
	return o.w.Write(text)
}

// fitPod keeps only the table's fields.
func fitPod(r *row[audit.Status]) bool {
	s := r.shown
	r.shown = audit.Status{
		Node: r.node, Namespace: s.Namespace, Pod: s.Pod,
		State: s.State, Sentence: s.Why(), Since: s.Since, Checked: s.Checked, Backend: s.Backend, UID: s.UID, LeftOut: s.LeftOut,
	}
	return s.Pod != "" && s.State != ""
}

// decisions lists the last calls of the plugin on all nodes, the latest first.
func (f *fleet) decisions(ctx context.Context, flags *command.Decisions, c call) (int, error) {
	if err := flags.Check(); err != nil {
		return 0, &usageError{err}
	}
	l := listing[document.Decision]{
		command: slices.Concat([]string{"decisions", "--json"}, given(c.in, flags.Rows(), "output", "json", "watch", "all-namespaces")),
		list:    document.DecisionList{}, fit: func(r *row[document.Decision]) bool {
			r.shown.Node = r.node
			return r.shown.Reason != "" || r.shown.Error != ""
		},
		compare: func(a, b row[document.Decision]) int {
			return cmp.Or(b.shown.Time.Compare(a.shown.Time), strings.Compare(a.node, b.node), strings.Compare(a.shown.Pod, b.shown.Pod))
		},
		bad:   func(document.Decision) bool { return false },
		most:  flags.Limit,
		table: func(all []document.Decision) error { return output.Decisions(f.Call, all, true) },
		empty: "the agents that answered hold no such decision",
		missing: func(_ []document.Decision, none bool) error {
			if !none {
				return nil
			}
			return fmt.Errorf("the agents that answered hold no such decision about a pod with %q in its NAMESPACE/NAME", flags.Pod)
		},
	}
	if !flags.Watch {
		return list(ctx, f, flags.Output, l)
	}
	return watch(ctx, f, l, output.WatchDecisions(f.Call, 0), func(d document.Decision) string { return d.Node })
}

// doctor lists the checks of all nodes; equal results of several nodes are one line.
func (f *fleet) doctor(ctx context.Context, flags *command.Doctor, c call) (int, error) {
	return list(ctx, f, flags.Output, listing[document.Check]{
		command: slices.Concat([]string{"doctor", "-o", "json"}, given(c.in, flags.Rows(), "output")), list: document.DoctorReport{},
		fit: func(r *row[document.Check]) bool {
			r.shown.Node = r.node
			return r.shown.Name != "" && r.shown.Result != ""
		},
		compare: func(a, b row[document.Check]) int { return strings.Compare(a.node, b.node) },
		bad:     func(c document.Check) bool { return c.Result == document.Fail }, badCode: applet.ExitError,
		table: f.checks,
		more: func(rows []row[document.Check]) []row[document.Check] {
			if slices.ContainsFunc(rows, func(r row[document.Check]) bool { return r.shown.Name == "ambient" }) {
				rows = f.withCluster(ctx, rows)
			}
			return rows
		},
	})
}

// checks prints each result once, with its nodes. A line end in a text could imitate another node's line.
func (f *fleet) checks(rows []document.Check) error {
	var all []document.Check
	nodes := map[document.Check][]string{}
	for _, c := range rows {
		node := printable.Text(c.Node, maxShown)
		if c.Node = ""; nodes[c] == nil {
			all = append(all, c)
		}
		nodes[c] = append(nodes[c], node)
	}
	for i, c := range all {
		where := fmt.Sprintf("%d nodes", len(nodes[c]))
		const most = 3
		if len(nodes[c]) <= most {
			where = cmp.Or(strings.Join(nodes[c], ", "), "the cluster")
		}
		all[i] = document.Check{
			Name: printable.Text(c.Name, maxShown), Result: c.Result,
			Text: printable.Text(c.Text, 4*maxShown) + " [" + where + "]", Remedy: printable.Text(c.Remedy, 4*maxShown),
		}
	}
	return output.Checks(f.Call, all)
}
