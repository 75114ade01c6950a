// Package arguments reads the flags of a role as texts, so that a role can judge flags, environment and defaults by one
// table and report everything that is wrong together.
//
// It promises the syntax of Go's package flag, and that no mistake hides another. It never prints, exits, or reads the
// environment.
//
// Start at Parse.
package arguments

import (
	"flag"
	"fmt"
	"slices"
	"strings"
)

// ErrHelp is the answer to --help.
var ErrHelp = flag.ErrHelp

// Flag is one that a role has. A Switch may stand without a value, which is "true" then.
type Flag struct {
	Name   string
	Switch bool
}

// Parse hands each flag's text to set, in the order of the arguments, and gives the mistakes: unknown flags, flags without
// a value, stray arguments. The error is ErrHelp, and then nothing else counts.
//
// Package flag itself stops at the first mistake, and tells which one it was by its text alone.
func Parse(flags []Flag, args []string, set func(name, text string)) (mistakes []error, err error) {
	mistake := func(format, arg string) { mistakes = append(mistakes, fmt.Errorf(format, arg)) }
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, text, hasText := split(arg)
		at := slices.IndexFunc(flags, func(f Flag) bool { return f.Name == name })
		switch {
		case arg == "--":
			for _, stray := range args {
				mistake(errStray, stray)
			}
			return mistakes, nil
		case len(arg) < 2 || arg[0] != '-':
			mistake(errStray, arg)
		case name == "" || name[0] == '-':
			mistake("reading arguments: bad flag syntax: %s", arg)
		case at < 0 && (name == "help" || name == "h"):
			return nil, ErrHelp
		case at < 0:
			mistake("reading arguments: flag provided but not defined: -%s", name)
		case hasText:
			set(name, text)
		case flags[at].Switch:
			set(name, "true")
		case len(args) == 0:
			mistake("reading arguments: flag needs an argument: -%s", name)
		default:
			set(name, args[0])
			args = args[1:]
		}
	}
	return mistakes, nil
}

const errStray = "stray argument %q: all settings are flags"

// split takes a flag apart: one or two dashes, the name, and what stands behind an equals sign.
func split(arg string) (name, text string, hasText bool) {
	arg = strings.TrimPrefix(arg, "-")
	return strings.Cut(strings.TrimPrefix(arg, "-"), "=")
}
