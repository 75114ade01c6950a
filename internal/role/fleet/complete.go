package fleet

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/completion"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

const program = "kubectl-istio_cni"

// completionHelp is the help of the command completion.
//
//nolint:gochecknoglobals // a constant
var completionHelp = completion.Help("kubectl istio-cni", `
Load it behind kubectl's own completion, which it calls for other commands. Alternatively kubectl's completion calls
the program kubectl_complete-istio_cni: make it a link to this one.
   ln -s kubectl-istio_cni "$(dirname "$(command -v kubectl-istio_cni)")/kubectl_complete-istio_cni"
`)

// completion prints the completion for a shell, or its help.
func (f *fleet) completion(args ...string) (int, error) {
	text, err := completion.Run(args, program, true, completionHelp)
	if err != nil {
		return 0, &usageError{err}
	}
	_, err = io.WriteString(f.Stdout, text)
	return applet.ExitOK, err
}

// candidates returns what can complete the last argument.
func (f *fleet) candidates(ctx context.Context, args []string) (found []settings.Candidate) {
	const patience = 3 * time.Second
	if len(args) == 0 {
		return nil
	}
	last := len(args) - 1
	operands, _ := settings.Operands(f.every(), args[:last])
	rows, name := slices.Concat(f.rows(), passed()), "help" // a command comes next
	if len(operands) > 0 {
		name = operands[0]
	}
	var commands []settings.Candidate
	for _, c := range f.commands() {
		commands = append(commands, settings.Candidate{Text: c.name, Use: c.summary})
		if c.name == name {
			rows = slices.DeleteFunc(f.all(c), func(s settings.Setting) bool { return s.Local })
		}
	}
	c := settings.Complete(rows, args)
	switch {
	case c.Found != nil || !c.Open:
		return c.Found
	case c.Flag == "" && name == "help":
		return completion.Matching(c.Word, commands...)
	case name == "completion":
		return completion.Words(c.Word, completion.Shells()...)
	}
	_, given := settings.Operands(rows, args[:last])
	in, _ := f.read(rows, given) // as far as it is right
	namespace := ""
	for _, s := range rows {
		if texts := in.Texts(s); s.Name == "namespace" && texts != nil {
			namespace = texts[len(texts)-1]
		}
	}
	f.timeout = patience
	for _, text := range f.existing(ctx, c.Flag, name, namespace, c.Word) {
		if strings.HasPrefix(text, c.Word) {
			found = append(found, settings.Candidate{Text: c.Lead + text})
		}
	}
	return found
}

// existing returns names of the cluster that a flag or, without a flag, an operand of a command can have. Without an answer there are none.
func (f *fleet) existing(ctx context.Context, flag, name, namespace, word string) (names []string) {
	lead, list := "", []string{"get", "pods"}
	before, _, isPath := strings.Cut(word, "/")
	t, err := command.ParseTarget(before+"/x", namespace)
	switch {
	case flag == "namespace" || flag == "agent-namespace":
		list, namespace = []string{"get", "namespaces"}, ""
	case flag == "node":
		list, namespace = []string{"get", "nodes"}, ""
	case flag == "context":
		list, namespace = []string{"config", "get-contexts"}, ""
	case flag != "" || !slices.Contains([]string{"pods", "why", "trace", "bundle", "dashboard"}, name):
		return nil
	case isPath && err == nil && t.Kind == command.Pod && t.Namespace != namespace:
		lead, namespace = before+"/", before
	case isPath && err == nil:
		lead, list = before+"/", []string{"get", t.Kind}
	}
	if namespace != "" {
		list = append(list, "-n", namespace)
	}
	found, _ := f.namesOf(ctx, list...)
	for _, one := range found {
		names = append(names, lead+one)
	}
	return names
}

// namesOf returns the names in kubectl's output: of objects behind their kind, of contexts alone, which can have a "/".
func (f *fleet) namesOf(ctx context.Context, args ...string) (names []string, err error) {
	text, err := f.kubectl(ctx, maxObjects, append(args, "-o", "name")...)
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); args[0] == "get" {
			_, line, _ = strings.Cut(line, "/")
		}
		if line != "" {
			names = append(names, line)
		}
	}
	return names, err
}
