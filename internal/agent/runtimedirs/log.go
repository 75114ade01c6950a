package runtimedirs

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

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
