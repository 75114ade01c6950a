package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/role/fleet"
	"github.com/meshcni/istio-cni/internal/role/installer"
	"github.com/meshcni/istio-cni/internal/role/plugin"
	"github.com/meshcni/istio-cni/internal/role/redirector"
	"github.com/meshcni/istio-cni/internal/role/tainter"
)

// codes are the tables of docs/errors.md.
func codes() []part {
	return []part{
		errorsPage("the EXIT CODES of --help", "command | code | means", exitCodes),
		errorsPage("istio-cni plugin --help", "code | means", cniCodes),
		errorsPage("internal/core/audit", "state | the pod … | remedy", auditStates),
		errorsPage("internal/core/sidecar", "reason | because … | to have the pod captured", podReasons),
		errorsPage("internal/core/readiness", "reason | means", nodeReasons),
		errorsPage("the events of a pod", "reason | means", constants("EventReason", "podwork")),
		errorsPage("the events of a node", "reason | means", constants("EventReason", "nodeagent", "installation")),
		errorsPage("the events of the taint controller", "reason | means", constants("EventReason", "taint")),
		errorsPage("the parts of the node agent", "part | means", constants("PartName", "installation", "nodeagent")),
		errorsPage("the parts of race repair", "part | means", constants("PartName", "nodepods")),
		errorsPage("the parts of the taint controller", "part | means", constants("PartName", "taint")),
	}
}

// errorsPage is the table of docs/errors.md that follows from a source.
func errorsPage(source, head string, rows func() ([][]string, error)) part {
	return written("docs/errors.md", source, func() (string, error) {
		all, err := rows()
		lines := []string{"| " + head + " |", strings.Repeat("|---", strings.Count(head, "|")+1) + "|"}
		for _, cells := range all {
			lines = append(lines, "| "+strings.Join(cells, " | ")+" |")
		}
		return strings.Join(lines, "\n"), err
	})
}

// numbered is a number with its meaning in a help, which may go on in the next lines.
var numbered = regexp.MustCompile(`(?m)^ {3}(\d+) +(.*(?:\n {6,}\D.*)*)`)

// section are the numbers with their meanings in a section of a command's help.
func section(r role, title string) ([][]string, error) {
	text, err := r.help()
	_, text, _ = strings.Cut(text, "\n"+title+":\n")
	text, _, _ = strings.Cut(text, "\n\n")
	found := numbered.FindAllStringSubmatch(text, -1)
	if err == nil && found == nil {
		err = fmt.Errorf("no %s in a help", title)
	}
	return found, err
}

func runPlugin(c applet.Call) int { return plugin.Run(c, nil) }

func exitCodes() (rows [][]string, err error) {
	all := append([]command{
		{"plugin", runPlugin}, {"iptables", redirector.Run}, {"install", installer.Run}, {"taint", tainter.Run},
	}, commands...)
	all = append(all, command{"kubectl istio-cni", func(c applet.Call) int { return fleet.Run(c, nil) }})
	for _, c := range all {
		found, err := section(c.run, "EXIT CODES")
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		for _, m := range found {
			rows = append(rows, []string{code(c.name), m[1], plain(strings.Join(strings.Fields(m[2]), " "))})
		}
	}
	return rows, nil
}

func cniCodes() (rows [][]string, err error) {
	found, err := section(runPlugin, "CODES OF THE CNI ERROR OBJECT")
	for _, m := range found {
		rows = append(rows, []string{m[1], plain(m[2])})
	}
	return rows, err
}

func auditStates() (rows [][]string, err error) {
	for _, s := range audit.States() {
		rows = append(rows, []string{code(string(s)), plain(s.Sentence()), cmp.Or(plain(s.Remedy(false)), "none")})
	}
	return append(rows, []string{code(string(audit.Outside)), "is left alone by the plugin, for a reason of a decision", "the reason's"}), nil
}

func podReasons() (rows [][]string, err error) {
	for _, r := range sidecar.Reasons() {
		rows = append(rows, []string{code(string(r)), plain(r.Sentence()), plain(r.Remedy())})
	}
	return rows, nil
}

func nodeReasons() (rows [][]string, err error) {
	for _, r := range readiness.Reasons() {
		rows = append(rows, []string{code(string(r)), plain(r.Sentence())})
	}
	return rows, nil
}

// constants returns a type's constants in the agents' packages, with their comments.
func constants(kind string, packages ...string) func() ([][]string, error) {
	return func() (rows [][]string, err error) {
		for _, name := range packages {
			files, err := fs.Glob(os.DirFS("."), path.Join("internal/agent", name, "*.go"))
			if err != nil {
				return nil, err
			}
			for _, file := range files {
				found, err := ofFile(file, kind)
				if err != nil {
					return nil, err
				}
				rows = append(rows, found...)
			}
		}
		return rows, nil
	}
}

func ofFile(name, kind string) (rows [][]string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 {
			return true
		}
		of, typed := spec.Type.(*ast.SelectorExpr)
		value, literal := spec.Values[0].(*ast.BasicLit)
		if !typed || !literal || of.Sel.Name != kind {
			return true
		}
		means := strings.Join(strings.Fields(spec.Doc.Text()), " ")
		if means == "" {
			err = fmt.Errorf("%s: %s has no comment", name, spec.Names[0])
		}
		rows = append(rows, []string{code(strings.Trim(value.Value, `"`)), plain(means)})
		return true
	})
	return rows, err
}
