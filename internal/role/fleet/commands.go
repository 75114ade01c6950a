package fleet

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// failures is the exit code for nodes that did not answer.
func failures(failed, otherwise int) int {
	if failed > 0 {
		return applet.ExitError
	}
	return otherwise
}

// takeOutput takes -o from the arguments.
func takeOutput(args []string) (format output.Form, rest []string, err error) {
	for len(args) > 0 {
		name, value, attached := strings.Cut(args[0], "=")
		args = args[1:]
		if name != "-o" && name != "--output" {
			rest = append(rest, strings.Join(slices.DeleteFunc([]string{name, value}, func(s string) bool { return !attached && s == "" }), "="))
			continue
		}
		if !attached {
			if len(args) == 0 {
				return "", nil, &usageError{errors.New("flag -o needs a value")}
			}
			value, args = args[0], args[1:]
		}
		format = output.Form(value)
	}
	if !slices.Contains([]output.Form{"", output.Wide, output.JSON, output.YAML}, format) {
		return "", nil, &usageError{fmt.Errorf("flag -o: value %q: want wide, json or yaml", format)}
	}
	return format, rest, nil
}

// pods lists the pods of all nodes.
func (f *fleet) pods(ctx context.Context, args []string) (int, error) {
	format, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	all := []audit.Status{}
	failed, err := f.each(ctx, slices.Concat([]string{"pods", "-o", "json"}, args), []int{exitBypass}, func(a agent, text []byte) error {
		var some []audit.Status
		if err := json.Unmarshal(text, &some); err != nil {
			return fmt.Errorf("reading its answer: %w", err)
		}
		for i := range some {
			some[i].Node = a.node
		}
		all = append(all, some...)
		return nil
	})
	if err != nil {
		return 0, err
	}
	audit.Sort(all)
	if err := output.Print(f.Stdout, all, format, func() error {
		style := audit.Style{}
		if format != output.Wide && f.Terminal != nil {
			style.Width = f.Terminal()
		}
		return audit.Table(f.Stdout, all, style, clock())
	}); err != nil {
		return 0, err
	}
	code := applet.ExitOK
	if slices.ContainsFunc(all, audit.Status.Faulty) {
		code = exitBypass
	}
	return failures(failed, code), nil
}

// clock is the time of day.
func clock() time.Time { return time.Now() } //nolint:forbidigo // the only clock of the plugin

