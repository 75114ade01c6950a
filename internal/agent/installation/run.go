package installation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Pauses between two reconciliations, unless the watch reports a change. After an error the pause doubles; without an error the
// loop waits for longestRetry.
const (
	firstRetry   = time.Second
	longestRetry = 30 * time.Second
)

// comparing bounds a reconciliation before the parts become not ready: a system call on the node's files can hang
// forever on a frozen disk or on a file server that does not answer.
const comparing = 15 * time.Second

// notCompared is the reason of a part that was ready and whose state is not known any more.
const notCompared = "no comparison with the node's files was completed in time: a disk or a file server may hang"

// debounce bounds a burst of changes: programs write a file in several steps.
const debounce = 10 * time.Millisecond

// ErrGone reports a directory that was removed under its mount. Only a restart of the container mounts the new directory.
var ErrGone = errors.New("the directory was removed or moved on the node while this container holds it: it must be started again")

// Run reconciles at the start, at every change and periodically until the context ends, and then returns nil. It returns ErrGone after
// the removal of a directory. Other errors are logged, shown in the health state and retried.
func (i *Installation) Run(ctx context.Context) error {
	watch := hostfs.NewWatch(i.log)
	defer watch.Close()
	retry := firstRetry
	for {
		i.expect(comparing)
		i.watch(watch)
		wait := longestRetry
		err := i.Reconcile()
		switch conflict := waitOf(err); {
		case conflict > 0:
			wait = conflict
		case err != nil && !waits(err):
			i.log.ErrorContext(ctx, "the installation differs from the desired state", slog.Any("error", err))
			wait, retry = retry, min(2*retry, longestRetry)
		default:
			retry = firstRetry
		}
		i.expect(wait + comparing)
		if gone := i.gone(); gone != "" {
			return fmt.Errorf("%q: %w", gone, ErrGone)
		}
		if !i.sleep(ctx, watch, wait) {
			return nil
		}
	}
}

// watch sets the watched paths. Paths without a kernel watch are polled; hostfs.Watch logs them.
func (i *Installation) watch(watch *hostfs.Watch) {
	watch.Set(i.watched()...)
	i.report.Metrics.Polled(watch.Polling())
}

func waits(err error) bool {
	var waiting *WaitingError
	return errors.As(err, &waiting)
}

// partLoop is the loop's name in the health state. docs/errors.md has the comments.
const (
	// In `/healthz` alone, while it fails: the agent makes no progress, and the liveness probe restarts it.
	partLoop health.PartName = "install-loop"
)

// sleep waits for a reason to reconcile. It returns false when the context ends.
//
// The loop is alive only while it sleeps. A call that hangs on the node's files makes the agent not ready, see
// comparing, but keeps it alive: no restart helps, because the kernel ends no process in such a call and the next process makes
// the same call; a restart would also close the sockets and stop the repair of pods, which need none of these files.
func (i *Installation) sleep(ctx context.Context, watch *hostfs.Watch, longest time.Duration) bool {
	i.report.Health.Beat(partLoop, longest)
	defer i.report.Health.Rest(partLoop)
	timer := time.NewTimer(longest)
	defer timer.Stop()
	changed := watch.Changed()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-i.wake:
			return true
		case <-timer.C:
			return true
		case <-changed:
			changed = nil
			timer.Reset(debounce)
		}
	}
}

// expect makes the parts not ready if no reconciliation ends within this time.
func (i *Installation) expect(within time.Duration) {
	for _, part := range []health.PartName{PartBinaries, PartKubeconfig, PartConf} {
		i.report.Health.Expect(part, within, notCompared)
	}
}

