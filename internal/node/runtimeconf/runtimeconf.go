// Package runtimeconf reads where the node's container runtime looks for CNI configuration and plugins: containerd 1 and 2, also
// those of k3s, RKE2, MicroK8s, k0s and Talos, and CRI-O.
//
// It promises the values that the runtime has after its own rules (versions of the file, imports, drop-in files, defaults), that
// links of the node are followed below the given root only, and bounds for files and their number. Nothing is an error: what
// could not be read is among the Problems, and the runtime's defaults count. It never starts or queries a runtime, and writes nothing.
//
// Start at Read; containerd.go and crio.go have the rules of each runtime, process.go where a running containerd has its file.
package runtimeconf

import (
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

// Config is the part of a runtime's configuration that is about CNI. All paths are the node's.
type Config struct {
	// Runtime is Containerd or CRIO, "" if there is neither.
	Runtime string
	// Source is the runtime's main file, "" if it runs by its defaults. Files are all that were read, Source among them.
	Source string
	Files  []string
	// ConfDir is the configuration directory, BinDirs the directories of plugins in the order in which they are searched.
	ConfDir string
	BinDirs []string
	// MaxConfNum is the number of configurations that the runtime loads; 0 is all of them.
	MaxConfNum int
	// Pending reports that a file was changed after the runtime was started, which may have the values of before then.
	Pending bool
	// Rivals are the sockets of other runtimes that are there as well; a containerd beside a distribution's own is not one.
	Rivals []string
	// ConfTemplate is a template from which containerd itself writes a configuration into ConfDir, "" for none.
	ConfTemplate string
	// Problems are files that could not be read, and settings whose effect is not certain.
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

// Bounds: real files have a few KiB, and a few drop-in files beside them.
const (
	maxFile  = 1 << 20
	maxFiles = 100
)

// place is a distribution's socket, which exists while the runtime runs, and main file.
type place struct{ runtime, socket, file string }

// places has the distributions that bring a runtime of their own first: a containerd beside it is Docker's.
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

// Read returns the configuration of the node whose file system is at root. A running runtime goes before one that has only a file.
func Read(root string) Config {
	r := &reader{root: root, done: map[string]bool{}}
	at, found := r.find()
	if !found {
		return Config{}
	}
	r.Runtime, r.ConfDir, r.BinDirs = at.runtime, DefaultConfDir, []string{DefaultBinDir}
	if at.runtime == CRIO {
		r.crio()
	} else {
		r.containerd(at.file)
	}
	for i, dir := range r.BinDirs {
		r.BinDirs[i] = path.Clean(dir)
	}
	r.ConfDir = path.Clean(r.ConfDir)
	r.Pending, r.Rivals = r.pending(at), r.rivals(at)
	return r.Config
}

// pending compares when the files and their directories changed with when the runtime made its socket, which it does at each
// start. Without a socket nothing is known.
func (r *reader) pending(at place) bool {
	started, ok := r.changed(at.socket)
	if !ok {
		return true
	}
	for _, file := range r.Files {
		for _, name := range []string{file, path.Dir(file)} {
			if when, ok := r.changed(name); ok && when.After(started) {
				return true
			}
		}
	}
	return false
}

// changed is the time of the last change of a file's status, which no process can set.
func (r *reader) changed(file string) (when time.Time, ok bool) {
	seen, err := hostpath.Resolve(r.root, file)
	if err != nil {
		return time.Time{}, false
	}
	info, err := os.Stat(seen)
	if err != nil {
		return time.Time{}, false
	}
	return time.Unix(info.Sys().(*syscall.Stat_t).Ctim.Unix()), true //nolint:forcetypeassert // of Linux
}

// rivals are the other runtimes' sockets. Docker brings a containerd to nodes with a distribution's own.
func (r *reader) rivals(at place) (all []string) {
	const docker = "/run/containerd/containerd.sock"
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
	done map[string]bool
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
	return err == nil || errors.Is(err, fs.ErrPermission)
}

func (r *reader) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Errorf(format, args...))
}

// decode reads a file once into a value. It reports whether the file was read.
func (r *reader) decode(file string, into any) bool {
	if r.done[file] {
		return false
	}
	r.done[file] = true
	if len(r.Files) >= maxFiles {
		r.problem("file %q: not read: the runtime has more than %d files", file, maxFiles)
		return false
	}
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
		r.problem("file %q: the runtime's configuration cannot be read: %w", file, err)
		return false
	}
	r.Files = append(r.Files, file)
	return true
}

// glob returns the files of the node that a pattern matches, as filepath.Glob does, sorted.
func (r *reader) glob(pattern string) []string {
	if !strings.ContainsAny(pattern, `*?[\`) {
		if r.exists(pattern) {
			return []string{pattern}
		}
		return nil
	}
	dir, base := path.Split(pattern)
	var all []string
	for _, dir := range r.glob(path.Clean(dir)) {
		seen, err := hostpath.Resolve(r.root, dir)
		if err != nil {
			continue
		}
		entries, _ := os.ReadDir(seen) // sorted
		for _, e := range entries {
			if is, _ := filepath.Match(base, e.Name()); is && len(all) <= maxFiles {
				all = append(all, path.Join(dir, e.Name()))
			}
		}
	}
	return all
}
