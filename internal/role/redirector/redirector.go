// Package redirector is the command "istio-cni iptables", also called istio-iptables: it programs, verifies, explains,
// probes or cleans a network namespace.
//
// It promises the flags and environment of the reference's command, that everything is checked before anything is
// touched, and the exit codes below. It never asks the API server.
//
// Start at Run.
package redirector

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/meshcni/istio-cni/internal/applet"
)

// Exit codes. 0, 1, 126 and 255 are those of the reference.
const (
	exitOK         = applet.ExitOK
	exitError      = applet.ExitError // a bad value, or a namespace that could not be programmed
	exitDifferent  = 3                // --verify found differences
	exitValidation = 126              // --run-validation: traffic is not redirected
	exitUsage      = 255              // an unknown flag or argument
)

const exitCodes = `0    done, or nothing to do
   1    a bad value, or the namespace could not be programmed
   3    --verify: the namespace is not as wanted
   126  --run-validation: traffic is not redirected
   255  an unknown flag or a stray argument`

// Run carries out the command and gives the exit code.
func Run(c applet.Call) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	code := exitUsage
	app := command(c, func(ctx *cli.Context) {
		code = act(ctx, c)
	})
	if err := app.RunContext(ctx, append([]string{app.Name}, detached(c.Args)...)); err != nil {
		say(c.Stderr, "error: %v; see %s --help\n", err, app.HelpName)
		return exitUsage
	}
	if asksForHelp(c.Args) {
		return exitOK
	}
	return code
}

// detached separates a short flag from a value that is written right behind it, as in -p15001, which the reference's flag
// library allows and this one does not.
func detached(args []string) []string {
	var out []string
	for _, a := range args {
		at := slices.IndexFunc(settings(), func(s setting) bool { return s.short != "" && strings.HasPrefix(a, "-"+s.short) })
		if at < 0 || len(a) == 2 || a[2] == '=' || longFlag(strings.TrimPrefix(a, "-")) {
			out = append(out, a)
			continue
		}
		out = append(out, a[:2], a[2:])
	}
	return out
}

// longFlag reports whether the text is the name of a flag, which may be written with one dash, too.
func longFlag(text string) bool {
	name, _, _ := strings.Cut(text, "=")
	return slices.ContainsFunc(flags(), func(f cli.Flag) bool { return slices.Contains(f.Names(), name) })
}

// asksForHelp reports whether the library answered by itself.
func asksForHelp(args []string) bool {
	for _, a := range args {
		if a == "--help" || a == "-h" || a == "-help" {
			return true
		}
	}
	return false
}

// command describes the flags to the library. The library must not exit, must not print usage to stdout when a flag is
// wrong, and does not read the environment: its way with empty variables is not ours.
func command(c applet.Call, action func(*cli.Context)) *cli.App {
	return &cli.App{
		Name: "istio-cni iptables", HelpName: "istio-cni iptables",
		Usage:           "programs, verifies, explains or removes the redirection of a network namespace",
		UsageText:       "istio-cni iptables [flags]   (also: istio-iptables [flags])",
		Description:     "Exit codes:\n   " + exitCodes + environmentHelp(),
		Writer:          c.Stdout,
		ErrWriter:       c.Stderr,
		HideHelpCommand: true,
		Flags:           flags(),
		ExitErrHandler:  func(*cli.Context, error) {},
		OnUsageError:    func(_ *cli.Context, err error, _ bool) error { return err },
		Action: func(ctx *cli.Context) error {
			if ctx.Args().Present() {
				return fmt.Errorf("stray argument %q: all settings are flags", ctx.Args().First())
			}
			action(ctx)
			return nil
		},
	}
}

func flags() []cli.Flag {
	var out []cli.Flag
	for _, s := range settings() {
		aliases := short(s.short)
		if s.flag == "second-ip-family" {
			aliases = []string{"second_ip_family"} // as in the plugin's configuration
		}
		out = append(out, &cli.StringFlag{Name: s.flag, Aliases: aliases, Usage: s.usage + envText(s.env), DefaultText: s.def})
	}
	for _, t := range toggles() {
		out = append(out, &cli.BoolFlag{Name: t.flag, Aliases: short(t.short), Usage: t.usage + envText(t.env)})
	}
	out = append(out,
		&cli.StringFlag{Name: "network-namespace", Usage: "`PATH` of the namespace to work in; empty: the current one" + envText([]string{"NETWORK_NAMESPACE"})},
		&cli.StringFlag{Name: "backend", Usage: "`WAY` of the rules into the namespace: auto, netlink (those of iptables-nft, without a process), native (tables of nftables' own) or iptables (the programs of the host)" + envText([]string{"CNI_BACKEND"}), DefaultText: "auto"},
		&cli.StringFlag{Name: "force-iptables-binary", Usage: "`legacy|nft` instead of choosing" + envText([]string{"FORCE_IPTABLES_BINARY"})},
		&cli.StringFlag{Name: "iptables-probe-port", Usage: "`PORT` that the validation dials" + envText([]string{"IPTABLES_PROBE_PORT"}), DefaultText: defaultProbePort},
		&cli.StringFlag{Name: "probe-timeout", Usage: "`DURATION` after which the validation has failed" + envText([]string{"PROBE_TIMEOUT"}), DefaultText: defaultProbeTimeout},
	)
	for name, takesValue := range historic() {
		if takesValue {
			out = append(out, &cli.StringFlag{Name: name, Hidden: true})
		} else {
			var aliases []string
			if name == "restore-format" {
				aliases = []string{"f"}
			}
			out = append(out, &cli.BoolFlag{Name: name, Aliases: aliases, Hidden: true})
		}
	}
	return out
}

func short(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

func envText(env []string) string {
	if len(env) == 0 {
		return ""
	}
	return " [$" + strings.Join(env, ", $") + "]"
}

// environmentHelp lists what only the environment can say.
func environmentHelp() string {
	var b strings.Builder
	b.WriteString("\n\nEnvironment without a flag:")
	for _, s := range envOnly() {
		fmt.Fprintf(&b, "\n   %s  %s", s.env[0], s.usage)
	}
	b.WriteString("\n   ENVOY_USER  user whose uid is the default of --proxy-uid, default istio-proxy")
	b.WriteString("\n   DRY_RUN_FILE_PATH  file that --dry-run writes its text to as well")
	return b.String()
}

func say(w io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }

// act reads the configuration and does what it says.
func act(ctx *cli.Context, c applet.Call) int {
	conf, err := read(source{Context: ctx, getenv: c.Getenv})
	if err != nil {
		for _, problem := range problems(err) {
			say(c.Stderr, "error: %s\n", problem)
		}
		return exitError
	}
	if ctx.Bool("clean") {
		say(c.Stderr, "warning: --clean does nothing; to remove rules use --cleanup-only\n")
	}
	for _, w := range conf.warnings {
		say(c.Stderr, "warning: %s\n", w)
	}
	level := slog.LevelWarn
	if conf.cniMode {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(c.Stderr, &slog.HandlerOptions{Level: level}))
	r := run{config: conf, stdout: c.Stdout, stderr: c.Stderr, log: log}
	return r.do(ctx.Context)
}

// problems gives the texts of a join of joins, each once: a bad uid is the default of the gid as well.
func problems(err error) []string {
	var many interface{ Unwrap() []error }
	if !errors.As(err, &many) {
		return []string{err.Error()}
	}
	var out []string
	for _, e := range many.Unwrap() {
		for _, text := range problems(e) {
			if !slices.Contains(out, text) {
				out = append(out, text)
			}
		}
	}
	return out
}
