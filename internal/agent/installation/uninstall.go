package installation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Uninstall removes the stanza first, so that no new pod meets it, then the kubeconfig, and the program last. The program stays if
// a sandbox needs it for DEL, and the log has the reason. Uninstall continues after an error and joins all errors. After it,
// Reconcile only returns an error.
func (i *Installation) Uninstall(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.uninstalled = true
	i.target = i.dirs.All()
	for _, path := range i.target.Nets() {
		if err := (confDir{i, path}).uninstall(); err != nil {
			// The next pod would meet the stanza and fail without the kubeconfig and the program.
			i.keep("the configuration still names it")
			return err
		}
	}
	errs := []error{i.remove(confDir{i, i.target.Net}.oldKubeconfig())}
	for _, path := range i.target.Nets() {
		if file := (confDir{i, path}).stillNamed(); file != "" {
			i.keep("file " + file + " still names it")
			return errors.Join(append(errs, fmt.Errorf("file %q still names the plugin, or cannot be read: fix it and uninstall again", file))...)
		}
	}
	if file, unknown := i.config.KubeconfigFile(); unknown == nil {
		errs = append(errs, i.remove(file))
	}
	errs = append(errs, i.remove(filepath.Join(i.config.RunDir, cniconf.KubeconfigName)), i.removeProgram(ctx))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return i.remove(filepath.Join(i.config.RunDir, runtimedirs.RecordName))
}

// uninstall removes the stanza from the configuration. It retries after an error: another program can have written the same
// files, or only a sync has failed after all other steps. A retry without steps syncs the directory, so that the
// stanza does not reappear after a power loss.
func (c confDir) uninstall() (err error) {
	for range attempts {
		dir, others, read := c.readDir()
		if errors.Is(read, fs.ErrNotExist) {
			return nil
		}
		if read != nil {
			return withHint(read)
		}
		c.sweepConf(dir)
		steps := withReload(c.config.Want.Uninstall(dir).Steps, others)
		switch {
		case len(steps) > 0:
			_, err = c.apply(dir, steps)
		case err != nil:
			err = c.disk.SyncDir(c.path)
		default:
			return nil
		}
	}
	if err != nil {
		err = withHint(fmt.Errorf("removing the stanza from the CNI configuration: %w", err))
	}
	return err
}

// stillNamed returns a file of the configuration that names the plugin in a form that cannot be removed: malformed JSON, or a
// copy within another configuration. Without the program, the runtime would fail on such a file.
func (c confDir) stillNamed() string {
	files, err := filepath.Glob(filepath.Join(c.path, "*"))
	more, errMore := filepath.Glob(filepath.Join(c.path, "*", "*.conf"))
	if err != nil || errMore != nil {
		return c.path
	}
	for _, file := range append(files, more...) {
		data, _, err := hostfs.ReadFile(file, maxConf)
		unreadable := err != nil && !errors.Is(err, hostfs.ErrNotRegular) && !errors.Is(err, fs.ErrNotExist) && cniconf.Candidate(file)
		if unreadable || bytes.Contains(data, []byte(`"`+cniconf.PluginType+`"`)) {
			return file
		}
	}
	return ""
}

func (i *Installation) remove(file string) error {
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := i.disk.Remove(file); err != nil {
		return withHint(err)
	}
	i.did("removed", slog.String("file", file))
	return nil
}

// clean uninstalls from previous directories once the runtime has restarted with the new configuration.
func (i *Installation) clean() error {
	if len(i.target.Obsolete) == 0 {
		return nil
	}
	for _, d := range i.target.Obsolete {
		if err := i.cleanDirs(d); err != nil {
			return err
		}
	}
	return withHint(i.dirs.Cleaned())
}

