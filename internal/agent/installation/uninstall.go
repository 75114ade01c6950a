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
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/cnicache"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Uninstall removes the stanza first, so that no new pod meets it, then the kubeconfig, and the program last, and only if no
// sandbox needs it for DEL: it logs why the program stays. It continues after an error and joins all errors. After it,
// Reconcile only returns an error.
func (i *Installation) Uninstall(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.uninstalled = true
	i.gather()
	if err := i.eachNet(i.removeConf); err != nil {
		// The next pod would meet the stanza and fail without the kubeconfig and the program.
		i.keep("the configuration still names it")
		return err
	}
	err := i.eachNet(func() error {
		if file := i.stillNamed(); file != "" {
			i.keep("file " + file + " still names it")
			return fmt.Errorf("file %q still names the plugin, or cannot be read: fix it and uninstall again", file)
		}
		return nil
	})
	errs := []error{i.remove(i.config.OldKubeconfig), err}
	if err != nil {
		return errors.Join(errs...)
	}
	if file, unknown := i.config.kubeconfigFile(); unknown == nil {
		errs = append(errs, i.remove(file))
	}
	errs = append(errs, i.remove(filepath.Join(i.config.RunDir, cniconf.KubeconfigName)), i.removeProgram(ctx))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return i.remove(filepath.Join(i.config.RunDir, DirsName))
}

// removeConf removes the stanza from the configuration. It retries after an error, as
// another program may have written the same files, and a disk that cannot sync may have done all other steps: without steps,
// a retry syncs the directory, so that the stanza does not reappear after a power loss.
func (i *Installation) removeConf() (err error) {
	for range attempts {
		dir, others, read := i.readDir()
		if errors.Is(read, fs.ErrNotExist) {
			return nil
		}
		if read != nil {
			return withHint(read)
		}
		i.sweepConf(dir)
		steps := withReload(i.config.Want.Uninstall(dir).Steps, others)
		switch {
		case len(steps) > 0:
			_, err = i.apply(dir, steps)
		case err != nil:
			err = i.disk.SyncDir(i.config.NetDir)
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
func (i *Installation) stillNamed() string {
	files, err := filepath.Glob(filepath.Join(i.config.NetDir, "*"))
	more, errMore := filepath.Glob(filepath.Join(i.config.NetDir, "*", "*.conf"))
	if err != nil || errMore != nil {
		return i.config.NetDir
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
	i.log.Info("removed", slog.String("file", file))
	i.remember("removed " + file)
	return nil
}

// removeProgram removes the copies and their links unless a sandbox needs them.
func (i *Installation) removeProgram(ctx context.Context) error {
	select {
	case <-ctx.Done():
		i.keep("the agent is shutting down")
		return nil
	case <-time.NewTimer(i.config.GracePeriod).C: // pods may be in creation whose runtime has read the configuration already
	}
	if why := i.needed(); why != "" {
		i.keep(why)
		return nil
	}
	return i.removeCopies()
}

func (i *Installation) removeCopies() error {
	var errs []error
	for _, dir := range i.config.BinDirs {
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

// made reports whether this program wrote the copy; a copy in Skip belongs to another installer.
func (i *Installation) made(file string) bool {
	if slices.Contains(i.config.Skip, cniconf.PluginType) {
		return false
	}
	same, err := i.disk.Identical(i.config.Source, file, programMode)
	return i.config.Update || err == nil && same
}

// keep logs the copies of the program that stay.
func (i *Installation) keep(why string) {
	var files []string
	for _, dir := range i.config.BinDirs {
		if file := filepath.Join(dir, cniconf.PluginType); exists(file) {
			files = append(files, file)
		}
	}
	if len(files) > 0 {
		i.log.Warn("the program stays for the removal of pods", slog.Any("files", files), slog.String("why", why))
	}
}

// needed returns the reason to keep the program: a sandbox that needs it, or a cache that cannot be read; empty for none.
func (i *Installation) needed() string {
	// Multus keeps its own cache for the plugins that it runs.
	for _, cache := range []string{i.config.CacheDir, filepath.Join(filepath.Dir(i.config.CacheDir), "multus", "results")} {
		dir, seen := i.config.onHost(cache)
		if !seen && cache == i.config.CacheDir {
			return fmt.Sprintf("libcni's cache %q of the host cannot be seen from here", cache)
		}
		if _, err := cnicache.Walk(dir, i.config.neededBy); seen && err != nil && !errors.Is(err, fs.ErrNotExist) {
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
	case sandbox.Uses(cniconf.PluginType) && c.alive(sandbox):
		return fmt.Errorf("sandbox %q was made with it and is still there", entry)
	}
	return nil
}
