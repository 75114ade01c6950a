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
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/completion"
	"github.com/meshcni/istio-cni/internal/applet/terminal"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Exit codes that every role shares, and the codes of answers about pods and packets.
const (
	ExitOK      = 0
	ExitError   = 1
	ExitUsage   = 2
	ExitPast    = 3 // past the mesh, or not captured
	ExitUnknown = 4
)

// Call is one start of the program, without the name in os.Args[0].
type Call struct {
	// Args are the arguments after the role's name.
	Args           []string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Getenv reads the environment. Roles call it only for their configuration.
	Getenv func(string) (string, bool)
	// Terminal returns the number of columns if the standard output is a terminal, else 0. It may be nil; see Columns.
	Terminal func() int
	// Colours reports whether the standard output is a terminal that shall show colours. It may be nil; see Screen.
	Colours func() bool
	// raw is the standard output without the writer that escapes colours.
	raw io.Writer
}

// Process returns this start of the program.
func Process() Call {
	getenv := os.LookupEnv //nolint:forbidigo // the only place: roles get the environment from a Call
	return Call{
		Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: getenv,
		Terminal: func() int { return terminal.Columns(os.Stdout) },
		Colours:  func() bool { return terminal.Colours(os.Stdout, getenv) },
	}
}

// Columns is the width of the terminal that the standard output is, else 0.
func (c Call) Columns() int {
	if c.Terminal == nil {
		return 0
	}
	return c.Terminal()
}

// Screen returns the standard output for printable text with colours, or nil if it shall have none.
func (c Call) Screen() io.Writer {
	switch {
	case c.Colours == nil || !c.Colours():
		return nil
	case c.raw != nil:
		return c.raw
	}
	return c.Stdout
}

// Fail prints an error of a command, and returns the exit code.
func (c Call) Fail(err error) int {
	_, _ = fmt.Fprintf(c.Stderr, "error: %v\n", err)
	return ExitError
}

// Refuse prints what is wrong with the arguments of a role, and returns the exit code.
func (c Call) Refuse(role string, err error) int {
	_, _ = fmt.Fprintf(c.Stderr, "error: %v; see istio-cni %s --help\n", err, role)
	return ExitUsage
}

// Role is one of the commands of the program.
type Role struct {
	// Name is the first argument that selects the role, Alias the name of a link that selects it, Variable an environment variable that
	// does whatever the arguments, unless the program was called by an alias. The last two can be "".
	Name, Alias, Variable string
	// Summary is one line for a person.
	Summary string
	// Protocol marks a role whose output a program reads. Run passes that output on unchanged.
	Protocol bool
	// Rows are the flags for the completion, or nil.
	Rows func() []settings.Setting
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
}

// Run selects a role by the base name of path, which is the program's path at its start, then by the variable, then by the
// first argument, and runs the role.
func (p Program) Run(path string, c Call) int {
	called := filepath.Base(path)
	if r, ok := p.find(func(r Role) bool { return r.Alias == called && r.Alias != "" }); ok {
		return p.start(r, c)
	}
	if r, ok := p.find(func(r Role) bool { v, _ := c.Getenv(r.Variable); return v != "" && r.Variable != "" }); ok {
		return p.start(r, c)
	}
	if len(c.Args) == 0 {
		return p.about(called, c)
	}
	first := c.Args[0]
	if r, ok := p.find(func(r Role) bool { return r.Name == first || r.Alias == first && first != "" }); ok {
		c.Args = c.Args[1:]
		return p.start(r, c)
	}
	switch first {
	case "help":
		if len(c.Args) > 1 {
			c.Args = []string{c.Args[1], "--help"}
			return p.Run(p.Name, c)
		}
		fallthrough
	case "--help", "-h":
		p.list(c.Stdout)
		return ExitOK
	case completion.Command, completionRole:
		return p.complete(first, c)
	}
	if slices.Contains([]string{"--version", "-v"}, first) {
		_, _ = fmt.Fprintln(c.Stdout, p.Version())
		return ExitOK
	}
	_, _ = fmt.Fprintf(c.Stderr, "%s: unknown command %q%s\n\n", called, first, settings.Suggestion(first, p.names()))
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
		c.raw = c.Stdout
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

// completionRole is the command that prints the completion for a shell.
const completionRole = "completion"

// names are the first arguments.
func (p Program) names() (names []string) {
	for _, r := range p.Roles {
		names = append(names, r.Name)
	}
	return append(names, completionRole)
}

// complete runs the command completion, or prints the candidates for a command line.
func (p Program) complete(command string, c Call) int {
	c.Args = c.Args[1:]
	if command == completionRole {
		text, err := completion.Run(c.Args, p.Name, false, completion.Help(p.Name, ""))
		if err != nil {
			return c.Refuse(completionRole, err)
		}
		_, err = io.WriteString(c.Stdout, text)
		return c.End(err)
	}
	var found []settings.Candidate
	switch last := len(c.Args) - 1; last {
	case -1:
	case 0:
		for _, r := range p.Roles {
			found = append(found, settings.Candidate{Text: r.Name, Use: r.Summary})
		}
		found = completion.Matching(c.Args[0], append(found, settings.Candidate{Text: completionRole})...)
	default:
		r, _ := p.find(func(r Role) bool { return r.Name == c.Args[0] })
		switch {
		case c.Args[0] == completionRole && last == 1:
			found = completion.Words(c.Args[last], completion.Shells()...)
		case r.Rows != nil:
			found = settings.Complete(r.Rows(), c.Args[1:]).Found
		}
	}
	return c.End(completion.Print(c.Stdout, found))
}

// End prints the error of a command, if any, and returns the exit code.
func (c Call) End(err error) int {
	if err != nil {
		return c.Fail(err)
	}
	return ExitOK
}

func (p Program) list(w io.Writer) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%s\n\nCommands, by first argument or by the name of a link:\n", p.About, p.Version())
	var implicit string
	for _, r := range p.Roles {
		fmt.Fprintf(&b, "  %s %-10s %-18s %s\n", p.Name, r.Name, r.Alias, r.Summary)
		if r.Variable != "" {
			implicit = fmt.Sprintf("With %s set it is the %s. ", r.Variable, r.Name)
		}
	}
	fmt.Fprintf(&b, "  %s %-10s %-18s %s\n", p.Name, completionRole, "", "prints the completion for bash, zsh or fish")
	fmt.Fprintf(&b, "\n%s\"%s COMMAND --help\" shows its flags.\n", implicit, p.Name)
	_, _ = io.WriteString(w, b.String())
}

// release is the version of a release, which hack/release.sh sets when it links the program.
var release string //nolint:gochecknoglobals // the linker can set nothing else

// Version returns the release's version, or the module's.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	switch {
	case release != "":
		return release
	case ok && info.Main.Version != "":
		return info.Main.Version
	}
	return "(devel)"
}

// Revision returns the commit, and whether the build had further changes. A build outside version control has no revision.
func Revision() (revision string, modified bool) {
	settings := map[string]string{}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
	}
	return settings["vcs.revision"], settings["vcs.modified"] == "true"
}

// Build returns one line: version, revision, toolchain, platform.
func Build() string {
	text := "version " + Version()
	revision, modified := Revision()
	if revision != "" {
		text += ", revision " + revision
	}
	if modified {
		text += " (modified)"
	}
	return fmt.Sprintf("%s, %s %s/%s", text, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
