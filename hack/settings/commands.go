package main

import (
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/role/bundle"
	"github.com/meshcni/istio-cni/internal/role/decisions"
	"github.com/meshcni/istio-cni/internal/role/doctor"
	"github.com/meshcni/istio-cni/internal/role/pods"
	"github.com/meshcni/istio-cni/internal/role/repairer"
	"github.com/meshcni/istio-cni/internal/role/selftester"
	"github.com/meshcni/istio-cni/internal/role/trace"
	"github.com/meshcni/istio-cni/internal/role/why"
)

const head = "| flag | variable | default | meaning |\n|---|---|---|---|\n"

// role is a command, as the program runs it.
type role func(applet.Call) int

// flags returns the table of a command's flags.
func flags(r role) func() (string, error) {
	return func() (string, error) {
		rows, err := r.rows()
		return head + rows, err
	}
}

type command struct {
	name string
	run  role
}

// commands are those without a table of flags of their own.
var commands = []command{ //nolint:gochecknoglobals // a constant table
	{"pods", pods.Run},
	{"why", why.Run},
	{"trace", trace.Run},
	{"doctor", doctor.Run},
	{"decisions", decisions.Run},
	{"bundle", bundle.Run},
	{"selftest", selftester.Run},
	{"repair", repairer.Run},
	{"version", output.PrintVersion},
}

// others is the table of their flags.
func others() (string, error) {
	var lines []string
	for _, c := range commands {
		rows, err := c.run.rows()
		if err != nil {
			return "", fmt.Errorf("%s: %w", c.name, err)
		}
		lines = append(lines, "| **"+c.name+"** | | | |", rows)
	}
	return head + strings.Join(lines, "\n"), nil
}

// help is a command's --help.
func (r role) help() (string, error) {
	var help strings.Builder
	code := r(applet.Call{
		Args: []string{"--help"}, Stdout: &help, Stderr: io.Discard, Stdin: strings.NewReader(""),
		Getenv: func(string) (string, bool) { return "", false },
	})
	if code != applet.ExitOK {
		return "", fmt.Errorf("--help: exit code %d: %s", code, help.String())
	}
	return help.String(), nil
}

// rows are the flags in a command's --help.
func (r role) rows() (string, error) {
	help, err := r.help()
	var lines []string
	for _, m := range flagHelp.FindAllStringSubmatch(help, -1) {
		lines = append(lines, row(m[1], m[2]))
	}
	if err == nil && lines == nil {
		err = fmt.Errorf("no flags in --help: %s", help)
	}
	return strings.Join(lines, "\n"), err
}

var (
	// flagHelp is a flag in a help: its names on lines that end with a comma except the last, and what it does on the next ones.
	flagHelp = regexp.MustCompile(`(?m)^ {3}([-$].*(?:,\n.*)*)\n((?: {6}.*\n?)+)`)
	standard = regexp.MustCompile(`^(.*?)(?: \(default: (.*)\))?$`)
)

// row is a flag's row in a table.
func row(names, text string) string {
	var flags, variables []string
	for name := range strings.SplitSeq(names, ",") {
		name, _, _ = strings.Cut(strings.TrimSpace(name), " ")
		if variable, ok := strings.CutPrefix(name, "$"); ok {
			variables = append(variables, variable)
		} else {
			flags = append(flags, name)
		}
	}
	m := standard.FindStringSubmatch(strings.Join(strings.Fields(text), " "))
	return "| " + strings.Join([]string{code(flags...), code(variables...), standardText(m[2]), plain(m[1])}, " | ") + " |"
}

// standardText is a default: a literal, or words.
func standardText(text string) string {
	if strings.Contains(text, " ") {
		return text
	}
	return code(text)
}
