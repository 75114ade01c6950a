package installation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// Dirs are the directories of an installation: in an Installation as this process sees them, in its record as the node has them.
type Dirs struct {
	Net  string   `json:"configuration"`
	Bins []string `json:"programs"`
}

func (d Dirs) equal(other Dirs) bool { return d.Net == other.Net && slices.Equal(d.Bins, other.Bins) }

// DirsName is the name of the record in the run directory: the directories that were found on the node, the present ones first. The next
// agent and the uninstallation clean those that are not the present ones any more.
const DirsName = "directories.json"

// maxDirs bounds the entries of the record: a runtime moves rarely.
const maxDirs = 16

// ReadDirs returns the recorded directories, none if there is no record.
func ReadDirs(runDir string) (all []Dirs, err error) {
	text, _, err := hostfs.ReadFile(filepath.Join(runDir, DirsName), 1<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("the record of the installation's directories: %w", err)
	}
	return slices.DeleteFunc(all, func(d Dirs) bool {
		return slices.ContainsFunc(append([]string{d.Net}, d.Bins...), func(dir string) bool { return !filepath.IsAbs(dir) })
	}), nil
}

func (i *Installation) dirs() Dirs { return Dirs{Net: i.config.NetDir, Bins: i.config.BinDirs} }

// onNode maps directories of this process to the node's. Of mounted programs whose directory was set, the node's is not known.
func (i *Installation) onNode(d Dirs) (node Dirs) {
	out := func(dir string) string { return strings.TrimPrefix(dir, i.at.root) }
	if node.Net = out(d.Net); d.Net == i.mounted.Net {
		node.Net = filepath.Clean(i.config.HostNetDir)
	}
	for _, dir := range d.Bins {
		switch {
		case !slices.Contains(i.mounted.Bins, dir):
			node.Bins = append(node.Bins, out(dir))
		case i.config.Detect.Bin:
			node.Bins = append(node.Bins, runtimeconf.DefaultBinDir)
		}
	}
	return node
}

// here maps directories of the node to this process'.
func (i *Installation) here(d Dirs) Dirs {
	find := func(dir string) string {
		seen, mounted := filepath.Join(i.at.root, dir), append([]string{i.mounted.Net}, i.mounted.Bins...)
		if at := slices.IndexFunc(mounted, func(one string) bool { return same(one, seen) }); at >= 0 {
			return mounted[at]
		}
		return seen
	}
	out := Dirs{Net: find(d.Net)}
	for _, dir := range d.Bins {
		out.Bins = append(out.Bins, find(dir))
	}
	return out
}

// settle says what the directories are and records them, before anything is written there.
func (i *Installation) settle() error {
	i.recall()
	i.logLocation()
	return i.record()
}

// clean removes the installation from directories of before as soon as the runtime does not look there any more: it looks where its
// files said when it was started.
func (i *Installation) clean() error {
	if !i.at.certain() {
		return nil
	}
	for ; len(i.earlier) > 0; i.earlier = i.earlier[1:] {
		if err := i.leave(i.earlier[0]); err != nil {
			return err
		}
	}
	return i.record()
}

// certain reports whether the runtime looks in the present directories now, or the user said so.
func (l location) certain() bool {
	return !l.detects || l.unknown == nil && !l.runtime.Pending && len(l.runtime.Problems) == 0
}

// nets are the configuration directories that get the stanza, the present one first, and bins those that get the program: also those of
// before, as long as the runtime may look there.
func (i *Installation) nets() []string {
	all := []string{i.config.NetDir}
	for _, d := range i.earlier {
		if !i.at.certain() && !slices.Contains(all, d.Net) && writable(d.Net) {
			all = append(all, d.Net)
		}
	}
	return all
}

func (i *Installation) bins() []string {
	all := slices.Clone(i.config.BinDirs)
	for _, d := range i.earlier {
		for _, dir := range d.Bins {
			if !i.at.certain() && !slices.Contains(all, dir) && writable(dir) {
				all = append(all, dir)
			}
		}
	}
	return all
}

// recall adds the directories of earlier agents. An uninstallation by hand on the node sees them by the paths of the record.
func (i *Installation) recall() {
	if i.recorded {
		return
	}
	all, err := ReadDirs(i.config.RunDir)
	if err != nil {
		i.log.Warn("the record of earlier directories is not usable", slog.String("error", err.Error()))
	}
	i.recorded = true
	if byHand := i.uninstalled && !i.config.inContainer(); len(all) > 0 && i.at.root == "" && !byHand {
		i.log.Warn("the directories of an earlier agent are not seen here and stay as they are", slog.Any("directories", all))
		return
	}
	for _, d := range all {
		i.keepIn(i.here(d), i.dirs())
	}
	if len(all) == 0 { // of an agent that did not ask the runtime, or that lost its record with a reboot
		i.keepIn(i.mounted, i.dirs())
	}
}

// gather makes the program's directories of before those of the uninstallation.
func (i *Installation) gather() {
	if !i.recorded {
		i.locate()
	}
	i.recall()
	for _, d := range append(slices.Clone(i.earlier), i.mounted) {
		for _, dir := range d.Bins {
			if !slices.Contains(i.config.BinDirs, dir) {
				i.config.BinDirs = append(slices.Clone(i.config.BinDirs), dir)
			}
		}
	}
}

// eachNet calls do for the configuration directory and for those of before, until it fails.
func (i *Installation) eachNet(do func() error) error {
	now := i.config.NetDir
	defer func() { i.config.NetDir = now }()
	err := do()
	for _, d := range i.earlier {
		if i.config.NetDir = d.Net; err == nil && d.Net != now {
			err = do()
		}
	}
	return err
}

// record writes the record if the directories differ from the mounted ones, or did.
func (i *Installation) record() error {
	file := filepath.Join(i.config.RunDir, DirsName)
	if i.dirs().equal(i.mounted) && len(i.earlier) == 0 {
		return i.remove(file)
	}
	all := []Dirs{i.onNode(i.dirs())}
	for _, d := range i.earlier[max(0, len(i.earlier)-maxDirs):] {
		all = append(all, i.onNode(d))
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("encoding the record: %w", err)
	}
	if now, _, err := hostfs.ReadFile(file, 1<<20); err == nil && string(now) == string(text) {
		return nil
	}
	if err := i.disk.MkdirAll(i.config.RunDir, i.config.RunDirMode); err != nil {
		return withHint(err)
	}
	return withHint(i.disk.WriteFile(file, text, 0o600))
}

// leave removes the installation from directories that are not the present ones. Programs stay in mounted directories, where others
// than the runtime may look for them.
func (i *Installation) leave(d Dirs) error {
	now, before := i.config, len(i.History())
	defer func() { i.config = now }()
	if d.Net != now.NetDir {
		i.config.NetDir = d.Net
		if err := i.removeConf(); err != nil {
			return err
		}
		if file := i.stillNamed(); file != "" {
			return fmt.Errorf("file %q of an earlier directory still names the plugin, or cannot be read", file)
		}
		if err := i.remove(filepath.Join(d.Net, filepath.Base(now.OldKubeconfig))); err != nil {
			return err
		}
	}
	i.config.BinDirs = slices.DeleteFunc(slices.Clone(d.Bins), func(dir string) bool {
		return slices.Contains(now.BinDirs, dir) || slices.Contains(i.mounted.Bins, dir)
	})
	if err := i.removeCopies(); err != nil {
		return err
	}
	if len(i.History()) > before {
		i.log.Info("removed the plugin from directories in which the runtime does not look any more", slog.String("configuration", d.Net),
			slog.Any("programs", i.config.BinDirs))
	}
	return nil
}
