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

// Parse reads arguments in the syntax of Go's package flag. Unlike package flag it does not stop at the first mistake:
// Input.Read reports all unknown flags, flags without a value and stray arguments. The error is ErrHelp or nil.
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

// switches returns the name of each flag, with true for a flag without a value.
func switches(rows []Setting) map[string]bool {
	all := map[string]bool{}
	for _, s := range rows {
		for _, name := range s.flags() {
			all[name] = s.Arg == ""
		}
	}
	return all
}

// Operand returns the first argument that is neither a flag nor a flag's value, and the other arguments: the subject of a command
// may come before or behind its flags. Without one, operand is "".
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

// Given returns an Input whose arguments were parsed elsewhere: text returns the value of a flag, if given.
func Given(rows []Setting, text func(flag string) (string, bool), getenv func(string) (string, bool)) Input {
	in := Input{flags: map[string][]string{}, getenv: getenv}
	for _, s := range rows {
		if t, ok := text(s.Name); ok && s.Name != "" {
			in.flags[s.Name] = []string{t}
		}
	}
	return in
}
