package installation

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// attempts bounds how often one reconciliation computes the plan, because another program can change the directory meanwhile.
const attempts = 5

// confDir is one configuration directory of the installation.
type confDir struct {
	*Installation

	path string
}

// confs reconciles each configuration directory, the chosen one last. It does not wait in a previous directory without a configuration.
func (i *Installation) confs() (changed bool, err error) {
	var errs []error
	for _, path := range slices.Backward(i.target.Nets()) {
		did, err := confDir{i, path}.reconcile()
		changed = changed || did
		if err != nil && (path == i.target.Net || !waits(err)) {
			errs = append(errs, err)
		}
	}
	return changed, oneOrAll(errs)
}

// reconcile brings the directory into the desired state.
func (c confDir) reconcile() (changed bool, err error) {
	for range attempts {
		var did bool
		did, err = c.reconcileOnce()
		changed = changed || did
		if !errors.Is(err, hostfs.ErrChanged) {
			break
		}
	}
	if err == nil {
		err = c.dropOldKubeconfig()
	}
	return changed, err
}

func (c confDir) reconcileOnce() (bool, error) {
	dir, others, err := c.readDir()
	if errors.Is(err, fs.ErrNotExist) {
		return false, &WaitingError{For: fmt.Sprintf("waiting for the directory %q", c.path)}
	}
	if err != nil {
		return false, withHint(err)
	}
	c.sweepConf(dir)
	plan := c.config.Want.Plan(dir)
	plan.Steps = withReload(plan.Steps, others)
	c.logPlan(plan)
	c.dropIn = ""
	if plan.Mode == cniconf.DropIn {
		c.dropIn = filepath.Dir(plan.File)
	}
	changed, err := c.carryOut(dir, plan, others)
	if err != nil {
		return changed, err
	}
	switch {
	case plan.Problem != nil:
		return changed, plan.Problem
	case plan.Waiting != "":
		return changed, &WaitingError{For: fmt.Sprintf("%s in %s", plan.Waiting, c.path)}
	case len(plan.Steps) > 0 && !c.mayWrite(metrics.Config):
		return false, errors.New("the CNI configuration was changed by another program and is not restored (CNI_ENABLE_REINSTALL=false)")
	}
	return changed, nil
}

// carryOut applies the steps of a plan, unless there is a reason to wait.
func (c confDir) carryOut(dir cniconf.Dir, plan cniconf.Plan, others []string) (changed bool, err error) {
	if len(plan.Steps) == 0 || !c.mayWrite(metrics.Config) {
		return false, nil
	}
	err = c.rewrite(metrics.Config, plan.Primary, otherWriter(dir, plan.Primary, others), func() (err error) {
		if !named(dir) {
			if err = c.usable(); err != nil {
				return err
			}
		}
		changed, err = c.apply(dir, plan.Steps)
		return withHint(err)
	})
	return changed, err
}

// named reports whether the runtime runs the plugin already.
func named(d cniconf.Dir) bool {
	_, n, _ := d.Loaded()
	_, dropIn := d[n.Name+"/"+cniconf.DropInName]
	return dropIn || slices.Contains(n.Types, cniconf.PluginType)
}

// logPlan logs warnings, the wait and the target file of a plan, unless the last logged plan had the same text.
func (c confDir) logPlan(plan cniconf.Plan) {
	text := strings.Join(append(slices.Clone(plan.Warnings), plan.Waiting, plan.File, string(plan.Mode)), "\n")
	if text == c.logged[c.path] {
		return
	}
	c.logged[c.path] = text
	for _, w := range plan.Warnings {
		c.log.Warn("CNI configuration", slog.String("warning", w))
	}
	if plan.Waiting != "" {
		c.log.Info(plan.Waiting, slog.String("directory", c.path)) //nolint:sloglint // the awaited event is the message
	}
	if plan.File != "" {
		c.log.Info("target configuration", slog.String("file", filepath.Join(c.path, plan.File)),
			slog.String("primary", plan.Primary), slog.String("mode", string(plan.Mode)))
	}
}

