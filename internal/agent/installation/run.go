package installation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Pauses between two comparisons, unless the watch reports a change: after an error they double. Without an error the
// watch is sooner than the longest one.
const (
	firstRetry   = time.Second
	longestRetry = 30 * time.Second
)

// comparing is how long a comparison may take before the parts count as not ready: the node's files may hang, as those of
// a frozen disk or a server that is away do, for any time and in any call.
const comparing = 15 * time.Second

// notCompared is why a part is not ready that was, and of which nothing is known any more.
const notCompared = "no comparison with the node's files was completed in time: a disk or a file server may hang"

// debounce is how long a burst of changes may last: programs write a file in several steps.
const debounce = 10 * time.Millisecond

// ErrGone is a directory that was removed under its mount. Only a new start of the container helps.
var ErrGone = errors.New("the directory was removed or moved on the node while this container holds it: it must be started again")

// Run compares at the start, at every change and now and then, until the context ends. Its error is nil then; it is
// ErrGone otherwise. What else goes wrong is logged, shown in the health state and tried again.
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
			i.log.ErrorContext(ctx, "the installation differs from the desired state", errAttr(err))
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

// watch sets what is watched. What the kernel does not watch is polled, and logged by the watch.
func (i *Installation) watch(watch *hostfs.Watch) {
	watch.Set(i.watched()...)
	i.report.Metrics.Polled(watch.Polling())
}

func waits(err error) bool {
	var waiting *WaitingError
	return errors.As(err, &waiting)
}

// partLoop is the loop's name in the health state.
const partLoop = "install-loop"

// sleep waits for a reason to compare again. It reports false when the context ends.
//
// The loop counts as alive only while it sleeps. A call that hangs on the node's files makes the agent not ready, see
// comparing, but not dead: no restart helps against it, as the kernel ends no process in such a call and the next one
// would make the same call, and it would end the sockets and the repair of pods, which need none of these files.
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

// expect makes the parts not ready if no comparison ends within this time.
func (i *Installation) expect(within time.Duration) {
	for _, p := range i.parts() {
		i.report.Health.Expect(p.name, within, notCompared)
	}
}

// watched are all files whose change is a reason to compare.
func (i *Installation) watched() []hostfs.Path {
	i.mu.Lock()
	defer i.mu.Unlock()
	c := i.config
	kubeconfig, _ := c.kubeconfigFile() // empty if there is none
	names := append([]string{c.Token, c.CA, c.OldKubeconfig, kubeconfig}, i.links...)
	for _, dir := range c.BinDirs {
		for _, name := range append(Links(), cniconf.PluginType) {
			names = append(names, filepath.Join(dir, name))
		}
	}
	if i.dropIn != "" {
		names = append(names, filepath.Join(c.NetDir, i.dropIn))
	}
	paths := []hostfs.Path{{Name: c.NetDir, Only: func(name string) bool {
		return cniconf.Candidate(name) || cniconf.Saved(name) || name == c.Want.ConfName || !strings.Contains(name, ".")
	}}}
	for _, name := range names {
		if name != "" {
			paths = append(paths, hostfs.Path{Name: name})
		}
	}
	return paths
}

// gone returns a directory that was removed or moved away under its mount.
func (i *Installation) gone() string {
	first := i.mounts == nil
	if first {
		i.mounts = map[string]string{}
	}
	for _, dir := range append([]string{i.config.NetDir, i.config.RunDir}, i.config.BinDirs...) {
		from := hostfs.MountedFrom(dir)
		if first {
			i.mounts[dir] = from
		}
		if hostfs.Gone(dir) || i.mounts[dir] != from {
			return dir
		}
	}
	return ""
}

// Served reports whether the node works with another agent's installation: the runtime runs the plugin, and what it needs
// is there. Until it has, the parts are due.
func (i *Installation) Served() bool {
	i.expect(comparing)
	i.mu.Lock()
	defer i.mu.Unlock()
	dir, _, err := i.readDir()
	return err == nil && named(dir) && i.usable() == nil
}

// Plan says what Reconcile would do to the configuration, a line each, and does nothing.
func (i *Installation) Plan() ([]string, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var lines []string
	for _, dir := range i.config.BinDirs {
		file := filepath.Join(dir, cniconf.PluginType)
		switch same, err := i.disk.Identical(i.config.Source, file, programMode); {
		case err != nil:
			return lines, err
		case !same:
			lines = append(lines, fmt.Sprintf("copy %q to %q", i.config.Source, file))
		}
	}
	dir, _, err := i.readDir()
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

// PlanUninstall says what Uninstall would do to the configuration.
func (i *Installation) PlanUninstall() ([]string, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	dir, _, err := i.readDir()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, withHint(err)
	}
	var lines []string
	for _, s := range i.config.Want.Uninstall(dir).Steps {
		lines = append(lines, s.String())
	}
	if why := i.needed(); why != "" {
		return append(lines, "the program stays: "+why), nil
	}
	for _, dir := range i.config.BinDirs {
		lines = append(lines, fmt.Sprintf("remove %q", filepath.Join(dir, cniconf.PluginType)))
	}
	return lines, nil
}

// Until compares until the node is as wanted. It waits for what comes by itself; everything else is its error.
func (i *Installation) Until(ctx context.Context) error {
	watch := hostfs.NewWatch(i.log)
	defer watch.Close()
	for {
		i.watch(watch)
		err := i.Reconcile()
		if err == nil || !waits(err) {
			return err
		}
		i.log.Info(err.Error()) //nolint:sloglint // what is waited for is the message
		if !i.sleep(ctx, watch, longestRetry) {
			return fmt.Errorf("interrupted while %w", err)
		}
	}
}
