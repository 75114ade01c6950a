// Package runtimedirs finds the directories of the node that need the plugin: by default the directories that the container
// runtime's own configuration names, unless the user has set others.
//
// It promises that a doubt about the runtime moves nothing, that previous directories stay in use until the runtime has
// restarted with the new ones, and that the record of all of them survives the agent until they are clean. The agent uses
// mounted directories through their mounts, all others through the root directory of the node's first process, with links
// followed below it. It never installs or removes a plugin, and writes nothing but the record.
//
// Start at Finder.Settle; choose.go has the choice, record.go the record.
package runtimedirs

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// Dirs are the directories of an installation: in a Target as paths of this process, in the record as paths of the node.
type Dirs struct {
	Net  string   `json:"configuration"`
	Bins []string `json:"programs"`
}

// Equal reports whether the directories and their order are the same.
func (d Dirs) Equal(other Dirs) bool { return d.Net == other.Net && slices.Equal(d.Bins, other.Bins) }

// Target has the directories that need the plugin, and those that do not need it any more. Paths are as this process sees them.
type Target struct {
	// Dirs are the chosen directories.
	Dirs
	// AlsoNets and AlsoBins are previous directories. The runtime may look there until it restarts, so they need the plugin too.
	AlsoNets, AlsoBins []string
	// Obsolete are previous directories in which the runtime does not look any more.
	Obsolete []Dirs
	// RuntimeFiles are files and directories of the runtime. Their change can move the installation.
	RuntimeFiles []string
}

// Nets returns all configuration directories that need the plugin, the chosen one first.
func (t Target) Nets() []string { return append([]string{t.Net}, t.AlsoNets...) }

// AllBins returns all program directories that need the plugin, the chosen ones first.
func (t Target) AllBins() []string { return slices.Concat(t.Bins, t.AlsoBins) }

// also adds previous directories that are not in the target yet.
func (t *Target) also(net string, bins []string) {
	if net != "" && !slices.Contains(t.Nets(), net) {
		t.AlsoNets = append(t.AlsoNets, net)
	}
	for _, dir := range bins {
		if !slices.Contains(t.AllBins(), dir) {
			t.AlsoBins = append(t.AlsoBins, dir)
		}
	}
}

// Detect says which directories to take from the runtime's configuration. It is ignored if the user mounted a non-default
// directory.
type Detect struct{ Net, Bin bool }

// Settings are the inputs of a Finder.
type Settings struct {
	// Mounted are the directories of the agent's settings. HostNet is the path of their configuration directory on the node.
	Mounted Dirs
	HostNet string
	Detect  Detect
	// Standalone means that a program other than the runtime reads the configuration directory.
	Standalone bool
	// Host is where this process sees the node's file system.
	Host hostpath.View
	// RunDir is the directory of the record.
	RunDir     string
	RunDirMode fs.FileMode
}

// Finder finds the directories of one installation. Its methods are not safe for concurrent use.
type Finder struct {
	Settings

	log  *slog.Logger
	disk hostfs.Disk

	chosen Dirs
	look   look
	// known is the runtime's last configuration without a doubt.
	known runtimeconf.Config
	// previous are directories to clean, oldest first. recalled reports that they include the directories of earlier agents.
	previous []Dirs
	recalled bool
	// logged is the text of the last message, to avoid repetition.
	logged string
}

// NewFinder returns a Finder whose chosen directories are the mounted ones. It reads no file.
func NewFinder(log *slog.Logger, disk hostfs.Disk, settings Settings) *Finder {
	return &Finder{Settings: settings, log: log, disk: disk, chosen: settings.Mounted}
}

// Find reads the runtime's configuration and returns the target. It changes no file, and does not read the record.
func (f *Finder) Find() Target {
	f.choose()
	return f.target()
}

// Settle does what Find does, and includes the directories of earlier agents. It logs and persists the chosen directories before the
// first write.
func (f *Finder) Settle() (Target, error) {
	f.choose()
	f.recall(false)
	t := f.target()
	f.logTarget(t)
	return t, f.record()
}

