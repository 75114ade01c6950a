// Package applet runs the role of a program that has several names.
//
// It promises that one table of roles is the source of the selection, the help, and the error for a wrong name. It never exits and
// has no role of its own.
//
// Start at Run.
package applet

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Exit codes that every role shares.
const (
	ExitOK    = 0
	ExitError = 1
	ExitUsage = 2
)

// Call is one start of the program, without the name in os.Args[0].
type Call struct {
	// Args are the arguments after the role's name.
	Args           []string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Getenv reads the environment. Roles call it only for their configuration.
	Getenv func(string) (string, bool)
	// Terminal returns the columns of a terminal at the standard output, else 0. It may be nil.
	Terminal func() int
}

// Process returns this start of the program.
func Process() Call {
	return Call{Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.LookupEnv} //nolint:forbidigo // the only place: roles get the environment from a Call
}

// Role is one of the commands of the program.
type Role struct {
	// Name is the first argument that selects the role, Alias the name of a link that selects it, "" for none.
	Name, Alias string
	// Summary is one line of help.
	Summary string
	// Protocol marks a role whose output a program reads. Run passes that output on unchanged.
	Protocol bool
	// Run does the work and returns the exit code.
	Run func(Call) int
}

// Program is a set of roles under one name.
type Program struct {
	// Name is the program's name, About its description in one line.
	Name, About string
	// Version returns the program's version. Run calls it only for output because reading the build information takes time.
	Version func() string
	Roles   []Role
	// Implicit is the role that the environment variable ImplicitVar selects whatever the arguments. An alias has priority
	// over the variable.
	Implicit, ImplicitVar string
}

// Run selects a role by the base name of path, which is the program's path at its start, then by the variable, then by the
// first argument, and runs the role.
func (p Program) Run(path string, c Call) int {
	called := filepath.Base(path)
	if r, ok := p.find(func(r Role) bool { return r.Alias == called && r.Alias != "" }); ok {
		return p.start(r, c)
	}
	if v, set := c.Getenv(p.ImplicitVar); set && v != "" {
		if r, ok := p.find(func(r Role) bool { return r.Name == p.Implicit }); ok {
			return p.start(r, c)
		}
	}
	if len(c.Args) == 0 {
		return p.about(called, c)
	}
	first := c.Args[0]
	if r, ok := p.find(func(r Role) bool { return r.Name == first || r.Alias == first && first != "" }); ok {
		c.Args = c.Args[1:]
		return p.start(r, c)
	}
	if slices.Contains([]string{"help", "--help", "-h"}, first) {
		p.list(c.Stdout)
		return ExitOK
	}
	if slices.Contains([]string{"--version", "-v"}, first) {
		_, _ = fmt.Fprintln(c.Stdout, p.Version())
		return ExitOK
	}
	_, _ = fmt.Fprintf(c.Stderr, "%s: unknown command %q\n\n", called, first)
	p.list(c.Stderr)
	return ExitUsage
}

func (p Program) find(match func(Role) bool) (Role, bool) {
	at := slices.IndexFunc(p.Roles, match)
	if at < 0 {
		return Role{}, false
	}
	return p.Roles[at], true
}

func (p Program) start(r Role, c Call) int {
	if !r.Protocol {
		c.Stdout, c.Stderr = printable.NewWriter(c.Stdout), printable.NewWriter(c.Stderr)
	}
	return r.Run(c)
}

// about handles a call without arguments: it prints the help under the program's own name, and an error under another name.
func (p Program) about(called string, c Call) int {
	if called == p.Name {
		p.list(c.Stdout)
		return ExitOK
	}
	_, _ = fmt.Fprintf(c.Stderr, "%s: called by an unknown name\n\n", called)
	p.list(c.Stderr)
	return ExitUsage
}

func (p Program) list(w io.Writer) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%s\n\nCommands, by first argument or by the name of a link:\n", p.About, p.Version())
	for _, r := range p.Roles {
		fmt.Fprintf(&b, "  %s %-10s %-18s %s\n", p.Name, r.Name, r.Alias, r.Summary)
	}
	fmt.Fprintf(&b, "\nWith %s set it is the %s. \"%s COMMAND --help\" shows its flags.\n", p.ImplicitVar, p.Implicit, p.Name)
	_, _ = io.WriteString(w, b.String())
}