// apply carries out the steps. It stops at a file whose content differs from the content in the plan.
func (c confDir) apply(dir cniconf.Dir, steps []cniconf.Step) (changed bool, err error) {
	if slices.ContainsFunc(steps, func(s cniconf.Step) bool { return s.Op == cniconf.OpReload }) {
		if err := c.disk.WriteFile(filepath.Join(c.path, triggerName), nil, 0o600); err != nil {
			return false, err
		}
	}
	for _, s := range steps {
		if err := c.unchanged(dir, s); err != nil {
			return changed, err
		}
		if err := c.step(dir, s); err != nil {
			return changed, fmt.Errorf("%s: %w", s, err)
		}
		c.did("changed CNI configuration", slog.String("step", s.String()))
		changed = true
		dir = dir.Apply(s)
	}
	return changed, nil
}

// unchanged reads the files of a step again, so that the step does not overwrite a change that another program made after readDir.
func (c confDir) unchanged(dir cniconf.Dir, s cniconf.Step) error {
	for _, name := range []string{s.Name, s.To} {
		if name == "" || s.Op == cniconf.OpRemoveDir {
			continue
		}
		data, _, err := hostfs.ReadFile(filepath.Join(c.path, name), maxConf)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			data = nil // the file was as unreadable for readDir
		}
		if known, there := dir[name]; there != (err == nil || !errors.Is(err, fs.ErrNotExist)) || !bytes.Equal(known.Data, data) {
			return fmt.Errorf("file %q: %w", name, hostfs.ErrChanged)
		}
	}
	return nil
}

// dropInDirMode lets other programs of the node read the plugins' configuration, like the directory above.
const dropInDirMode = 0o755

func (c confDir) step(dir cniconf.Dir, s cniconf.Step) error {
	file := filepath.Join(c.path, s.Name)
	switch s.Op {
	case cniconf.OpWrite:
		if strings.Contains(s.Name, "/") {
			if err := c.disk.MkdirAll(filepath.Dir(file), dropInDirMode); err != nil {
				return err
			}
		}
		var old []byte
		if known, there := dir[s.Name]; there {
			old = append([]byte{}, known.Data...)
		}
		return c.disk.Replace(file, old, s.Data, fs.FileMode(s.Mode))
	case cniconf.OpRename:
		from := dir[s.Name]
		if _, taken := dir[s.To]; taken {
			return c.disk.Rename(file, filepath.Join(c.path, s.To))
		}
		return c.disk.Move(file, filepath.Join(c.path, s.To), from.Data)
	case cniconf.OpRemove:
		return c.disk.Remove(file)
	case cniconf.OpRemoveDir:
		// Another program can have added a file since the plan; the directory then stays.
		if err := c.disk.Remove(file); err != nil && !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
		return nil
	case cniconf.OpReload:
	}
	return c.disk.Remove(filepath.Join(c.path, triggerName))
}

// triggerName is a file name that no runtime loads. The file is created before a change that runtimes do not watch and removed after
// the change: runtimes watch the directory itself and then reload all of it. If a crash leaves the file, the next run
// removes it.
const triggerName = ".istio-cni-poke"

// withReload appends the reload that a crash prevented.
func withReload(steps []cniconf.Step, others []string) []cniconf.Step {
	if slices.Contains(others, triggerName) {
		steps = append(steps, cniconf.Step{Op: cniconf.OpReload, Why: "a crash came before it"})
	}
	return steps
}

// LoadsDropIns reports whether a runtime loads drop-in files. The argument is the name and version that a node reports
// (status.nodeInfo.containerRuntimeVersion), such as "containerd://2.2.0". containerd does so since 2.1, its first release with
// libcni 1.3.0; other runtimes are Unknown. docs/agent.md has the evidence.
func LoadsDropIns(runtime string) cniconf.Support {
	name, text, _ := strings.Cut(runtime, "://")
	release, err := version.ParseGeneric(text)
	switch {
	case name != "containerd" || err != nil:
		return cniconf.Unknown
	case release.AtLeast(version.MajorMinor(2, 1)):
		return cniconf.Loaded
	}
	return cniconf.NotLoaded
}

