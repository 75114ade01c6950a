// Package runtimeconf reads where the node's container runtime looks for CNI configuration and plugins: containerd 1 and 2, with
// the files of k3s, RKE2, MicroK8s, k0s and Talos, and CRI-O.
//
// It promises the values that the runtime uses by its own rules (versions of the file, imports, drop-in files, defaults), to
// follow links of the node only below the given root, and bounds for the size and number of files. It returns no error: a file
// that cannot be read is in Unread and in Problems, and the runtime's defaults apply. It never starts or queries a runtime, and
// writes nothing.
//
// Start at Read; runtimes.go has the rules of each runtime, and finds the file of a running containerd.
package runtimeconf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// Config is the CNI part of a runtime's configuration. All paths are paths on the node.
type Config struct {
	// Runtime is Containerd or CRIO, "" if neither was found.
	Runtime string
	// Files has the runtime's main file and all files that it names, none if it runs with its defaults. Unread is the error of reading
	// one of them or their directories: the runtime may still use older values.
	Files  []string
	Unread error
	// ConfDir is the configuration directory, BinDirs the plugin directories in search order.
	ConfDir string
	BinDirs []string
	// Pending reports that a file was changed or removed after the runtime's start: the runtime may still use older values.
	Pending bool
	// Started is when the runtime created its socket, which it does at each start; zero without a socket.
	Started time.Time
	// Rivals are the sockets of other runtimes on the node, except a containerd beside a distribution's own.
	Rivals []string
	// Disabled reports that containerd's CRI plugin is switched off, so that no kubelet uses it.
	Disabled bool
	// ConfTemplate is a template from which containerd itself writes a configuration into ConfDir, "" for none.
	ConfTemplate string
	// Problems lists files that could not be read, and settings with an uncertain effect.
	Problems []error
}

// Names of runtimes, as in status.nodeInfo.containerRuntimeVersion of a node.
const (
	Containerd = "containerd"
	CRIO       = "cri-o"
)

// Defaults of both runtimes.
const (
	DefaultConfDir = "/etc/cni/net.d"
	DefaultBinDir  = "/opt/cni/bin"
)

// Bounds. Real files have a few KiB, with a few drop-in files.
const (
	maxFile  = 1 << 20
	maxFiles = 100
)

// place has a distribution's socket, which exists while the runtime runs, and its main file.
type place struct{ runtime, socket, file string }

