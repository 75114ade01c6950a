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
	// unknown is why the mounted directories are used although the runtime's were to be, nil otherwise.
	unknown error
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
	l := location{logged: i.at.logged}
	if i.config.inContainer() {
		l.root = hostpath.Whole(i.config.HostRoots...)
	}
	if l.root != "" {
		l.runtime = runtimeconf.Read(l.root)
	}
	net, bin := i.detects(l.root)
	if net || bin {
		l.unknown = l.doubt()
	}
	now := i.mounted
	if l.unknown == nil {
		now, l.unknown = i.choose(l, net, bin)
	}
	if l.unknown != nil && i.recorded {
		now = was
	}
	l.detects = net || bin
	i.at = l
	if now.equal(was) {
		return
	}
	i.config.NetDir, i.config.BinDirs = now.Net, now.Bins
	if old := i.config.OldKubeconfig; old != "" {
		i.config.OldKubeconfig = filepath.Join(now.Net, filepath.Base(old))
	}
	i.asWanted[metrics.Config], i.asWanted[metrics.Binary] = false, false // the files are missing there, nobody removed them
	if i.recorded {
		i.earlier = append(i.earlier, was)
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

// doubt returns why it is not known where the node's runtime looks.
func (l location) doubt() error {
	switch {
	case l.root == "":
		return errors.New("the node's file system is not seen here: that takes /proc of the node and the capability SYS_PTRACE")
	case l.runtime.Runtime == "":
		return errors.New("there is neither a socket nor a configuration file of containerd or CRI-O")
	case len(l.runtime.Rivals) > 0:
		return fmt.Errorf("several runtimes are on this node: %s, and the sockets %s", strings.Join(l.runtime.Files, " "),
			strings.Join(l.runtime.Rivals, " "))
	}
	return nil
}

// choose returns the directories. The error is a directory that no program of root may trust.
func (i *Installation) choose(l location, net, bin bool) (Dirs, error) {
	d := i.mounted
	if net {
		dir, err := l.seen(l.runtime.ConfDir)
		if err != nil {
			return i.mounted, err
		}
		if d.Net = dir; same(dir, i.mounted.Net) {
			d.Net = i.mounted.Net
		}
	}
	if bin {
		dir, err := i.chooseBin(l)
		if err != nil {
			return i.mounted, err
		}
		d.Bins = []string{dir}
	}
	return d, nil
}

// chooseBin returns one of the directories in which the runtime searches in turn: the mounted one, else the first that has a program of
// our name, else the first that can be written.
func (i *Installation) chooseBin(l location) (string, error) {
	var dirs []string
	for _, dir := range l.runtime.BinDirs {
		seen, err := l.seen(dir)
		if err != nil {
			return "", err
		}
		if same(seen, i.mounted.Bins[0]) {
			seen = i.mounted.Bins[0]
		}
		dirs = append(dirs, seen)
	}
	for _, fits := range []func(string) bool{
		func(dir string) bool { return dir == i.mounted.Bins[0] },
		func(dir string) bool { return exists(filepath.Join(dir, cniconf.PluginType)) && !readOnly(dir) },
		func(dir string) bool { return isDirectory(dir) && !readOnly(dir) },
	} {
		if at := slices.IndexFunc(dirs, fits); at >= 0 {
			return dirs[at], nil
		}
	}
	return dirs[0], nil
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
	text := fmt.Sprint(d, detects, i.at.unknown, elsewhere, problem, c.ConfDir, c.BinDirs)
	if text == i.at.logged {
		return
	}
	i.at.logged = text
	from := []any{
		slog.String("runtime", c.Runtime), slog.Any("files", c.Files), slog.String("its configuration", c.ConfDir),
		slog.Any("its programs", c.BinDirs),
	}
	switch {
	case i.at.unknown != nil && !d.equal(i.mounted):
		log.Warn("where the runtime looks is not known any more: the directories stay as they are", slog.String("reason", i.at.unknown.Error()))
	case i.at.unknown != nil:
		log.Info("installing into the default directories: where the runtime looks is not known", slog.String("reason", i.at.unknown.Error()),
			slog.String("hint", "set cniConfDir and cniBinDir if the runtime looks elsewhere"))
	case elsewhere:
		log.Warn("the runtime looks in other directories than those that are set: it will not run the plugin, unless multus does", from...)
	case detects:
		log.Info("installing where the runtime looks", from...)
	}
	if problem != nil && (detects || elsewhere) {
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
	for _, file := range slices.Concat(l.runtime.Files, []string{l.runtime.ConfDir}, l.runtime.BinDirs) {
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

func readOnly(dir string) bool {
	const flag = 1 // ST_RDONLY, statfs(2)
	var s syscall.Statfs_t
	return syscall.Statfs(dir, &s) == nil && s.Flags&flag != 0
}
