package settings

import (
	"flag"
	"fmt"
	"slices"
	"strings"
)

// ErrHelp is the result of --help: the caller prints the help and ignores all other arguments.
var ErrHelp = flag.ErrHelp

const strayArgument = "stray argument %q"

// Parse reads arguments in the syntax of Go's package flag and, for flags of one letter, in kubectl's: "-nshop", "-Aw". Unlike package
// flag it does not stop at the first mistake: Input.Read reports all unknown flags, each with the nearest one, flags without a value and
// stray arguments. The error is ErrHelp or nil.
func Parse(rows []Setting, args []string, getenv func(string) (string, bool)) (Input, error) {
	in := Input{flags: map[string][]string{}, getenv: getenv}
	isSwitch := switches(rows)
	mistake := func(format, arg string) { in.mistakes = append(in.mistakes, fmt.Errorf(format, arg)) }
	for args = Detached(rows, args); len(args) > 0; {
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
			mistake("bad flag syntax: %s", arg)
			continue
		case !known && (name == "help" || name == "h"):
			return in, ErrHelp
		case !known:
			mistake("unknown flag %s"+Suggestion(dashed(name), dashes(isSwitch)), dashed(name))
			continue
		case hasText:
		case standsAlone:
			text = "true"
		case len(args) == 0:
			mistake("flag %s needs a value", dashed(name))
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

// dashed returns a flag as people write it.
func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// dashes returns the names of all flags, as people write them.
func dashes(flags map[string]bool) (names []string) {
	for name := range flags {
		names = append(names, dashed(name))
	}
	slices.Sort(names)
	return names
}

// Detached separates flags of one letter that are written together or with their value: "-nshop", "-Aw". A misspelt long flag with one
// dash stays as it is.
func Detached(rows []Setting, args []string) (out []string) {
	const shortest = 4 // letters of a name that is taken for a misspelt one
	isSwitch := switches(rows)
	for i := 0; i < len(args); i++ {
		name, isFlag := strings.CutPrefix(args[i], "-")
		if name == "-" {
			return append(out, args[i:]...)
		}
		long, _, hasText := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		standsAlone, known := isSwitch[long]
		switch {
		case isFlag && known && !standsAlone && !hasText:
			out = append(out, args[i:min(i+2, len(args))]...)
			i++
		case isFlag && !known && len(long) > 1 && name[0] != '-' && (len(long) < shortest || Suggestion(dashed(long), dashes(isSwitch)) == ""):
			out = append(out, letters(isSwitch, name)...)
		default:
			out = append(out, args[i])
		}
	}
	return out
}

// letters separates flags of one letter, of which the last one may have a value.
func letters(isSwitch map[string]bool, name string) (out []string) {
	for at := range len(name) {
		standsAlone, known := isSwitch[name[at:at+1]]
		more := at+1 < len(name) && name[at+1] != '='
		switch {
		case known && standsAlone && more:
			out = append(out, "-"+name[at:at+1])
			continue
		case known && more:
			return append(out, "-"+name[at:at+1], name[at+1:])
		}
		return append(out, "-"+name[at:])
	}
	return out
}

// Operands separates the arguments that are neither flags nor flags' values from the other ones: the subject of a command may come
// before or behind its flags. Behind "--" every argument is an operand.
func Operands(rows []Setting, args []string) (operands, rest []string) {
	isSwitch := switches(rows)
	args = Detached(rows, args)
	for i := 0; i < len(args); i++ {
		name, isFlag := strings.CutPrefix(args[i], "-")
		if args[i] == "--" {
			return append(operands, args[i+1:]...), rest
		}
		if !isFlag {
			operands = append(operands, args[i])
			continue
		}
		rest = append(rest, args[i])
		if standsAlone, known := isSwitch[strings.TrimPrefix(name, "-")]; known && !standsAlone && i+1 < len(args) {
			i++
			rest = append(rest, args[i])
		}
	}
	return operands, rest
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