// readDir reads the files of the configuration directory that a plan needs, and returns the names of all other files. An
// unreadable file is treated as empty because a runtime skips it, too.
func (c confDir) readDir() (d cniconf.Dir, others []string, err error) {
	entries, err := os.ReadDir(c.path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the CNI configuration: %w", err)
	}
	d, c.links = cniconf.Dir{}, nil
	for _, e := range entries {
		switch name := e.Name(); {
		case c.isDir(name):
			c.readDropIns(d, name)
		case cniconf.Candidate(name) || cniconf.Saved(name) || name == c.config.Want.ConfName:
			if err = c.readInto(d, name); err != nil {
				return d, others, err
			}
		default:
			others = append(others, name)
		}
	}
	return d, others, nil
}

// isDir reports whether an entry is a directory, or a symbolic link to a directory, which runtimes follow.
func (c confDir) isDir(name string) bool {
	dir := filepath.Join(c.path, name)
	if followed, err := hostpath.Follow(dir); err == nil {
		dir = followed
	}
	info, err := os.Stat(dir)
	return err == nil && info.IsDir()
}

func (c confDir) readInto(d cniconf.Dir, name string) error {
	file := filepath.Join(c.path, name)
	data, mode, err := hostfs.ReadFile(file, maxConf)
	target, notLink := os.Readlink(file)
	unseen := ""
	switch {
	case errors.Is(err, fs.ErrNotExist) && notLink != nil:
		return nil //nolint:nilerr // removed meanwhile
	case errors.Is(err, fs.ErrNotExist):
		unseen = fmt.Sprintf("it is a symbolic link to %q, which does not exist or lies in a part of the node that is not mounted here", target)
	case errors.Is(err, hostfs.ErrTooLarge):
		unseen = err.Error()
	case errors.Is(err, fs.ErrPermission):
		return err
	case err != nil:
		c.log.Debug("a file in the CNI configuration cannot be read", slog.String("file", name), slog.Any("error", err))
	}
	if notLink == nil {
		c.links = append(c.links, file)
	}
	d[name] = cniconf.File{Data: data, Mode: uint32(mode.Perm()), Link: notLink == nil, Unseen: unseen}
	return nil
}

// readDropIns reads the drop-in files below a directory. It treats a directory that cannot be listed as empty.
func (c confDir) readDropIns(d cniconf.Dir, network string) {
	names, _ := hostfs.List(filepath.Join(c.path, network), func(name string) bool { return filepath.Ext(name) == ".conf" })
	for _, name := range names {
		_ = c.readInto(d, network+"/"+name) // a file without read permission is treated as absent
	}
}

// sweep removes temporary files of the named files that a crash left. Only the process that holds the lock may
// call sweep.
func (i *Installation) sweep(dir string, names ...string) { i.logSweep(i.disk.Sweep(dir, names...)) }

func (i *Installation) logSweep(removed []string, err error) {
	if len(removed) > 0 || err != nil {
		i.log.Info("removed temporary files that a crash left", slog.Any("files", removed), slog.Any("error", err))
	}
}

// sweepConf sweeps the configuration directory, the directories of drop-in files, and the directories of the targets of links.
// In the first two no other program uses the names of this program's temporary files, so sweepConf removes all of these.
func (c confDir) sweepConf(d cniconf.Dir) {
	c.logSweep(c.disk.SweepOwn(c.path, temporary(d, c.config.Want)...))
	entries, _ := os.ReadDir(c.path)
	for _, e := range entries {
		if c.isDir(e.Name()) {
			c.logSweep(c.disk.SweepOwn(filepath.Join(c.path, e.Name()), cniconf.DropInName))
		}
	}
	for _, link := range c.links {
		if target, err := hostpath.Follow(link); err == nil {
			c.sweep(filepath.Dir(target), filepath.Base(target))
		}
	}
}

// temporary returns the names of files that a crash can have left half written: the present files, and their names after a step.
func temporary(d cniconf.Dir, want cniconf.Want) []string {
	out := []string{want.ConfName, want.OwnedName, cniconf.OwnedName, cniconf.StandaloneName, triggerName}
	for name := range d {
		out = append(append(out, name, cniconf.Original(name)), cniconf.Becomes(name)...)
	}
	return slices.DeleteFunc(out, func(name string) bool { return name == "" })
}
