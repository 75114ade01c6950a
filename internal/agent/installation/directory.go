package installation

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// readDir reads the configuration directory as far as a plan needs the files, and returns the names of all other files. An
// unreadable file counts as empty: a runtime skips such a file, too.
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
		unseen = fmt.Sprintf("it is a symbolic link to %q, which is not there or lies in a part of the node that is not mounted here", target)
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

// readDropIns reads the drop-in files below a directory; a directory that cannot be listed counts as empty.
func (c confDir) readDropIns(d cniconf.Dir, network string) {
	names, _ := hostfs.List(filepath.Join(c.path, network), func(name string) bool { return filepath.Ext(name) == ".conf" })
	for _, name := range names {
		_ = c.readInto(d, network+"/"+name) // a file without read permission counts as absent
	}
}

// sweep removes the temporary files that a crash left of the files of these names. Only the process that holds the lock may
// call sweep.
func (i *Installation) sweep(dir string, names ...string) { i.logSweep(i.disk.Sweep(dir, names...)) }

func (i *Installation) logSweep(removed []string, err error) {
	if len(removed) > 0 || err != nil {
		i.log.Info("removed temporary files that a crash left", slog.Any("files", removed), slog.Any("error", err))
	}
}

// sweepConf sweeps the configuration directory, the directories of drop-in files, and the directories of the targets of links.
// In the first two no other program writes under names of this program's temporary files, so all of these go.
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

// temporary returns the names of files that a crash can have left half written: the present files, and their names after a
// step.
func temporary(d cniconf.Dir, want cniconf.Want) []string {
	out := []string{want.ConfName, want.OwnedName, cniconf.OwnedName, cniconf.StandaloneName, triggerName}
	for name := range d {
		out = append(append(out, name, cniconf.Original(name)), cniconf.Becomes(name)...)
	}
	return slices.DeleteFunc(out, func(name string) bool { return name == "" })
}
