package installation

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// attempts is how often a plan is made anew in one comparison because the directory changed under it.
const attempts = 5

// conf makes the configuration directory as wanted.
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
	i.sweepOwn()
	dir, others, err := i.readDir()
	if errors.Is(err, fs.ErrNotExist) {
		return false, &WaitingError{For: fmt.Sprintf("waiting for the directory %q", i.config.NetDir)}
	}
	if err != nil {
		return false, withHint(err)
	}
	i.sweepConf(dir)
	plan := i.config.Want.Plan(dir)
	if slices.Contains(others, pokeName) {
		plan.Steps = append(plan.Steps, cniconf.Step{Op: cniconf.OpPoke, Why: "a crash came before it"})
	}
	i.say(plan)
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
		return false, errors.New("the CNI configuration was changed by somebody else and is not to be put back (CNI_ENABLE_REINSTALL=false)")
	}
	return changed, nil
}

// carryOut takes the steps of a plan, unless there is a reason to wait.
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
		changed, err = i.take(dir, plan.Steps)
		return withHint(err)
	})
	return changed, err
}

// named reports whether the runtime runs the plugin already.
func named(d cniconf.Dir) bool {
	_, n, _ := d.Loaded()
	for name := range d.DropIns[n.Name] {
		if name == cniconf.DropInName {
			return true
		}
	}
	return slices.Contains(n.Types, cniconf.PluginType)
}

// say logs what a person should know, once.
func (i *Installation) say(plan cniconf.Plan) {
	text := strings.Join(append(slices.Clone(plan.Warnings), plan.Waiting, plan.File, plan.Mode.String()), "\n")
	if text == i.logged {
		return
	}
	i.logged = text
	for _, w := range plan.Warnings {
		i.log.Warn("CNI configuration", slog.String("warning", w))
	}
	if plan.Waiting != "" {
		i.log.Info(plan.Waiting, slog.String("directory", i.config.NetDir)) //nolint:sloglint // what is waited for is the message
	}
	if plan.File != "" {
		i.log.Info("the stanza belongs into", slog.String("file", filepath.Join(i.config.NetDir, plan.File)),
			slog.String("primary", plan.Primary), slog.String("mode", plan.Mode.String()))
	}
}

// take carries out the steps. It stops where a file is not what the plan was made for.
func (i *Installation) take(dir cniconf.Dir, steps []cniconf.Step) (changed bool, err error) {
	if slices.ContainsFunc(steps, func(s cniconf.Step) bool { return s.Op == cniconf.OpPoke }) {
		if err := i.mark(); err != nil {
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
		changed = true
		dir = dir.Apply(s)
	}
	return changed, nil
}

// unchanged reads the files of a step again. What another program wrote a moment ago must not be lost by our older view
// of it.
func (i *Installation) unchanged(dir cniconf.Dir, s cniconf.Step) error {
	for _, name := range []string{s.Name, s.To} {
		if name == "" || s.Op == cniconf.OpRemoveDir {
			continue
		}
		data, _, err := hostfs.ReadFile(filepath.Join(i.config.NetDir, name), maxConf)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			data = nil // it was as unreadable before
		}
		if known, there := dir.File(name); there != (err == nil || !errors.Is(err, fs.ErrNotExist)) || !bytes.Equal(known.Data, data) {
			return fmt.Errorf("file %q: %w", name, hostfs.ErrChanged)
		}
	}
	return nil
}

// dropInDirMode lets other programs of the node read what plugins run, as they can in the directory above.
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
		if known, there := dir.File(s.Name); there {
			old = append([]byte{}, known.Data...)
		}
		return i.disk.Replace(file, old, s.Data, fs.FileMode(s.Mode))
	case cniconf.OpRename:
		from, _ := dir.File(s.Name)
		if _, taken := dir.File(s.To); taken {
			return i.disk.Rename(file, filepath.Join(i.config.NetDir, s.To))
		}
		return i.disk.Move(file, filepath.Join(i.config.NetDir, s.To), from.Data)
	case cniconf.OpRemove:
		return i.disk.Remove(file)
	case cniconf.OpRemoveDir:
		// Somebody may have put something there since.
		if err := i.disk.Remove(file); err != nil && !notEmpty(file) {
			return err
		}
		return nil
	case cniconf.OpPoke:
		return i.poke()
	}
	return fmt.Errorf("unknown step %q", s.Op)
}

// pokeName is no name that a runtime reads. The file is made before anything changes that runtimes do not watch and taken
// away after it: runtimes watch the directory itself, and read all of it again. If a crash comes between, it is still
// there, and the next run takes it away.
const pokeName = ".istio-cni-poke"

func (i *Installation) mark() error {
	return i.disk.WriteFile(filepath.Join(i.config.NetDir, pokeName), nil, 0o600)
}

func (i *Installation) poke() error {
	return i.disk.Remove(filepath.Join(i.config.NetDir, pokeName))
}

func notEmpty(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err == nil && len(entries) > 0
}

