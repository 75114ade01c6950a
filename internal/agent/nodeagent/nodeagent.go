// Package nodeagent runs the parts of the node agent: installation, self-test, log relay, pod lookups of plugins, race repair,
// live configuration, health and metrics.
//
// It promises that no step of the installation waits for the API server, that one agent at a time serves a node, that invalid
// live configuration changes nothing, and that the agent uninstalls only for a reason that package teardown returns.
//
// It never reads arguments or the environment, and never decides about a pod.
//
// Start at Run; agent.go has the life of the agent, live.go its live configuration, loglevel.go the log levels.
package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/logbuffer"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Options are the inputs and dependencies of the agent.
type Options struct {
	Config Config
	Log    *slog.Logger
	// Level is the level of Log.
	Level *slog.LevelVar
	// Recent has the last records of Log for bug reports, nil for none.
	Recent *logbuffer.Buffer
	// Stdout receives the lines of a dry run.
	Stdout io.Writer
	// Version is the version of the program, ToolPath the search path of iptables in the form of $PATH.
	Version, ToolPath string
	// Reload computes the configuration with live values; the first layer that has a key counts. Frozen are the changed keys
	// that require a restart. On an error the last good configuration stays in force.
	Reload func(layers ...settings.Layer) (c Config, frozen []string, err error)
}

// Run performs the configured action. It ends with the action or, for Stay, with ctx.
func Run(ctx context.Context, o Options) error {
	switch {
	case o.Config.DryRun:
		return o.dryRun()
	case o.Config.Action == Once:
		return o.once(ctx)
	case o.Config.Action == Uninstall:
		return o.uninstall(ctx)
	}
	return o.stay(ctx)
}

func (o Options) installation(report installation.Report) *installation.Installation {
	return installation.New(o.Log, hostfs.Disk{}, o.Config.Config, report, nil)
}

// dryRun prints the changes that the action would make.
func (o Options) dryRun() error {
	i := o.installation(installation.Report{})
	plan := i.Plan
	if o.Config.Action == Uninstall {
		plan = i.PlanUninstall
	}
	lines, err := plan()
	if len(lines) == 0 && err == nil {
		lines = []string{"nothing to do"}
	}
	_, _ = fmt.Fprintln(o.Stdout, strings.Join(lines, "\n"))
	return err
}

// lock acquires the node's lock, so that no other agent works on the node at the same time.
func (c Config) lock() (*hostfs.FileLock, error) {
	err := (hostfs.Disk{}).MkdirAll(c.RunDir, c.RunDirMode)
	// The kubelet creates the directory of a volume world-readable, but this one is to hold sockets and a token.
	if info, statErr := os.Stat(c.RunDir); err == nil && statErr == nil && info.Mode().Perm() != c.RunDirMode.Perm() {
		if err = os.Chmod(c.RunDir, c.RunDirMode); err != nil {
			err = fmt.Errorf("setting the mode of the run directory: %w", err)
		}
	}
	if hint := hostfs.Hint(err); hint != "" {
		err = fmt.Errorf("%w (%s)", err, hint)
	}
	if err != nil {
		return nil, err
	}
	return hostfs.Lock(c.lockFile())
}

// removeRest removes files of the run directory that are not the installation's: the self-test's verdict, the decisions, a
// socket that a killed agent left, and the lock.
func (c Config) removeRest() error {
	var errs []error
	for _, file := range []string{c.verdictFile(), c.decisionsFile(), c.podSocket(), c.lockFile()} {
		errs = append(errs, (hostfs.Disk{}).Remove(file))
	}
	return errors.Join(errs...)
}

// once installs and ends. Like an init container it waits for missing files of other programs.
func (o Options) once(ctx context.Context) error {
	if !o.Config.Install {
		o.Log.InfoContext(ctx, "nothing is installed (CNI_ENABLE_INSTALL=false)")
		return nil
	}
	held, err := o.Config.lock()
	if err != nil {
		return fmt.Errorf("another node agent is at work here: %w", err)
	}
	defer func() { _ = held.Close() }()
	if err := o.installation(installation.Report{}).Until(ctx); err != nil {
		return err
	}
	o.Log.InfoContext(ctx, "installed")
	return nil
}

// uninstall removes the installation on the user's command.
func (o Options) uninstall(ctx context.Context) error {
	held, err := o.Config.lock()
	if busy := (*hostfs.HeldError)(nil); errors.As(err, &busy) {
		return fmt.Errorf("a node agent is at work here and would install again: %w", err)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EROFS) {
		return err
	}
	err = o.installation(installation.Report{}).Uninstall(ctx)
	if held != nil {
		err = errors.Join(err, held.Close(), o.Config.removeRest())
	}
	if err == nil {
		o.Log.InfoContext(ctx, "uninstalled")
	}
	return err
}
