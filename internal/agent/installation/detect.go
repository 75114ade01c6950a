package installation

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// Detect selects what the node's runtime decides by its own configuration. It counts only where the directory that is mounted here
// is the node's default one, as another one is a decision of the user.
type Detect struct{ Net, Bin bool }

// location is what the last look at the node found.
type location struct {
	// root is where the node's whole file system is seen, "" if it is not.
	root    string
	runtime runtimeconf.Config
	// known is the last configuration of the runtime that was not in doubt.
	known runtimeconf.Config
	// unknown is why the configuration directory is not the runtime's although it was to be, nil otherwise. stays reports that the
	// directories are those of before then.
	unknown error
	stays   bool
	// detects reports that the runtime decides.
	detects bool
	// logged is the text of what was logged last.
	logged string
}

// locate looks where the runtime looks, and makes that the directories of this installation. Directories that are mounted here are
// used through their mounts, others through the root directory of the node's first process, with links followed below that. It writes
// nothing.
func (i *Installation) locate() {
	was := i.dirs()
	l := location{logged: i.at.logged, known: i.at.known}
	if i.config.inContainer() {
		l.root = hostpath.Whole(i.config.HostRoots...)
	}
	if l.root != "" {
		l.runtime = runtimeconf.Read(l.root)
	}
	net, bin := i.detects(l.root)
	l.detects = net || bin
	now := i.mounted
	if l.detects {
		now, l.unknown = i.choose(l, net, bin)
	}
	i.at = l
	if l.unknown == nil {
		i.at.known = l.runtime
	} else {
		before := i.before(now, net, bin)
		i.at.stays, now = !before.equal(now), before
		if l.runtime.Disabled || len(l.runtime.Rivals) > 0 { // the kubelet may have another runtime by now
			i.keepIn(i.mounted, now)
		}
	}
	if now.equal(was) {
		return
	}
	i.config.NetDir, i.config.BinDirs = now.Net, now.Bins
	if old := i.config.OldKubeconfig; old != "" {
		i.config.OldKubeconfig = filepath.Join(now.Net, filepath.Base(old))
	}
	i.asWanted[metrics.Config], i.asWanted[metrics.Binary] = false, false // the files are missing there, nobody removed them
	if i.recorded {
		i.keepIn(was, now)
	}
}

// keepIn makes directories earlier ones unless they are the present ones.
func (i *Installation) keepIn(d, now Dirs) {
	if !d.equal(now) && !slices.ContainsFunc(i.earlier, d.equal) {
		i.earlier = append(i.earlier, d)
	}
}

// detects reports which directories the runtime decides.
func (i *Installation) detects(root string) (net, bin bool) {
	byDefault := func(mounted, usual string) bool {
		seen, err := hostpath.Resolve(root, usual)
		return root == "" || !isDirectory(mounted) || err == nil && same(seen, mounted)
	}
	d := i.config.Detect
	net = d.Net && i.config.Want.Mode != cniconf.Standalone && byDefault(i.mounted.Net, runtimeconf.DefaultConfDir)
	return net, d.Bin && len(i.mounted.Bins) == 1 && byDefault(i.mounted.Bins[0], runtimeconf.DefaultBinDir)
}

// doubt returns why it is not known where the node's runtime looks. A file that is gone since the last look may still count, as the
// runtime may have read it.
func (l location) doubt() error {
	if l.root == "" {
		return errors.New("the node's file system is not seen here: that takes /proc of the node and the capability SYS_PTRACE")
	}
	for _, file := range l.known.Files {
		seen, err := hostpath.Resolve(l.root, file)
		if err == nil {
			_, err = os.Stat(seen)
		}
		if errors.Is(err, fs.ErrNotExist) && l.runtime.Started.Equal(l.known.Started) {
			return fmt.Errorf("file %q of the runtime was removed, and the runtime was not started again since", file)
		}
	}
	return l.runtime.Doubt()
}

// choose returns the directories. The error is why the configuration directory is not known to be the runtime's.
func (i *Installation) choose(l location, net, bin bool) (d Dirs, unknown error) {
	d, unknown = i.mounted, l.doubt()
	if bin && l.runtime.Runtime != "" {
		all, err := i.programs(l)
		if err != nil {
			return i.mounted, err
		}
		d.Bins = all
	}
	if !net || unknown != nil {
		return d, unknown
	}
	dir, err := l.seen(l.runtime.ConfDir)
	if err != nil {
		return i.mounted, err
	}
	if d.Net = dir; same(dir, i.mounted.Net) {
		d.Net = i.mounted.Net
	}
	return d, nil
}

// programs are the directories that get the program: all in which the runtime looks, and the mounted one, as a program is harmless
// where nobody looks, and pods fail without it where another runtime, or multus, does. Those that cannot be written are left out, but
// for the runtime's only one.
func (i *Installation) programs(l location) (all []string, err error) {
	mounted, found := i.mounted.Bins[0], false
	if writable(mounted) {
		all = append(all, mounted)
	}
	for at, dir := range l.runtime.BinDirs {
		seen, err := l.seen(dir)
		if err != nil {
			return nil, err
		}
		if same(seen, mounted) {
			seen = mounted
		}
		found = found || writable(seen)
		if (writable(seen) || !found && at == len(l.runtime.BinDirs)-1) && !slices.Contains(all, seen) {
			all = append(all, seen)
		}
	}
	return all, nil
}