// readDir reads the directory as far as a plan needs it, and gives the names of what else lies there. A file that cannot be
// read is there, but empty: a runtime skips it, too.
func (i *Installation) readDir() (d cniconf.Dir, others []string, err error) {
	entries, err := os.ReadDir(i.config.NetDir)
	if err != nil {
		return d, nil, fmt.Errorf("reading the CNI configuration: %w", err)
	}
	i.links = nil
	for _, e := range entries {
		switch name := e.Name(); {
		case i.isDir(e):
			d = i.readDropIns(d, name)
		case cniconf.Candidate(name) || cniconf.Saved(name) || name == i.config.Want.ConfName:
			if d, err = i.readInto(d, name); err != nil {
				return d, others, err
			}
		default:
			others = append(others, name)
		}
	}
	return d, others, nil
}

// isDir tells a directory, or a link to one, as runtimes follow it.
func (i *Installation) isDir(e fs.DirEntry) bool {
	if e.Type()&fs.ModeSymlink == 0 {
		return e.IsDir()
	}
	info, err := os.Stat(filepath.Join(i.config.NetDir, e.Name()))
	return err == nil && info.IsDir()
}

func (i *Installation) readInto(d cniconf.Dir, name string) (cniconf.Dir, error) {
	file := filepath.Join(i.config.NetDir, name)
	data, mode, err := hostfs.ReadFile(file, maxConf)
	target, notLink := os.Readlink(file)
	unseen := ""
	switch {
	case errors.Is(err, fs.ErrNotExist) && notLink != nil:
		return d, nil //nolint:nilerr // gone meanwhile
	case errors.Is(err, fs.ErrNotExist):
		unseen = fmt.Sprintf("it is a symbolic link to %q, which is not there or lies in a part of the node that is not mounted here", target)
	case errors.Is(err, hostfs.ErrTooLarge):
		unseen = err.Error()
	case errors.Is(err, fs.ErrPermission):
		return d, err
	case err != nil:
		i.log.Debug("a file in the CNI configuration cannot be read", slog.String("file", name), errAttr(err))
		data = nil
	}
	if notLink == nil {
		i.links = append(i.links, file)
	}
	return d.Put(name, cniconf.File{Data: data, Mode: uint32(mode.Perm()), Link: notLink == nil, Unseen: unseen}), nil
}

// readDropIns reads the drop-in files below a directory; one that cannot be listed has none.
func (i *Installation) readDropIns(d cniconf.Dir, network string) cniconf.Dir {
	names, err := hostfs.List(filepath.Join(i.config.NetDir, network), func(name string) bool { return filepath.Ext(name) == ".conf" })
	if err != nil {
		return d
	}
	for _, name := range names {
		if more, err := i.readInto(d, network+"/"+name); err == nil {
			d = more
		}
	}
	return d
}

// sweep removes what a crash left of the files of these names.
func (i *Installation) sweep(dir string, names ...string) {
	i.swept(dir)(i.disk.Sweep(dir, names...))
}

func (i *Installation) swept(dir string) func(files []string, err error) {
	return func(files []string, err error) {
		if len(files) > 0 || err != nil {
			i.log.Info("removed temporary files that a crash left", slog.String("directory", dir), slog.Any("files", files), errAttr(err))
		}
	}
}

// sweepOwn removes what a crash of this program left in the configuration directory, whatever configuration is there now.
// It comes before the directory is read, as it may bring back what another program wrote. Only who holds the node may do it.
func (i *Installation) sweepOwn() {
	i.swept(i.config.NetDir)(i.disk.SweepOwn(i.config.NetDir))
	entries, err := os.ReadDir(i.config.NetDir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if dir := filepath.Join(i.config.NetDir, e.Name()); i.isDir(e) {
			i.swept(dir)(i.disk.SweepOwn(dir))
			i.sweep(dir, cniconf.DropInName)
		}
	}
}

// sweepConf removes what the reference and older versions, whose names for temporary files are not theirs alone, left of
// the files that are there and of those that they were to become, and what any left beside the target of a link.
func (i *Installation) sweepConf(d cniconf.Dir) {
	i.sweep(i.config.NetDir, temporary(slices.Collect(maps.Keys(d.Files)), i.config.Want)...)
	for _, link := range i.links {
		if target, err := filepath.EvalSymlinks(link); err == nil {
			i.sweep(filepath.Dir(target), filepath.Base(target))
		}
	}
}

// temporary are the names of files that may have been written when a crash came: those that are there, and those that
// they were to become.
func temporary(names []string, want cniconf.Want) []string {
	out := []string{want.ConfName, want.OwnedName, cniconf.OwnedName, cniconf.StandaloneName, pokeName}
	for _, name := range names {
		out = append(append(out, name), cniconf.Becomes(name)...)
		if cniconf.Saved(name) {
			out = append(out, cniconf.Original(name))
		}
	}
	return slices.DeleteFunc(out, func(name string) bool { return name == "" })
}
