package runtimedirs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// look is the result of one inspection of the node.
type look struct {
	// root is this process's path of the node's file system, "" if it is not accessible.
	root    string
	runtime runtimeconf.Config
	// detect says which directories the runtime decides.
	detect Detect
	// unknown is the reason not to use the runtime's configuration directory. kept reports that previous directories
	// stay in use for that reason.
	unknown error
	kept    bool
}

func (l look) detects() bool { return l.detect.Net || l.detect.Bin }

// choose reads the runtime's configuration and chooses the directories.
func (f *Finder) choose() {
	last, l := f.chosen, look{}
	if len(f.Host.Roots) > 0 {
		l.root = hostpath.Whole(f.Host.Roots...)
	}
	if l.root != "" {
		l.runtime = runtimeconf.Read(l.root)
	}
	l.detect = f.detects(l)
	dirs := f.Mounted
	if l.detects() {
		dirs, l.unknown = f.decide(l)
	}
	f.chosen = dirs
	if l.unknown == nil {
		f.known = l.runtime
	} else {
		f.chosen = f.keep(l, last, dirs)
		l.kept = !f.chosen.Equal(dirs)
		if l.runtime.Disabled || len(l.runtime.Rivals) > 0 { // the kubelet may have another runtime by now
			f.addPrevious(f.Mounted)
		}
	}
	f.look = l
	if f.recalled {
		f.addPrevious(last)
	}
}

// addPrevious adds directories to the previous ones, unless they are the chosen ones.
func (f *Finder) addPrevious(d Dirs) {
	if !d.Equal(f.chosen) && !slices.ContainsFunc(f.previous, d.Equal) {
		f.previous = append(f.previous, d)
	}
}

// detects returns the directories that the runtime decides: where nothing or the node's default directory is mounted.
func (f *Finder) detects(l look) (d Detect) {
	byDefault := func(mounted, usual string) bool {
		return l.root == "" || !isDirectory(mounted) || l.is(usual, mounted)
	}
	d.Net = f.Detect.Net && !f.Standalone && byDefault(f.Mounted.Net, runtimeconf.DefaultConfDir)
	d.Bin = f.Detect.Bin && len(f.Mounted.Bins) == 1 && byDefault(f.Mounted.Bins[0], runtimeconf.DefaultBinDir)
	return d
}

// doubt returns the reason why the runtime's directories are unknown. A file that was removed since the last look is still
// relevant: the runtime may have read it.
func (f *Finder) doubt(l look) error {
	if l.root == "" {
		return errors.New("the node's file system is not seen here: that takes /proc of the node and the capability SYS_PTRACE")
	}
	for _, file := range f.known.Files {
		seen, err := hostpath.Resolve(l.root, file)
		if err == nil {
			_, err = os.Stat(seen)
		}
		if errors.Is(err, fs.ErrNotExist) && l.runtime.Started.Equal(f.known.Started) {
			return fmt.Errorf("file %q of the runtime was removed, and the runtime was not started again since", file)
		}
	}
	return l.runtime.Doubt()
}

// decide returns the directories from the runtime's configuration. With an error it returns the mounted configuration directory.
func (f *Finder) decide(l look) (d Dirs, unknown error) {
	d, unknown = f.Mounted, f.doubt(l)
	if l.detect.Bin && l.runtime.Runtime != "" {
		all, err := f.programs(l)
		if err != nil {
			return f.Mounted, err
		}
		d.Bins = all
	}
	if !l.detect.Net || unknown != nil {
		return d, unknown
	}
	dir, err := l.trusted(l.runtime.ConfDir)
	if err != nil {
		return f.Mounted, err
	}
	d.Net = f.throughMount(dir)
	return d, nil
}

// programs returns the directories that get the program: all in which the runtime looks, and the mounted one, where another
// runtime or multus may look. Directories that cannot be written are left out, except for the runtime's only one.
func (f *Finder) programs(l look) (all []string, err error) {
	found := false
	if mounted := f.Mounted.Bins[0]; writable(mounted) {
		all = append(all, mounted)
	}
	for at, dir := range l.runtime.BinDirs {
		seen, err := l.trusted(dir)
		if err != nil {
			return nil, err
		}
		seen = f.throughMount(seen)
		found = found || writable(seen)
		if (writable(seen) || !found && at == len(l.runtime.BinDirs)-1) && !slices.Contains(all, seen) {
			all = append(all, seen)
		}
	}
	return all, nil
}

// keep returns the directories to use in doubt: the last ones, or the previous agent's, or else the defaults.
func (f *Finder) keep(l look, last, byDefault Dirs) Dirs {
	if f.recalled {
		return last
	}
	all, err := ReadRecord(f.RunDir)
	if err != nil || len(all) == 0 || l.root == "" {
		return byDefault
	}
	for _, dir := range append([]string{all[0].Net}, all[0].Bins...) {
		if _, err := l.trusted(dir); err != nil {
			return byDefault
		}
	}
	recorded := f.here(l, all[0])
	if l.detect.Net {
		byDefault.Net = recorded.Net
	}
	if l.detect.Bin && len(recorded.Bins) > 0 {
		byDefault.Bins = recorded.Bins
	}
	return byDefault
}

// trusted returns this process's path of a directory of the node. It fails if other users than root can change the way to it.
func (l look) trusted(dir string) (string, error) {
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

// is reports whether a directory of the node and a path of this process are the same directory.
func (l look) is(dir, seen string) bool {
	at, err := hostpath.Resolve(l.root, dir)
	return err == nil && hostpath.Same(at, seen)
}

// throughMount returns the mounted directory that is the same as this directory, or else this directory.
func (f *Finder) throughMount(dir string) string {
	for _, mounted := range append([]string{f.Mounted.Net}, f.Mounted.Bins...) {
		if hostpath.Same(mounted, dir) {
			return mounted
		}
	}
	return dir
}

func isDirectory(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.IsDir()
}

// writable reports whether a directory exists and is not on a read-only file system.
func writable(dir string) bool {
	const readOnly = 1 // ST_RDONLY, statfs(2)
	var s syscall.Statfs_t
	return isDirectory(dir) && (syscall.Statfs(dir, &s) != nil || s.Flags&readOnly == 0)
}
