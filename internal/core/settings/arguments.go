package settings

import (
	"flag"
	"fmt"
	"slices"
	"strings"
)

// ErrHelp is the result of --help: the caller prints the help and ignores all other arguments.
var ErrHelp = flag.ErrHelp

const strayArgument = "stray argument %q: all settings are flags"

// Parse reads arguments in the syntax of Go's package flag, which itself stops at the first mistake. Here no mistake hides
// another: unknown flags, flags without a value and stray arguments are reported by Input.Read. The error is ErrHelp, or nil.
func Parse(rows []Setting, args []string, getenv func(string) (string, bool)) (Input, error) {
	in := Input{flags: map[string][]string{}, getenv: getenv}
	isSwitch := switches(rows)
	mistake := func(format, arg string) { in.mistakes = append(in.mistakes, fmt.Errorf(format, arg)) }
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, text, hasText := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-"), "=")
		standsAlone, known := isSwitch[name]
		switch {
		case arg == "--":
			for _, stray := range args {
				mistake(strayArgument, stray)
			}
			return in, nil
		case len(arg) < 2 || arg[0] != '-':
			mistake(strayArgument, arg)
			continue
		case name == "" || name[0] == '-':
			mistake("reading arguments: bad flag syntax: %s", arg)
			continue
		case !known && (name == "help" || name == "h"):
			return in, ErrHelp
		case !known:
			mistake("reading arguments: flag provided but not defined: -%s", name)
			continue
		case hasText:
		case standsAlone:
			text = "true"
		case len(args) == 0:
			mistake("reading arguments: flag needs an argument: -%s", name)
			continue
		default:
			text, args = args[0], args[1:]
		}
		in.flags[name] = append(in.flags[name], text)
	}
	return in, nil
}

// switches has the name of each flag, with true for one without a value.
func switches(rows []Setting) map[string]bool {
	all := map[string]bool{}
	for _, s := range rows {
		for _, name := range s.flags() {
			all[name] = s.Arg == ""
		}
	}
	return all
}

// Operand returns the first argument that is neither a flag nor the value of one, and the others: the subject of a command may be
// before and behind its flags. It is "" if there is none.
func Operand(rows []Setting, args []string) (operand string, rest []string) {
	isSwitch := switches(rows)
	for i := 0; i < len(args); i++ {
		name, isFlag := strings.CutPrefix(args[i], "-")
		if !isFlag {
			return args[i], slices.Delete(slices.Clone(args), i, i+1)
		}
		if standsAlone, known := isSwitch[strings.TrimPrefix(name, "-")]; known && !standsAlone {
			i++
		}
	}
	return "", args
}

// Given is an Input whose arguments were parsed elsewhere: text gives that of a flag, if it was given.
func Given(rows []Setting, text func(flag string) (string, bool), getenv func(string) (string, bool)) Input {
	in := Input{flags: map[string][]string{}, getenv: getenv}
	for _, s := range rows {
		if t, ok := text(s.Name); ok && s.Name != "" {
			in.flags[s.Name] = []string{t}
		}
	}
	return in
}
