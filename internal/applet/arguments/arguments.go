// Package arguments reads the flags of a role as texts, so that a role can judge flags, environment and defaults by one
// table and report everything that is wrong together.
//
// It promises that no mistake hides another, and that the flag library neither prints, exits, nor reads the environment:
// its way with empty variables is not ours.
//
// Start at Parse.
package arguments

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
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
func Parse(program string, flags []Flag, args []string, set func(name, text string)) (mistakes []error, err error) {
	// The library stops at the first mistake; what is behind it counts as well.
	for rest := args; ; {
		before := rest
		switch rest, err = some(program, flags, rest, set); {
		case errors.Is(err, ErrHelp):
			return nil, ErrHelp
		case err != nil:
			mistakes = append(mistakes, fmt.Errorf("reading arguments: %w", err))
			rest = behind(before, err)
		case len(rest) == 0:
			return mistakes, nil
		default:
			mistakes = append(mistakes, fmt.Errorf("stray argument %q: all settings are flags", rest[0]))
			rest = rest[1:]
		}
	}
}

// text takes a flag's value as it is.
type text struct {
	flag Flag
	set  func(name, text string)
}

func (t text) Set(value string) error { t.set(t.flag.Name, value); return nil }
func (t text) String() string         { return "" }

// IsBoolFlag lets a switch stand without a value.
func (t text) IsBoolFlag() bool { return t.flag.Switch }

// some reads arguments up to the first that is no flag, and gives what is behind it.
func some(program string, flags []Flag, args []string, set func(name, text string)) (rest []string, err error) {
	known := make([]cli.Flag, 0, len(flags))
	for _, f := range flags {
		known = append(known, &cli.GenericFlag{Name: f.Name, Value: text{f, set}})
	}
	app := &cli.App{
		Name: program, HideHelp: true, HideHelpCommand: true, HideVersion: true, Flags: known,
		Writer: io.Discard, ErrWriter: io.Discard, ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError: func(_ *cli.Context, err error, _ bool) error { return err },
		Action: func(ctx *cli.Context) error {
			rest = ctx.Args().Slice()
			return nil
		},
	}
	err = app.Run(append([]string{program}, args...))
	return rest, err
}

// behind gives the arguments behind the one that an error of the library is about, which it names last.
func behind(args []string, err error) []string {
	words := strings.Fields(err.Error())
	if len(words) == 0 {
		return nil
	}
	culprit := strings.TrimLeft(words[len(words)-1], "-")
	at := slices.IndexFunc(args, func(arg string) bool {
		name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		return strings.HasPrefix(arg, "-") && (name == culprit || strings.TrimLeft(arg, "-") == culprit)
	})
	if at < 0 {
		return nil
	}
	return args[at+1:]
}