// cleanDirs uninstalls from previous directories. It keeps programs in mounted directories, where other programs than the runtime
// may look for them.
func (i *Installation) cleanDirs(d runtimedirs.Dirs) error {
	before := i.changes
	if previous := (confDir{i, d.Net}); d.Net != i.target.Net {
		if err := previous.uninstall(); err != nil {
			return err
		}
		if file := previous.stillNamed(); file != "" {
			return fmt.Errorf("file %q of an earlier directory still names the plugin, or cannot be read", file)
		}
		if err := previous.dropOldKubeconfig(); err != nil {
			return err
		}
	}
	bins := slices.DeleteFunc(slices.Clone(d.Bins), func(dir string) bool {
		return slices.Contains(i.target.Bins, dir) || slices.Contains(i.config.BinDirs, dir)
	})
	if err := i.removeCopies(bins); err != nil {
		return err
	}
	if i.changes > before {
		i.log.Info("removed the plugin from directories in which the runtime does not look any more", slog.String("configuration", d.Net),
			slog.Any("programs", bins))
	}
	return nil
}

// removeProgram removes the copies and their links unless a sandbox needs them.
func (i *Installation) removeProgram(ctx context.Context) error {
	select {
	case <-ctx.Done():
		i.keep("the agent is shutting down")
		return nil
	case <-time.NewTimer(i.config.GracePeriod).C: // for a pod in creation, the runtime has read the configuration already
	}
	if why := i.needed(); why != "" {
		i.keep(why)
		return nil
	}
	return i.removeCopies(i.target.AllBins())
}

func (i *Installation) removeCopies(bins []string) error {
	var errs []error
	for _, dir := range bins {
		for _, name := range Links() {
			if slices.Contains(i.config.Skip, name) {
				continue
			}
			if target, err := os.Readlink(filepath.Join(dir, name)); err == nil && target == cniconf.PluginType {
				errs = append(errs, i.remove(filepath.Join(dir, name)))
			}
		}
		if file := filepath.Join(dir, cniconf.PluginType); i.made(file) {
			errs = append(errs, i.remove(file))
		}
	}
	return errors.Join(errs...)
}

// made reports whether this program wrote the copy; another installer owns a copy in Skip.
func (i *Installation) made(file string) bool {
	if slices.Contains(i.config.Skip, cniconf.PluginType) {
		return false
	}
	same, err := i.copies.Identical(i.config.Source, file, programMode)
	return i.config.Update || err == nil && same
}

// keep logs the remaining copies of the program.
func (i *Installation) keep(why string) {
	var files []string
	for _, dir := range i.target.AllBins() {
		if file := filepath.Join(dir, cniconf.PluginType); exists(file) {
			files = append(files, file)
		}
	}
	if len(files) > 0 {
		i.log.Warn("keeping the plugin binary", slog.Any("files", files), slog.String("why", why))
	}
}

// needed returns the reason to keep the program: a sandbox that needs it, or a cache that cannot be read. Empty means no reason.
func (i *Installation) needed() string {
	// Multus keeps its own cache for the plugins that it runs.
	for _, cache := range []string{i.config.CacheDir, filepath.Join(filepath.Dir(i.config.CacheDir), "multus", "results")} {
		dir, seen := i.config.host().Find(cache)
		if !seen && cache == i.config.CacheDir {
			return fmt.Sprintf("libcni's cache %q of the host cannot be seen from here", cache)
		}
		if _, err := cnicache.Walk(dir, nil, i.config.neededBy); seen && err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err.Error()
		}
	}
	return ""
}

// neededBy returns an error for an entry of libcni's cache that needs the program.
func (c Config) neededBy(entry string, data []byte, err error) error {
	if err != nil {
		return err
	}
	sandbox, ok := cnicache.Parse(data)
	switch {
	case !ok:
		return fmt.Errorf("entry %q of libcni's cache cannot be read", entry)
	case sandbox.Uses(cniconf.PluginType) && c.alive(sandbox.NetNS):
		return fmt.Errorf("sandbox %q was made with it and is still there", entry)
	}
	return nil
}

// alive reports whether the sandbox with this network namespace can still exist: the runtime removes the file with the sandbox.
func (c Config) alive(netns string) bool {
	if netns == "" || strings.HasPrefix(netns, "/proc/") {
		return true
	}
	file, seen := c.host().Find(netns)
	if !seen {
		return true
	}
	_, err := os.Stat(file)
	return !os.IsNotExist(err)
}