// Cleaned tells the Finder that the obsolete directories of the last target are clean.
func (f *Finder) Cleaned() error {
	f.previous = nil
	return f.record()
}

// All returns every directory that can have the plugin, for its removal. None of them is obsolete.
func (f *Finder) All() Target {
	if !f.recalled {
		f.choose()
	}
	f.recall(true)
	t := Target{Dirs: f.chosen}
	for _, d := range f.previous {
		t.also(d.Net, d.Bins)
	}
	t.also("", f.Mounted.Bins)
	return t
}

func (f *Finder) target() Target {
	t := Target{Dirs: f.chosen, RuntimeFiles: f.runtimeFiles()}
	if f.certain() {
		t.Obsolete = slices.Clone(f.previous)
		return t
	}
	for _, d := range f.previous {
		if !writable(d.Net) {
			d.Net = ""
		}
		t.also(d.Net, slices.DeleteFunc(slices.Clone(d.Bins), func(dir string) bool { return !writable(dir) }))
	}
	return t
}

// certain reports whether the runtime surely looks in the chosen directories now, or the user set them.
func (f *Finder) certain() bool {
	l := f.look
	return !l.detects() || l.unknown == nil && !l.runtime.Pending && len(l.runtime.Problems) == 0
}

// runtimeFiles returns the files of the last look, and of the last look without a doubt.
func (f *Finder) runtimeFiles() (all []string) {
	c := f.look.runtime
	if f.look.root == "" || c.Runtime == "" {
		return nil
	}
	for _, file := range slices.Concat(c.Files, f.known.Files, []string{c.ConfDir}, c.BinDirs) {
		all = append(all, filepath.Join(f.look.root, file))
	}
	return all
}

// logTarget logs the directories and their reason, unless the last message was the same.
func (f *Finder) logTarget(t Target) {
	l, c := f.look, f.look.runtime
	log := f.log.With(slog.String("configuration", t.Net), slog.Any("programs", t.Bins))
	elsewhere := !l.detects() && f.elsewhere()
	problem := errors.Join(c.Problems...)
	both := l.unknown == nil && len(t.AlsoNets)+len(t.AlsoBins) > 0
	text := fmt.Sprint(t.Dirs, l.detects(), l.unknown, elsewhere, problem, both, c.ConfDir, c.BinDirs)
	if text == f.logged {
		return
	}
	f.logged = text
	from := []any{
		slog.String("runtime", c.Runtime), slog.Any("files", c.Files), slog.String("its configuration", c.ConfDir),
		slog.Any("its programs", c.BinDirs),
	}
	switch {
	case l.kept:
		log.Warn("where the runtime looks is not known any more: the directories stay as they are", slog.String("reason", l.unknown.Error()))
	case l.unknown != nil:
		log.Info("installing into the default directories: where the runtime looks is not known", slog.String("reason", l.unknown.Error()),
			slog.String("hint", "set cniConfDir and cniBinDir if the runtime looks elsewhere"))
	case elsewhere:
		log.Warn("the runtime looks in other directories than those that are set: it will not run the plugin, unless multus does", from...)
	case l.detects():
		log.Info("installing where the runtime looks", from...)
	}
	if both {
		log.Warn("the runtime may look in other directories until it is started again: the plugin is there as well",
			slog.Any("other configuration", t.AlsoNets), slog.Any("other programs", t.AlsoBins))
	}
	if problem != nil && l.unknown == nil && (l.detects() || elsewhere) {
		log.Warn("the runtime's configuration is in doubt", slog.String("error", problem.Error()))
	}
}

// elsewhere reports whether a known runtime looks in none of the directories that the user has set.
func (f *Finder) elsewhere() bool {
	l := f.look
	if f.Standalone || f.doubt(l) != nil {
		return false
	}
	return !l.is(l.runtime.ConfDir, f.Mounted.Net) || !slices.ContainsFunc(f.Mounted.Bins, func(bin string) bool {
		return slices.ContainsFunc(l.runtime.BinDirs, func(dir string) bool { return l.is(dir, bin) })
	})
}
