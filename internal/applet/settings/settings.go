// Package settings reads the settings of a role: a table of rows, each a flag with its other spellings and the environment
// variables that say the same.
//
// It promises that a flag counts before a variable and an empty variable as none, that all problems are reported together, each with
// the place, the value and the cause, and that every value in force can be told with where it comes from. It never prints, and
// never ends the program.
//
// Start reading at Find, then Found.Apply.
package settings

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/arguments"
)

// ErrHelp is the answer to --help.
var ErrHelp = arguments.ErrHelp

// Setting is one row.
type Setting struct {
	Name    string
	Aliases []string
	// Arg is what the flag takes, "" for a switch.
	Arg string
	// Env are variables that say the same; the first that is not empty counts.
	Env []string
	// Default is the text that counts when nobody says anything; "" leaves the setting as it is. Shown is what the help says
	// of it, where it is not the text itself.
	Default, Shown string
	Use            string
	// Set reads a text. The error says what is wanted and leaves naming the text to the caller.
	Set func(text string) error
}

// flags are all spellings of the setting.
func (s Setting) flags() []string { return append([]string{s.Name}, s.Aliases...) }

// Origin is a text with where it comes from.
type Origin struct {
	Text, Where string
	// Given tells it from a default.
	Given bool
}

// Found has the origin of each setting that somebody gave, and after Apply of all, by name.
type Found map[string]Origin

// Find looks for each setting among arguments and variables, and reads none yet. A flag that is given more than once has all
// its texts, between commas. The error joins all mistakes in the arguments; it is ErrHelp when help was asked for.
func Find(rows []Setting, args []string, getenv func(string) (string, bool)) (Found, error) {
	texts := map[string][]string{}
	var flags []arguments.Flag
	for _, s := range rows {
		for _, name := range s.flags() {
			flags = append(flags, arguments.Flag{Name: name, Switch: s.Arg == ""})
		}
	}
	mistakes, err := arguments.Parse(flags, args, func(name, text string) { texts[name] = append(texts[name], text) })
	if err != nil {
		return nil, err
	}
	found := Found{}
	for _, s := range rows {
		if at := s.find(texts, getenv); at.Given {
			found[s.Name] = at
		}
	}
	return found, errors.Join(mistakes...)
}

func (s Setting) find(texts map[string][]string, getenv func(string) (string, bool)) Origin {
	for _, name := range s.flags() {
		if text, ok := texts[name]; ok {
			return Origin{strings.Join(text, ","), "flag --" + name, true}
		}
	}
	for _, name := range s.Env {
		if text, _ := getenv(name); text != "" {
			return Origin{text, "environment variable " + name, true}
		}
	}
	return Origin{}
}

// Apply reads every setting, with its default where nothing was given. The error joins all problems.
func (f Found) Apply(rows []Setting) error {
	var problems []error
	for _, s := range rows {
		at := f[s.Name]
		if !at.Given {
			at = Origin{Text: s.Default, Where: "default"}
			f[s.Name] = at
		}
		if at.Text == "" && !at.Given {
			continue
		}
		if err := s.Set(at.Text); err != nil {
			problems = append(problems, fmt.Errorf("%s: value %q: %w", at.Where, at.Text, err))
		}
	}
	return errors.Join(problems...)
}

// Describe lists what is in force, with where it comes from.
func (f Found) Describe(rows []Setting) []slog.Attr {
	var all []slog.Attr
	for _, s := range rows {
		all = append(all, slog.String(s.Name, fmt.Sprintf("%s (%s)", f[s.Name].Text, f[s.Name].Where)))
	}
	return all
}

// Help prints rows for a person: the names on a line and the rest below it.
func Help(w io.Writer, rows []Setting) {
	for _, s := range rows {
		var names []string
		for _, flag := range s.flags() {
			names = append(names, strings.TrimSpace("--"+flag+" "+s.Arg))
		}
		for _, variable := range s.Env {
			names = append(names, "$"+variable)
		}
		use := s.Use
		switch {
		case s.Shown != "":
			use += " (default: " + s.Shown + ")"
		case s.Default != "":
			use += " (default: " + s.Default + ")"
		}
		_, _ = fmt.Fprintf(w, "   %s\n      %s\n", strings.Join(names, ", "), use)
	}
}

// Dashed gives the variables of a setting for programs of old, whose names have dashes as the flag, and those that a shell
// can set.
func Dashed(prefix, name string) []string {
	upper := prefix + strings.ToUpper(name)
	return slices.Compact([]string{upper, strings.ReplaceAll(upper, "-", "_")})
}