// places lists first the distributions with their own runtime, because a containerd beside it is Docker's.
func places() []place {
	return []place{
		{Containerd, "/run/k3s/containerd/containerd.sock", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"},
		{Containerd, "/run/k3s/containerd/containerd.sock", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"},
		{Containerd, "/var/snap/microk8s/common/run/containerd.sock", "/var/snap/microk8s/current/args/containerd.toml"},
		{Containerd, "/run/k0s/containerd.sock", "/etc/k0s/containerd.toml"},
		{CRIO, "/run/crio/crio.sock", crioFile},
		{Containerd, "/run/containerd/containerd.sock", "/etc/cri/containerd.toml"}, // Talos
		{Containerd, "/run/containerd/containerd.sock", "/etc/containerd/config.toml"},
	}
}

// Read returns the configuration of the node whose file system is at root. A running runtime has priority over one that has only a file.
func Read(root string) Config {
	r := &reader{root: root}
	at, found := r.find()
	if !found {
		return Config{}
	}
	r.searched = nil
	r.Config = Config{Runtime: at.runtime, ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}}
	if at.runtime == CRIO {
		r.crio()
	} else {
		r.containerd(at.file)
	}
	for i, dir := range r.BinDirs {
		r.BinDirs[i] = path.Clean(dir)
	}
	r.ConfDir = path.Clean(r.ConfDir)
	if r.exists(at.socket) {
		r.Started = r.changed(at.socket)
	}
	r.Pending, r.Rivals = r.pending(at), r.rivals(at)
	return r.Config
}

// Doubt returns an error if it is not clear which configuration the pods of the node get.
func (c Config) Doubt() error {
	switch {
	case c.Runtime == "":
		return errors.New("there is neither a socket nor a configuration file of containerd or CRI-O")
	case len(c.Rivals) > 0:
		return fmt.Errorf("several runtimes are on this node: %s, and the sockets %s", strings.Join(c.Files, " "), strings.Join(c.Rivals, " "))
	case c.Disabled:
		return fmt.Errorf("containerd's CRI plugin is switched off, so the kubelet has another runtime: %s", strings.Join(c.Files, " "))
	}
	return c.Unread
}

// pending compares the change times of the files and their directories with the runtime's start. It is true without a socket.
func (r *reader) pending(at place) bool {
	names := slices.Clone(r.searched)
	for _, p := range places() {
		if len(r.Files) == 0 && p.socket == at.socket { // any of the files may have been its main file
			names = append(names, p.file)
		}
	}
	for _, file := range r.Files {
		names = append(names, file, path.Dir(file))
	}
	return !r.exists(at.socket) || slices.ContainsFunc(names, func(name string) bool { return r.changed(name).After(r.Started) })
}

// changed returns the time of the last status change of a file, which no process can set. For a missing file it is the time of
// the parent directory because the file may have been removed from there.
func (r *reader) changed(file string) time.Time {
	seen, err := hostpath.Resolve(r.root, file)
	for ; err == nil && len(seen) >= len(r.root); seen = filepath.Dir(seen) {
		if info, err := os.Stat(seen); err == nil {
			return time.Unix(info.Sys().(*syscall.Stat_t).Ctim.Unix()) //nolint:forcetypeassert // of Linux
		}
	}
	return time.Time{}
}

// rivals returns the other runtimes' sockets. Docker brings a containerd to nodes with a distribution's own, and cri-dockerd
// has no file with its CNI directories.
func (r *reader) rivals(at place) (all []string) {
	const docker, dockerd = "/run/containerd/containerd.sock", "/run/cri-dockerd.sock"
	if r.exists(dockerd) || r.exists("/var"+dockerd) {
		all = []string{dockerd}
	}
	for _, p := range places() {
		beside := p.socket == docker && at.runtime == Containerd
		if p.socket != at.socket && !beside && !slices.Contains(all, p.socket) && r.exists(p.socket) {
			all = append(all, p.socket)
		}
	}
	return all
}

type reader struct {
	Config

	root string
	// searched has the directories in which files were looked up, whether they exist or not.
	searched []string
}

func (r *reader) find() (at place, found bool) {
	all, started := places(), r.started()
	for i, p := range all {
		if file := started[p.socket]; file != "" && p.runtime == Containerd {
			all[i].file = file
		}
	}
	for _, wants := range []func(place) bool{
		func(p place) bool { return r.exists(p.socket) && r.configured(p) },
		func(p place) bool { return r.exists(p.socket) },
		r.configured,
	} {
		for _, p := range all {
			if wants(p) {
				return p, true
			}
		}
	}
	return place{}, false
}

func (r *reader) configured(p place) bool {
	return r.exists(p.file) || p.runtime == CRIO && len(r.glob(crioDropIns)) > 0
}

func (r *reader) exists(file string) bool {
	seen, err := hostpath.Resolve(r.root, file)
	if err == nil {
		_, err = os.Stat(seen)
	}
	return !absent(err)
}

func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) }

func (r *reader) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Errorf(format, args...))
}

func (r *reader) unread(name string, err error) {
	r.problem("file %q: the runtime's configuration cannot be read: %w", name, err)
	r.Unread = cmp.Or(r.Unread, r.Problems[len(r.Problems)-1])
}

// decode reads a file into a value, at most once per file. It reports whether the file was read.
func (r *reader) decode(file string, into any) bool {
	if slices.Contains(r.Files, file) {
		return false
	}
	if len(r.Files) >= maxFiles {
		r.unread(file, fmt.Errorf("the runtime has more than %d files", maxFiles))
		return false
	}
	r.Files = append(r.Files, file)
	seen, err := hostpath.Resolve(r.root, file)
	var text []byte
	if err == nil {
		text, _, err = hostfs.ReadFile(seen, maxFile)
	}
	if err == nil {
		if err = toml.Unmarshal(text, into); err != nil {
			err = fmt.Errorf("reading TOML: %w", err)
		}
	}
	if err != nil {
		r.unread(file, err)
	}
	return err == nil
}

// glob returns the files of the node that match a pattern of filepath.Glob, sorted.
func (r *reader) glob(pattern string) []string {
	if !strings.ContainsAny(pattern, `*?[\`) {
		if r.exists(pattern) {
			return []string{pattern}
		}
		return nil
	}
	dir, base := path.Split(pattern)
	r.searched = append(r.searched, path.Clean(dir))
	var all []string
	for _, dir := range r.glob(path.Clean(dir)) {
		for _, e := range r.entries(dir) {
			if is, _ := filepath.Match(base, e.Name()); is && len(all) <= maxFiles {
				all = append(all, path.Join(dir, e.Name()))
			}
		}
	}
	return all
}

// entries returns the sorted entries of a directory. An unreadable directory is a problem, unless it is absent.
func (r *reader) entries(dir string) []fs.DirEntry {
	var entries []fs.DirEntry
	seen, err := hostpath.Resolve(r.root, dir)
	if err == nil {
		entries, err = os.ReadDir(seen)
	}
	if err != nil && !absent(err) {
		r.unread(dir, err)
	}
	return entries
}