// watched returns all files whose change starts a reconciliation.
func (i *Installation) watched() []hostfs.Path {
	i.mu.Lock()
	defer i.mu.Unlock()
	c, t := i.config, i.target
	kubeconfig, _ := c.KubeconfigFile() // empty without a kubeconfig
	names := slices.Concat([]string{c.Token, c.CA, confDir{i, t.Net}.oldKubeconfig(), kubeconfig}, i.links, t.RuntimeFiles)
	for _, dir := range t.AllBins() {
		for _, name := range append(Links(), cniconf.PluginType) {
			names = append(names, filepath.Join(dir, name))
		}
	}
	if i.dropIn != "" {
		names = append(names, filepath.Join(t.Net, i.dropIn))
	}
	var paths []hostfs.Path
	for _, dir := range t.Nets() {
		paths = append(paths, hostfs.Path{Name: dir, Only: func(name string) bool {
			return cniconf.Candidate(name) || cniconf.Saved(name) || name == c.Want.ConfName || !strings.Contains(name, ".")
		}})
	}
	for _, name := range names {
		if name != "" {
			paths = append(paths, hostfs.Path{Name: name})
		}
	}
	return paths
}

// deleted is the suffix that the kernel gives the source of a removed mount (proc_pid_mountinfo(5)); no name contains a slash.
const deleted = "//deleted"

// gone returns a directory that was removed under its mount or moved since the first call, or an empty string.
func (i *Installation) gone() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, dir := range append([]string{i.target.Net, i.config.RunDir}, i.target.Bins...) {
		from := hostfs.MountedFrom(dir)
		before, known := i.mounts[dir]
		if known && before != from || strings.HasSuffix(from, deleted) {
			return dir
		}
		i.mounts[dir] = from
	}
	return ""
}

// Served reports whether another agent's installation serves the node: the runtime runs the plugin, and program and kubeconfig
// exist. The parts are expected within comparing.
func (i *Installation) Served() bool {
	i.expect(comparing)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.retarget(i.dirs.Find())
	dir, _, err := confDir{i, i.target.Net}.readDir()
	return err == nil && named(dir) && i.usable() == nil
}

// Plan returns the changes that Reconcile would make to program and configuration, a line each, and changes nothing.
func (i *Installation) Plan() ([]string, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.retarget(i.dirs.Find())
	var lines []string
	for _, dir := range i.target.Bins {
		file := filepath.Join(dir, cniconf.PluginType)
		switch same, err := i.copies.Identical(i.config.Source, file, programMode); {
		case err != nil:
			return lines, err
		case !same:
			lines = append(lines, fmt.Sprintf("copy %q to %q", i.config.Source, file))
		}
	}
	dir, _, err := confDir{i, i.target.Net}.readDir()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return lines, withHint(err)
	}
	plan := i.config.Want.Plan(dir)
	for _, s := range plan.Steps {
		lines = append(lines, s.String())
	}
	for _, w := range plan.Warnings {
		lines = append(lines, "warning: "+w)
	}
	if plan.Waiting != "" {
		lines = append(lines, plan.Waiting)
	}
	return lines, plan.Problem
}

// PlanUninstall returns the changes that Uninstall would make, a line each, and changes nothing.
func (i *Installation) PlanUninstall() ([]string, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.target = i.dirs.All()
	var lines []string
	for _, path := range i.target.Nets() {
		dir, _, err := confDir{i, path}.readDir()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, withHint(err)
		}
		for _, s := range i.config.Want.Uninstall(dir).Steps {
			lines = append(lines, s.String())
		}
	}
	if why := i.needed(); why != "" {
		return append(lines, "keeping the plugin binary: "+why), nil
	}
	for _, dir := range i.target.AllBins() {
		lines = append(lines, fmt.Sprintf("remove %q", filepath.Join(dir, cniconf.PluginType)))
	}
	return lines, nil
}

// Until reconciles until the node is in the desired state. It waits after a WaitingError and returns any other error.
func (i *Installation) Until(ctx context.Context) error {
	watch := hostfs.NewWatch(i.log)
	defer watch.Close()
	for {
		i.watch(watch)
		err := i.Reconcile()
		if err == nil || !waits(err) {
			return err
		}
		i.log.Info(err.Error()) //nolint:sloglint // the awaited event is the message
		if !i.sleep(ctx, watch, longestRetry) {
			return fmt.Errorf("interrupted while %w", err)
		}
	}
}
