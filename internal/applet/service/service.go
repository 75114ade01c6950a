// Package service runs a role that works until a signal ends it. It handles errors of the command line, the first and the last line
// of the log, signals, and the exit code.
//
// It promises that no work begins before the whole command line is valid. It never chooses the work.
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
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Service is the result of a valid command line.
type Service struct {
	// Config is logged at the start.
	Config []settings.Line
	// Warnings are about the configuration.
	Warnings []string
	Log      *slog.Logger
	// Work returns when it is done or when the context ends.
	Work func(context.Context) error
}

// Settings parses the settings of a role that works on its own, without a log. If done, the role ends with the code: Settings
// has printed its help, behind head with the exit codes that all roles share and then its own, or all problems of its command line.
func Settings(c applet.Call, role string, rows []settings.Setting, head string, codes ...any) (code int, done bool) {
	in, err := settings.Parse(rows, c.Args, c.Getenv)
	if err != nil {
		_, _ = fmt.Fprintf(c.Stdout, head, append([]any{applet.ExitOK, applet.ExitError, applet.ExitUsage}, codes...)...)
		settings.Help(c.Stdout, settings.Group{Title: "Flags", Rows: rows})
		return applet.ExitOK, true
	}
	if _, err := in.Read(rows); err != nil {
		report(c.Stderr, role, "", err)
		return applet.ExitUsage, true
	}
	return applet.ExitOK, false
}

// report prints each problem of a command line, and its consequence.
func report(w io.Writer, role, consequence string, problems error) {
	for line := range strings.Lines(problems.Error()) {
		_, _ = fmt.Fprintf(w, "error: %s\n", strings.TrimSuffix(line, "\n"))
	}
	_, _ = fmt.Fprintf(w, "%ssee istio-cni %s --help\n", consequence, role)
}

// Run reads the command line of "istio-cni ROLE", does the work, and returns the exit code: applet.ExitUsage for an invalid command
// line, and applet.ExitError for failed work. The error of read joins all problems, or is settings.ErrHelp for a request for help.
// The help is head and the groups; head has verbs for the exit codes of success, failed work and an invalid command line, in order.
func Run(c applet.Call, role, head string, groups []settings.Group, read func() (Service, error)) int {
	s, err := read()
	if errors.Is(err, settings.ErrHelp) {
		_, _ = fmt.Fprintf(c.Stdout, head, applet.ExitOK, applet.ExitError, applet.ExitUsage)
		settings.Help(c.Stdout, groups...)
		return applet.ExitOK
	}
	if err != nil {
		report(c.Stderr, role, "nothing was touched; ", err)
		return applet.ExitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	defer stop()

	configuration := make([]any, 0, len(s.Config))
	for _, l := range s.Config {
		configuration = append(configuration, slog.String(strings.TrimLeft(l.Name, "-"), l.Value+" ("+l.Origin+")"))
	}
	s.Log.InfoContext(ctx, "starting", slog.String("version", applet.Build()), slog.Group("configuration", configuration...))
	for _, warning := range s.Warnings {
		s.Log.WarnContext(ctx, "configuration", slog.String("warning", warning))
	}
	if err := s.Work(ctx); err != nil {
		s.Log.ErrorContext(ctx, "ending", slog.String("error", err.Error()))
		return applet.ExitError
	}
	return applet.ExitOK
}