// before returns the directories while it is not known where the runtime looks: those of the last look, or of the agent before.
func (i *Installation) before(now Dirs, net, bin bool) Dirs {
	if i.recorded {
		return i.dirs()
	}
	all, err := ReadDirs(i.config.RunDir)
	if err != nil || len(all) == 0 || i.at.root == "" {
		return now
	}
	for _, dir := range append([]string{all[0].Net}, all[0].Bins...) {
		if _, err := i.at.seen(dir); err != nil {
			return now
		}
	}
	then := i.here(all[0])
	if net {
		now.Net = then.Net
	}
	if bin && len(then.Bins) > 0 {
		now.Bins = then.Bins
	}
	return now
}

// seen is where a directory of the node is seen. Only root may be able to change what is on the way.
func (l location) seen(dir string) (string, error) {
	seen, err := hostpath.Resolve(l.root, dir)
	if err != nil {
		return "", err
	}
	const others = fs.FileMode(0o002)
	for at := seen; len(at) > len(l.root); at = filepath.Dir(at) {
		if info, err := os.Stat(at); err == nil && info.Mode()&others != 0 {
			return "", fmt.Errorf("directory %q of the runtime: every user of the node may write to %q", dir, strings.TrimPrefix(at, l.root))
		}
	}
	return seen, nil
}

// logLocation logs what the directories are and why, unless that was logged last.
func (i *Installation) logLocation() {
	d, c, detects := i.dirs(), i.at.runtime, i.at.detects
	log := i.log.With(slog.String("configuration", d.Net), slog.Any("programs", d.Bins))
	elsewhere := !detects && i.elsewhere()
	problem := errors.Join(c.Problems...)
	both := i.at.unknown == nil && len(i.nets())+len(i.bins()) > 1+len(d.Bins)
	text := fmt.Sprint(d, detects, i.at.unknown, elsewhere, problem, both, c.ConfDir, c.BinDirs)
	if text == i.at.logged {
		return
	}
	i.at.logged = text
	from := []any{
		slog.String("runtime", c.Runtime), slog.Any("files", c.Files), slog.String("its configuration", c.ConfDir),
		slog.Any("its programs", c.BinDirs),
	}
	switch {
	case i.at.stays:
		log.Warn("where the runtime looks is not known any more: the directories stay as they are", slog.String("reason", i.at.unknown.Error()))
	case i.at.unknown != nil:
		log.Info("installing into the default directories: where the runtime looks is not known", slog.String("reason", i.at.unknown.Error()),
			slog.String("hint", "set cniConfDir and cniBinDir if the runtime looks elsewhere"))
	case elsewhere:
		log.Warn("the runtime looks in other directories than those that are set: it will not run the plugin, unless multus does", from...)
	case detects:
		log.Info("installing where the runtime looks", from...)
	}
	if both {
		log.Warn("the runtime may look in other directories until it is started again: the plugin is there as well",
			slog.Any("other configuration", i.nets()[1:]), slog.Any("other programs", i.bins()[len(d.Bins):]))
	}
	if problem != nil && i.at.unknown == nil && (detects || elsewhere) {
		log.Warn("the runtime's configuration is in doubt", slog.String("error", problem.Error()))
	}
}

// elsewhere reports whether a runtime that is known looks in none of the directories that were set.
func (i *Installation) elsewhere() bool {
	if i.at.doubt() != nil || i.config.Want.Mode == cniconf.Standalone {
		return false
	}
	is := func(mounted string) func(string) bool {
		return func(dir string) bool {
			seen, err := hostpath.Resolve(i.at.root, dir)
			return err == nil && same(seen, mounted)
		}
	}
	return !is(i.mounted.Net)(i.at.runtime.ConfDir) || !slices.ContainsFunc(i.mounted.Bins, func(bin string) bool {
		return slices.ContainsFunc(i.at.runtime.BinDirs, is(bin))
	})
}

// runtimeFiles are files and directories of the runtime whose change may move the installation.
func (l location) runtimeFiles() (all []string) {
	if l.root == "" || l.runtime.Runtime == "" {
		return nil
	}
	for _, file := range slices.Concat(l.runtime.Files, l.known.Files, []string{l.runtime.ConfDir}, l.runtime.BinDirs) {
		all = append(all, filepath.Join(l.root, file))
	}
	return all
}

// same reports whether two paths are one directory, which may be mounted twice.
func same(a, b string) bool {
	one, err := os.Stat(a)
	other, otherErr := os.Stat(b)
	return err == nil && otherErr == nil && os.SameFile(one, other)
}

func isDirectory(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.IsDir()
}

// writable reports whether a directory is there and not on a read-only file system.
func writable(dir string) bool {
	const readOnly = 1 // ST_RDONLY, statfs(2)
	var s syscall.Statfs_t
	return isDirectory(dir) && (syscall.Statfs(dir, &s) != nil || s.Flags&readOnly == 0)
}
