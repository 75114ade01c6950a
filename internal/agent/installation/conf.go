package installation

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// attempts bounds how often one reconciliation computes the plan, because another program may change the directory meanwhile.
const attempts = 5

// confs reconciles each configuration directory, the present one last. That one of before has no configuration is nothing to wait for.
func (i *Installation) confs() (changed bool, err error) {
	now, nets := i.config.NetDir, i.nets()
	defer func() { i.config.NetDir = now }()
	slices.Reverse(nets)
	var errs []error
	for _, net := range nets {
		i.config.NetDir = net
		did, err := i.conf()
		changed = changed || did
		if err != nil && (net == now || !waits(err)) {
			errs = append(errs, err)
		}
	}
	return changed, oneOrAll(errs)
}

// conf reconciles the configuration directory with the desired state.
func (i *Installation) conf() (changed bool, err error) {
	for range attempts {
		var did bool
		did, err = i.confOnce()
		changed = changed || did
		if !errors.Is(err, hostfs.ErrChanged) {
			break
		}
	}
	if err == nil {
		err = i.dropOldKubeconfig()
	}
	return changed, err
}

func (i *Installation) confOnce() (bool, error) {
	dir, others, err := i.readDir()
	if errors.Is(err, fs.ErrNotExist) {
		return false, &WaitingError{For: fmt.Sprintf("waiting for the directory %q", i.config.NetDir)}
	}
	if err != nil {
		return false, withHint(err)
	}
	i.sweepConf(dir)
	plan := i.config.Want.Plan(dir)
	plan.Steps = withReload(plan.Steps, others)
	i.logPlan(plan)
	i.dropIn = ""
	if plan.Mode == cniconf.DropIn {
		i.dropIn = filepath.Dir(plan.File)
	}
	changed, err := i.carryOut(dir, plan, others)
	if err != nil {
		return changed, err
	}
	switch {
	case plan.Problem != nil:
		return changed, plan.Problem
	case plan.Waiting != "":
		return changed, &WaitingError{For: fmt.Sprintf("%s in %s", plan.Waiting, i.config.NetDir)}
	case len(plan.Steps) > 0 && !i.mayWrite(metrics.Config):
		return false, errors.New("the CNI configuration was changed by another program and is not restored (CNI_ENABLE_REINSTALL=false)")
	}
	return changed, nil
}

// carryOut applies the steps of a plan, unless there is a reason to wait.
func (i *Installation) carryOut(dir cniconf.Dir, plan cniconf.Plan, others []string) (changed bool, err error) {
	if len(plan.Steps) == 0 || !i.mayWrite(metrics.Config) {
		return false, nil
	}
	err = i.rewrite(metrics.Config, plan.Primary, otherWriter(dir, plan.Primary, others), func() (err error) {
		if !named(dir) {
			if err = i.usable(); err != nil {
				return err
			}
		}
		changed, err = i.apply(dir, plan.Steps)
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
func (i *Installation) logPlan(plan cniconf.Plan) {
	text := strings.Join(append(slices.Clone(plan.Warnings), plan.Waiting, plan.File, plan.Mode.String()), "\n")
	if text == i.logged[i.config.NetDir] {
		return
	}
	i.logged[i.config.NetDir] = text
	for _, w := range plan.Warnings {
		i.log.Warn("CNI configuration", slog.String("warning", w))
	}
	if plan.Waiting != "" {
		i.log.Info(plan.Waiting, slog.String("directory", i.config.NetDir)) //nolint:sloglint // the awaited event is the message
	}
	if plan.File != "" {
		i.log.Info("the stanza belongs into", slog.String("file", filepath.Join(i.config.NetDir, plan.File)),
			slog.String("primary", plan.Primary), slog.String("mode", plan.Mode.String()))
	}
}

// apply carries out the steps. It stops at a file whose content differs from the content in the plan.
func (i *Installation) apply(dir cniconf.Dir, steps []cniconf.Step) (changed bool, err error) {
	if slices.ContainsFunc(steps, func(s cniconf.Step) bool { return s.Op == cniconf.OpReload }) {
		if err := i.disk.WriteFile(filepath.Join(i.config.NetDir, triggerName), nil, 0o600); err != nil {
			return false, err
		}
	}
	for _, s := range steps {
		if err := i.unchanged(dir, s); err != nil {
			return changed, err
		}
		if err := i.step(dir, s); err != nil {
			return changed, fmt.Errorf("%s: %w", s, err)
		}
		i.log.Info("changed CNI configuration", slog.String("step", s.String()))
		i.remember("changed CNI configuration: " + s.String())
		changed = true
		dir = dir.Apply(s)
	}
	return changed, nil
}

// unchanged reads the files of a step again, so that the step does not overwrite a change that another program made after
// readDir.
func (i *Installation) unchanged(dir cniconf.Dir, s cniconf.Step) error {
	for _, name := range []string{s.Name, s.To} {
		if name == "" || s.Op == cniconf.OpRemoveDir {
			continue
		}
		data, _, err := hostfs.ReadFile(filepath.Join(i.config.NetDir, name), maxConf)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			data = nil // the file was as unreadable for readDir
		}
		if known, there := dir[name]; there != (err == nil || !errors.Is(err, fs.ErrNotExist)) || !bytes.Equal(known.Data, data) {
			return fmt.Errorf("file %q: %w", name, hostfs.ErrChanged)
		}
	}
	return nil
}

// dropInDirMode lets other programs of the node read the plugins' configuration, as in the directory above.
const dropInDirMode = 0o755

func (i *Installation) step(dir cniconf.Dir, s cniconf.Step) error {
	file := filepath.Join(i.config.NetDir, s.Name)
	switch s.Op {
	case cniconf.OpWrite:
		if strings.Contains(s.Name, "/") {
			if err := i.disk.MkdirAll(filepath.Dir(file), dropInDirMode); err != nil {
				return err
			}
		}
		var old []byte
		if known, there := dir[s.Name]; there {
			old = append([]byte{}, known.Data...)
		}
		return i.disk.Replace(file, old, s.Data, fs.FileMode(s.Mode))
	case cniconf.OpRename:
		from := dir[s.Name]
		if _, taken := dir[s.To]; taken {
			return i.disk.Rename(file, filepath.Join(i.config.NetDir, s.To))
		}
		return i.disk.Move(file, filepath.Join(i.config.NetDir, s.To), from.Data)
	case cniconf.OpRemove:
		return i.disk.Remove(file)
	case cniconf.OpRemoveDir:
		// Another program may have added a file since the plan; the directory then stays.
		if err := i.disk.Remove(file); err != nil && !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
		return nil
	case cniconf.OpReload:
	}
	return i.disk.Remove(filepath.Join(i.config.NetDir, triggerName))
}

// triggerName is a name that no runtime loads. The file is created before a change that runtimes do not watch and removed after
// the change: runtimes watch the directory itself, and reload all of it. After a crash in between, the file remains, and the
// next run removes the file.
const triggerName = ".istio-cni-poke"

// withReload appends the reload that a crash prevented.
func withReload(steps []cniconf.Step, others []string) []cniconf.Step {
	if slices.Contains(others, triggerName) {
		steps = append(steps, cniconf.Step{Op: cniconf.OpReload, Why: "a crash came before it"})
	}
	return steps
}