// decision has the fields of a plugin's report that the table shows.
type decision struct {
	Node      string    `json:"node"`
	Time      time.Time `json:"time"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	Captured  bool      `json:"captured"`
	Reason    string    `json:"reason"`
	Source    string    `json:"source"`
	Detail    string    `json:"detail,omitempty"`
	Error     string    `json:"error,omitempty"`
}

// decisions lists the last calls of the plugin on all nodes, the latest first.
func (f *fleet) decisions(ctx context.Context, args []string) (int, error) {
	format, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	all := []decision{}
	failed, err := f.each(ctx, slices.Concat([]string{"decisions", "--json"}, args), nil, func(a agent, text []byte) error {
		var some []decision
		if err := json.Unmarshal(text, &some); err != nil {
			return fmt.Errorf("reading its answer: %w", err)
		}
		for i := range some {
			some[i].Node = a.node
		}
		all = append(all, some...)
		return nil
	})
	if err != nil {
		return 0, err
	}
	slices.SortFunc(all, func(a, b decision) int { return b.Time.Compare(a.Time) })
	return failures(failed, applet.ExitOK), output.Print(f.Stdout, all, format, func() error {
		table := tabwriter.NewWriter(f.Stdout, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintln(table, "NODE\tTIME\tPOD\tCAPTURED\tREASON\tSOURCE\tDETAIL")
		for _, d := range all {
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%v\t%s\t%s\t%s\n", audit.Cell(d.Node), d.Time.UTC().Format(time.RFC3339),
				audit.Cell(d.Namespace+"/"+d.Pod), d.Captured, audit.Cell(d.Reason), audit.Cell(d.Source), audit.Cell(cmp.Or(d.Error, d.Detail)))
		}
		return table.Flush()
	})
}

// check is a result of the command doctor on a node.
type check struct {
	Node   string `json:"node"`
	Name   string `json:"name"`
	Result string `json:"result"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// doctor lists the checks of all nodes; equal results of several nodes are one line.
func (f *fleet) doctor(ctx context.Context, args []string) (int, error) {
	format, args, err := takeOutput(args)
	if err != nil {
		return 0, err
	}
	var all []check
	failed, err := f.each(ctx, slices.Concat([]string{"doctor", "-o", "json"}, args), []int{applet.ExitError}, func(a agent, text []byte) error {
		var some []check
		if err := json.Unmarshal(text, &some); err != nil {
			return fmt.Errorf("reading its answer: %w", err)
		}
		for i := range some {
			some[i].Node = a.node
		}
		all = append(all, some...)
		return nil
	})
	if err != nil {
		return 0, err
	}
	code := applet.ExitOK
	if slices.ContainsFunc(all, func(c check) bool { return c.Result == "fail" }) {
		code = applet.ExitError
	}
	return failures(failed, code), output.Print(f.Stdout, all, format, func() error { return f.checks(all) })
}

func (f *fleet) checks(all []check) error {
	signs := map[string]string{"ok": "✓", "warn": "!", "fail": "✗"}
	var order []check
	nodes := map[check][]string{}
	for _, c := range all {
		node := c.Node
		c.Node = ""
		if nodes[c] == nil {
			order = append(order, c)
		}
		nodes[c] = append(nodes[c], node)
	}
	for _, c := range order {
		names := slices.Sorted(slices.Values(nodes[c]))
		where := fmt.Sprintf("%d nodes", len(names))
		if const3 := 3; len(names) <= const3 {
			where = strings.Join(names, ", ")
		}
		line := fmt.Sprintf("%s %s: %s [%s]", cmp.Or(signs[c.Result], "?"), c.Name, c.Text, where)
		if c.Remedy != "" && c.Result != "ok" {
			line += "\n  " + c.Remedy
		}
		if _, err := fmt.Fprintln(f.Stdout, string(printable.Lines([]byte(line)))); err != nil {
			return err
		}
	}
	return nil
}

// onePod runs a command of the agent on a pod's node, and passes its output on.
func (f *fleet) onePod(ctx context.Context, command string, args []string) (int, error) {
	namespace, pod, rest, err := target(args)
	if err != nil {
		return 0, err
	}
	a, key, err := f.agentOf(ctx, namespace, pod)
	if err != nil {
		return 0, err
	}
	code, err := f.start(ctx, f.Stdin, printable.NewWriter(f.Stdout), printable.NewWriter(f.Stderr), f.exec(a, slices.Concat([]string{command, key}, rest)...)...)
	if slices.Contains([]int{applet.ExitOK, exitBypass, exitUnknown, applet.ExitUsage}, code) {
		err = nil
	}
	if err != nil {
		return 0, fmt.Errorf("node %s, pod %s/%s: %w", a.node, a.namespace, a.pod, err)
	}
	return code, nil
}

// target finds the pod among the arguments: NAMESPACE/NAME, or NAME with -n NAMESPACE.
func target(args []string) (namespace, pod string, rest []string, err error) {
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, value, attached := strings.Cut(arg, "=")
		switch {
		case name == "-n" || name == "--namespace":
			if !attached && len(args) == 0 {
				return "", "", nil, &usageError{fmt.Errorf("flag %s needs a value", name)}
			}
			if !attached {
				value, args = args[0], args[1:]
			}
			namespace = value
		case pod == "" && !strings.HasPrefix(arg, "-") && (len(rest) == 0 || !strings.HasPrefix(rest[len(rest)-1], "--")):
			pod = arg
		default:
			rest = append(rest, arg)
		}
	}
	if before, after, both := strings.Cut(pod, "/"); both {
		namespace, pod = before, after
	}
	if pod == "" {
		return "", "", nil, &usageError{errors.New("name a pod: NAMESPACE/NAME, or -n NAMESPACE NAME")}
	}
	return namespace, pod, rest, nil
}

