// Package redirector is the command "istio-cni iptables", also called istio-iptables: it programs, verifies, explains,
// probes or cleans a network namespace.
//
// It promises the flags and environment of Istio's command, that everything is validated before any change, and the
// exit codes below. It never sends a request to the API server.
//
// Start at Run.
package redirector

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Exit codes. 0, 1, 126 and 255 are Istio's.
const (
	exitOK         = applet.ExitOK
	exitError      = applet.ExitError // a bad value, or a namespace that could not be programmed
	exitDifferent  = 3                // --verify found differences
	exitValidation = 126              // --run-validation: traffic is not redirected
	exitUsage      = 255              // an unknown flag or argument
)

const helpHead = `NAME:
   istio-cni iptables - programs, verifies, explains or removes the redirection of a network namespace

USAGE:
   istio-cni iptables [flags]   (also: istio-iptables [flags])

EXIT CODES:
   0    done, or nothing to do
   1    a bad value, or the namespace could not be programmed or holds other rules of the mesh
   3    --verify: the namespace differs from the desired state
   126  --run-validation: traffic is not redirected
   255  an unknown flag or a stray argument

A flag beats the environment, and that beats the default. An empty variable counts as unset. All problems are reported
together.

`

// Run runs the command and returns the exit code.
func Run(c applet.Call) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	flags, err := parse(c.Args)
	switch {
	case err != nil:
		printf(c.Stderr, "error: %v; see istio-cni iptables --help\n", err)
		return exitUsage
	case flags.Args().Present():
		printf(c.Stderr, "error: stray argument %q: all settings are flags; see istio-cni iptables --help\n", flags.Args().First())
		return exitUsage
	case flags.Bool("help"):
		printf(c.Stdout, "%s", help())
		return exitOK
	}
	return act(ctx, flags, c)
}

// parse parses the arguments with the library's flags. It does not use the library's App because its templates call methods by name,
// so that the linker keeps every exported method, an eighth of the program.
func parse(args []string) (*cli.Context, error) {
	set, all := flag.NewFlagSet("", flag.ContinueOnError), append(flags(), cli.HelpFlag)
	set.SetOutput(io.Discard)
	for _, f := range all {
		if err := f.Apply(set); err != nil {
			return nil, err
		}
	}
	if err := set.Parse(settings.Detached(rows(), args)); err != nil {
		return nil, err
	}
	given := map[string]string{}
	set.Visit(func(f *flag.Flag) { given[f.Name] = f.Value.String() })
	for _, f := range all {
		// Each name of a flag has its own value.
		names := slices.DeleteFunc(f.Names(), func(name string) bool { _, is := given[name]; return !is })
		if len(names) > 1 {
			return nil, fmt.Errorf("cannot use two forms of the same flag: %s %s", names[1], names[0])
		}
		for _, name := range names {
			if err := set.Set(f.Names()[0], given[name]); err != nil {
				return nil, err
			}
		}
	}
	return cli.NewContext(nil, set, nil), nil
}

// help returns the text of --help.
func help() string {
	var b strings.Builder
	b.WriteString(helpHead)
	settings.Help(&b, new(config).groups()...)
	return b.String()
}

// Rows are the flags for the completion.
func Rows() []settings.Setting { return settings.All(new(config).groups()) }

// rows are all settings, with the historic flags.
func rows() []settings.Setting { return append(settings.All(new(config).groups()), historic()...) }

// flags declares the settings to the library, which does not read the environment because it would not ignore empty variables.
func flags() []cli.Flag {
	var out []cli.Flag
	for _, s := range rows() {
		switch {
		case s.Name == "":
		case s.Arg == "":
			out = append(out, &cli.BoolFlag{Name: s.Name, Aliases: s.Aliases})
		default:
			out = append(out, &cli.StringFlag{Name: s.Name, Aliases: s.Aliases})
		}
	}
	return out
}

// printf prints for the user: a failed write is not an error of the command.
func printf(w io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }

// act reads the configuration and runs the command.
func act(ctx context.Context, flags *cli.Context, c applet.Call) int {
	conf, err := read(func(flag string) (string, bool) { return fmt.Sprint(flags.Value(flag)), flags.IsSet(flag) }, c.Getenv)
	if err != nil {
		for problem := range strings.SplitSeq(err.Error(), "\n") {
			printf(c.Stderr, "error: %s\n", problem)
		}
		return exitError
	}
	if flags.Bool("clean") {
		printf(c.Stderr, "warning: --clean does nothing; to remove rules use --cleanup-only\n")
	}
	for _, w := range conf.warnings {
		printf(c.Stderr, "warning: %s\n", w)
	}
	level := slog.LevelWarn
	if conf.cniMode {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(c.Stderr, &slog.HandlerOptions{Level: level}))
	code, err := run{Call: c, config: conf, log: log}.do(ctx)
	if err != nil {
		printf(c.Stderr, "error: %v\n", err)
	}
	return code
}
