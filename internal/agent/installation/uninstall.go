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

// Left has the files that an uninstallation leaves on the node on purpose.
type Left struct {
	// Program are the copies that stay, Why is the reason.
	Program []string
	Why     string
}

// Uninstall removes the stanza first, so that no new pod meets it, then the kubeconfig, and the program last, and only if no
// sandbox needs it for DEL. It continues after an error and joins all errors. After it, Reconcile only returns an error.
func (i *Installation) Uninstall(ctx context.Context) (Left, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.uninstalled = true
	gone, err := i.removeConf()
	errs := []error{err}
	if i.config.OldKubeconfig != "" && gone {
		errs = append(errs, i.remove(i.config.OldKubeconfig))
	}
	if !gone {
		// The next pod would meet the stanza and fail without the kubeconfig and the program.
		return i.keep("the configuration still names it"), errors.Join(errs...)
	}
	if file := i.stillNamed(); file != "" {
		errs = append(errs, fmt.Errorf("file %q still names the plugin, or cannot be read: fix it and uninstall again", file))
		return i.keep("file " + file + " still names it"), errors.Join(errs...)
	}
	if file, unknown := i.config.kubeconfigFile(); unknown == nil {
		errs = append(errs, i.remove(file))
	}
	errs = append(errs, i.remove(filepath.Join(i.config.RunDir, cniconf.KubeconfigName)))
	left, err := i.removeProgram(ctx)
	return left, errors.Join(append(errs, err)...)
}

// removeConf removes the stanza from the configuration, and reports whether the stanza is gone. It retries after an error, as
// another program may have written the same files, and a disk that cannot sync may have done all other steps.
func (i *Installation) removeConf() (gone bool, err error) {
	for range attempts {
		dir, others, read := i.readDir()
		if errors.Is(read, fs.ErrNotExist) {
			return true, nil
		}
		if read != nil {
			return false, withHint(read)
		}
		i.sweepConf(dir)
		steps := withReload(i.config.Want.Uninstall(dir).Steps, others)
		if len(steps) == 0 && err == nil {
			return true, nil
		}
		err = i.removeBy(dir, steps)
	}
	return err == nil, err
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

// removeBy carries out the steps of a removal. Without steps it syncs the directory, so that the stanza does not reappear after
// a power loss.
func (i *Installation) removeBy(dir cniconf.Dir, steps []cniconf.Step) error {
	if len(steps) == 0 {
		return i.disk.SyncDir(i.config.NetDir)
	}
	if _, err := i.apply(dir, steps); err != nil {
		return withHint(fmt.Errorf("removing the stanza from the CNI configuration: %w", err))
	}
	return nil
}

func (i *Installation) remove(file string) error {
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := i.disk.Remove(file); err != nil {
		return withHint(err)
	}
	i.log.Info("removed", slog.String("file", file))
	return nil
}

// removeProgram removes the copies and their links unless a sandbox needs them.
func (i *Installation) removeProgram(ctx context.Context) (Left, error) {
	if !i.waitGracePeriod(ctx) {
		return i.keep("the agent is shutting down"), nil
	}
	if why := i.needed(); why != "" {
		return i.keep(why), nil
	}
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
	return Left{}, errors.Join(errs...)
}

// made reports whether this program wrote the copy; a copy in Skip belongs to another installer.
func (i *Installation) made(file string) bool {
	if slices.Contains(i.config.Skip, cniconf.PluginType) {
		return false
	}
	same, err := i.disk.Identical(i.config.Source, file, programMode)
	return i.config.Update || err == nil && same
}

func (i *Installation) keep(why string) Left {
	var left Left
	for _, dir := range i.config.BinDirs {
		if file := filepath.Join(dir, cniconf.PluginType); exists(file) {
			left.Program = append(left.Program, file)
		}
	}
	if len(left.Program) > 0 {
		left.Why = why
		i.log.Warn("the program stays for the removal of pods",
			slog.Any("files", left.Program), slog.String("why", why))
	}
	return left
}

// waitGracePeriod waits for pods that are being created: their runtime may have read the configuration already.
func (i *Installation) waitGracePeriod(ctx context.Context) bool {
	timer := time.NewTimer(i.config.GracePeriod)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
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
		if why := i.neededBy(dir); seen && why != "" {
			return why
		}
	}
	return ""
}

// neededBy is needed for one cache.
func (i *Installation) neededBy(dir string) string {
	_, err := cnicache.Walk(dir, func(name string, data []byte, err error) error {
		if err != nil {
			return err
		}
		sandbox, ok := cnicache.Parse(data)
		if !ok {
			return fmt.Errorf("entry %q of libcni's cache cannot be read", name)
		}
		if sandbox.Uses(cniconf.PluginType) && i.config.alive(sandbox) {
			return fmt.Errorf("sandbox %q was made with it and is still there", name)
		}
		return nil
	})
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return err.Error()
}
