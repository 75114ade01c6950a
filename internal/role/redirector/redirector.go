// Package redirector is the command "istio-cni iptables", also called istio-iptables: it programs, verifies, explains,
// probes or cleans a network namespace.
//
// It promises the flags and environment of the reference's command, that everything is validated before any change, and the
// exit codes below. It never sends a request to the API server.
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
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Exit codes. 0, 1, 126 and 255 are the reference's.
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
   1    a bad value, or the namespace could not be programmed
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
	conf, err := load(c.Args, c.Getenv)
	if errors.Is(err, settings.ErrHelp) {
		printf(c.Stdout, "%s", help())
		return exitOK
	}
	if err != nil {
		service.Report(c.Stderr, "iptables", err)
		if _, usage := errors.AsType[settings.ArgumentError](err); usage {
			return exitUsage
		}
		return exitError
	}
	for _, w := range conf.warnings {
		printf(c.Stderr, "warning: %s\n", w)
	}
	level := slog.LevelWarn
	if conf.cniMode {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(c.Stderr, &slog.HandlerOptions{Level: level}))
	code, err := run{config: conf, stdout: c.Stdout, stderr: c.Stderr, log: log}.do(ctx)
	if err != nil {
		printf(c.Stderr, "error: %v\n", err)
	}
	return code
}

// help returns the text of --help.
func help() string {
	var b strings.Builder
	b.WriteString(helpHead)
	settings.Help(&b, new(config).groups()...)
	return b.String()
}

// printf prints to a person: an output that cannot be written is no error of the command.
func printf(w io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }
