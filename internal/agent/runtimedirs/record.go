package runtimedirs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// RecordName is the name of the record in the run directory: the chosen directories, and then previous ones that are not clean
// yet. The next agent and the uninstallation read it.
const RecordName = "directories.json"

// Bounds of the record: a runtime moves rarely.
const (
	maxRecord = 1 << 20
	maxDirs   = 16
)

// ReadRecord returns the recorded directories as paths of the node, none without a record.
func ReadRecord(runDir string) (all []Dirs, err error) {
	text, _, err := hostfs.ReadFile(filepath.Join(runDir, RecordName), maxRecord)
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

// onNode maps directories of this process to paths of the node. It omits a mounted program directory that the user has set: its path
// on the node is not known.
func (f *Finder) onNode(d Dirs) (node Dirs) {
	below := func(dir string) string { return strings.TrimPrefix(dir, f.look.root) }
	if node.Net = below(d.Net); d.Net == f.Mounted.Net {
		node.Net = filepath.Clean(f.HostNet)
	}
	for _, dir := range d.Bins {
		switch {
		case !slices.Contains(f.Mounted.Bins, dir):
			node.Bins = append(node.Bins, below(dir))
		case f.Detect.Bin:
			node.Bins = append(node.Bins, runtimeconf.DefaultBinDir)
		}
	}
	return node
}

// here maps directories of the node to paths of this process.
func (f *Finder) here(l look, d Dirs) Dirs {
	out := Dirs{Net: f.throughMount(filepath.Join(l.root, d.Net))}
	for _, dir := range d.Bins {
		out.Bins = append(out.Bins, f.throughMount(filepath.Join(l.root, dir)))
	}
	return out
}

// recall adds the directories of earlier agents to the previous ones. An uninstallation outside of a container sees the node's
// own paths.
func (f *Finder) recall(uninstall bool) {
	if f.recalled {
		return
	}
	all, err := ReadRecord(f.RunDir)
	if err != nil {
		f.log.Warn("the record of earlier directories is not usable", slog.String("error", err.Error()))
	}
	f.recalled = true
	if onNode := uninstall && len(f.Host.Roots) == 0; len(all) > 0 && f.look.root == "" && !onNode {
		f.log.Warn("the directories of an earlier agent are not seen here and stay as they are", slog.Any("directories", all))
		return
	}
	for _, d := range all {
		f.addPrevious(f.here(f.look, d))
	}
	if len(all) == 0 { // the earlier agent did not ask the runtime, or a reboot removed its record
		f.addPrevious(f.Mounted)
	}
}

// record writes the record, or removes it if it would have only the mounted directories.
func (f *Finder) record() error {
	file := filepath.Join(f.RunDir, RecordName)
	if f.chosen.Equal(f.Mounted) && len(f.previous) == 0 {
		if _, err := os.Lstat(file); err != nil {
			return nil //nolint:nilerr // there is no record
		}
		f.log.Info("removing", slog.String("file", file))
		return f.disk.Remove(file)
	}
	all := []Dirs{f.onNode(f.chosen)}
	for _, d := range f.previous[max(0, len(f.previous)-maxDirs):] {
		all = append(all, f.onNode(d))
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("encoding the record: %w", err)
	}
	if now, _, err := hostfs.ReadFile(file, maxRecord); err == nil && string(now) == string(text) {
		return nil
	}
	if err := f.disk.MkdirAll(f.RunDir, f.RunDirMode); err != nil {
		return err
	}
	return f.disk.WriteFile(file, text, 0o600)
}