// agentOf finds the agent on a pod's node. key is the pod as the agent's commands take it.
func (f *fleet) agentOf(ctx context.Context, namespace, pod string) (a agent, key string, err error) {
	args := []string{"get", "pod", pod, "-o", "json"}
	if namespace != "" {
		args = append(args, "-n", namespace)
	}
	text, _, err := f.kubectl(ctx, args...)
	if err != nil {
		return a, "", err
	}
	var found struct {
		Metadata struct{ Namespace, Name string }
		Spec     struct{ NodeName string }
	}
	if err := json.Unmarshal(text, &found); err != nil {
		return a, "", fmt.Errorf("kubectl get pod: reading its output: %w", err)
	}
	key = found.Metadata.Namespace + "/" + found.Metadata.Name
	if found.Spec.NodeName == "" {
		return a, key, fmt.Errorf("pod %s is on no node yet", key)
	}
	agents, err := f.agents(ctx)
	if err != nil {
		return a, key, err
	}
	at := slices.IndexFunc(agents, func(a agent) bool { return a.node == found.Spec.NodeName })
	switch {
	case at < 0:
		return a, key, fmt.Errorf("node %s of pod %s has no node agent", found.Spec.NodeName, key)
	case agents[at].problem != "":
		return a, key, fmt.Errorf("node %s of pod %s: %s", found.Spec.NodeName, key, agents[at].problem)
	}
	return agents[at], key, nil
}

// bundle writes a tar file with the bundle of each node, or of a pod's node.
func (f *fleet) bundle(ctx context.Context, args []string) (int, error) {
	if f.Terminal != nil && f.Terminal() > 0 {
		return 0, &usageError{errors.New("the bundle is a tar file: redirect the standard output to a file")}
	}
	out := tar.NewWriter(f.Stdout)
	add := func(a agent, text []byte) error {
		header := &tar.Header{Name: a.node + ".tar.gz", Mode: 0o600, Size: int64(len(text)), ModTime: clock()}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		_, err := out.Write(text)
		return err
	}
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") || slices.Contains(args, "-n") {
		namespace, pod, rest, err := target(args)
		if err != nil {
			return 0, err
		}
		a, key, err := f.agentOf(ctx, namespace, pod)
		if err != nil {
			return 0, err
		}
		text, err := f.one(ctx, a, slices.Concat([]string{"bundle", key}, rest), nil)
		if err == nil {
			err = add(a, text)
		}
		return applet.ExitOK, errors.Join(err, out.Close())
	}
	failed, err := f.each(ctx, append([]string{"bundle"}, args...), nil, add)
	return failures(failed, applet.ExitOK), errors.Join(err, out.Close())
}

// pagePort is the port of an agent's page.
const pagePort = "9876"

// dashboard forwards the page of an agent, of a pod's node if one is named, and opens it.
func (f *fleet) dashboard(ctx context.Context, args []string) (int, error) {
	var a agent
	page := ""
	if len(args) > 0 {
		namespace, pod, _, err := target(args)
		if err != nil {
			return 0, err
		}
		var key string
		if a, key, err = f.agentOf(ctx, namespace, pod); err != nil {
			return 0, err
		}
		page = "#" + key
	} else {
		agents, err := f.agents(ctx)
		if err != nil {
			return 0, err
		}
		at := slices.IndexFunc(agents, func(a agent) bool { return a.problem == "" })
		if at < 0 {
			return 0, errors.New("no node agent is running")
		}
		a = agents[at]
	}
	address := "http://localhost:" + f.port + "/" + page
	_, _ = fmt.Fprintf(f.Stdout, "node %s: %s (Ctrl-C ends it)\n", a.node, address)
	if f.Terminal != nil && f.Terminal() > 0 {
		browse(ctx, address)
	}
	_, err := f.start(ctx, nil, io.Discard, printable.NewWriter(f.Stderr), "port-forward", "-n", a.namespace, "pod/"+a.pod, f.port+":"+pagePort)
	if ctx.Err() != nil {
		err = nil
	}
	return applet.ExitOK, err
}

// browse opens an address in the user's browser, if there is one.
func browse(ctx context.Context, address string) {
	command := map[string][]string{
		"darwin": {"open"}, "windows": {"rundll32", "url.dll,FileProtocolHandler"},
	}[runtime.GOOS]
	if command == nil {
		command = []string{"xdg-open"}
	}
	opener := exec.CommandContext(context.WithoutCancel(ctx), command[0], append(command[1:], address)...) //nolint:gosec // constants
	if opener.Start() == nil {
		go func() { _ = opener.Wait() }()
	}
}
