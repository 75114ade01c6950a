// Package service is the outside of a role that works until it is told to end: what it says of its command line, its
// first and its last line of log, the signals that end it and its exit code.
//
// It promises that nothing is begun unless the whole command line can be used. It never decides what the work is.
//
// Start at Run.
package service

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
	"github.com/meshcni/istio-cni/internal/applet/arguments"
)

// Service is what a command line asks for.
type Service struct {
	// Config is logged at the start; it must hide what nobody may read.
	Config any
	// Warnings are about the configuration.
	Warnings []string
	Log      *slog.Logger
	// Work ends when it is done or the context is.
	Work func(context.Context) error
}

// Run reads the command line of "istio-cni ROLE", works, and gives the exit code: applet.ExitUsage if the command line
// cannot be used, and applet.ExitError if the work failed. The error of read joins all problems; it is arguments.ErrHelp
// when help was asked for.
func Run(c applet.Call, role string, help func() string, read func() (Service, error)) int {
	s, err := read()
	if errors.Is(err, arguments.ErrHelp) {
		_, _ = io.WriteString(c.Stdout, help())
		return applet.ExitOK
	}
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			_, _ = fmt.Fprintf(c.Stderr, "error: %s\n", strings.TrimSuffix(line, "\n"))
		}
		_, _ = fmt.Fprintf(c.Stderr, "nothing was touched; see istio-cni %s --help\n", role)
		return applet.ExitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	defer stop()

	s.Log.InfoContext(ctx, "starting", slog.String("version", applet.Build().String()), slog.Any("configuration", s.Config))
	for _, warning := range s.Warnings {
		s.Log.WarnContext(ctx, "configuration", slog.String("warning", warning))
	}
	if err := s.Work(ctx); err != nil {
		s.Log.ErrorContext(ctx, "ending", slog.String("error", err.Error()))
		return applet.ExitError
	}
	return applet.ExitOK
}
