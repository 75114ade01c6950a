package runtimeconf

import (
	"cmp"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// version3 is the version of the format since containerd 2.
const version3 = 3

// containerdFile is a file of containerd (cmd/containerd/server/config). Version 1, the default, names plugins without
// "io.containerd"; version 3, of containerd 2, has only the section of the CRI plugin's runtime part.
type containerdFile struct {
	Version         int      `toml:"version"`
	Imports         []string `toml:"imports"`
	DisabledPlugins []string `toml:"disabled_plugins"`
	Plugins         struct {
		V1 *criPlugin `toml:"cri"`
		V2 *criPlugin `toml:"io.containerd.grpc.v1.cri"`
		V3 *criPlugin `toml:"io.containerd.cri.v1.runtime"`
	} `toml:"plugins"`
}

type criPlugin struct {
	CNI struct {
		BinDir       string   `toml:"bin_dir"`
		BinDirs      []string `toml:"bin_dirs"` // since containerd 2.1
		ConfDir      string   `toml:"conf_dir"`
		ConfTemplate string   `toml:"conf_template"`
	} `toml:"cni"`
}

func (f *containerdFile) section() *criPlugin {
	if f.Version >= version3 {
		return f.Plugins.V3
	}
	return cmp.Or(f.Plugins.V2, f.Plugins.V1, f.Plugins.V3) // containerd 2 also reads V3 from an older version
}

// containerd reads the main file and its imports, each once, breadth first like LoadConfig.
func (r *reader) containerd(main string) {
	if !r.exists(main) {
		return
	}
	for pending, first := []string{main}, true; len(pending) > 0; pending = pending[1:] {
		var f containerdFile
		if !r.decode(pending[0], &f) {
			continue
		}
		r.checkFile(pending[0], &f, first)
		if s := f.section(); s != nil {
			r.apply(s)
			first = false
		}
		pending = append(pending, r.imports(pending[0], f.Imports)...)
	}
}

// checkFile adds the problems of a file; first reports that no earlier file has a section of the CRI plugin.
func (r *reader) checkFile(file string, f *containerdFile, first bool) {
	if slices.ContainsFunc(f.DisabledPlugins, func(id string) bool {
		return id == "cri" || id == "io.containerd.grpc.v1.cri" || id == "io.containerd.cri.v1.runtime"
	}) {
		r.Disabled = true
		r.problem("file %q: disabled_plugins: containerd does not serve Kubernetes: its CRI plugin is switched off", file)
	}
	if f.Version >= version3 && f.Plugins.V2 != nil {
		r.problem("file %q: containerd ignores the section \"io.containerd.grpc.v1.cri\" in a file of version %d: its name is "+
			"\"io.containerd.cri.v1.runtime\" there", file, f.Version)
	}
	if s := f.section(); s != nil && !first && r.omitsDir(s) {
		r.problem("file %q: replaces the section of the CRI plugin without its key cni: some versions of containerd take the default "+
			"directories then, others keep the directories of the file before it", file)
	}
}

// omitsDir reports whether a section leaves out a directory that an earlier file has set: containerd 1 replaces whole sections.
func (r *reader) omitsDir(s *criPlugin) bool {
	return s.CNI.ConfDir == "" && r.ConfDir != DefaultConfDir ||
		s.CNI.BinDir == "" && len(s.CNI.BinDirs) == 0 && !slices.Equal(r.BinDirs, []string{DefaultBinDir})
}

func (r *reader) apply(s *criPlugin) {
	cni := s.CNI
	r.ConfDir, r.ConfTemplate = cmp.Or(cni.ConfDir, r.ConfDir), cmp.Or(cni.ConfTemplate, r.ConfTemplate)
	if cni.BinDir != "" {
		r.BinDirs = []string{cni.BinDir}
	}
	if len(cni.BinDirs) > 0 {
		r.BinDirs = slices.Clone(cni.BinDirs)
	}
}

// imports resolves a list of imports by the rules of containerd's resolveImports: relative to the file, with "*" as a
// pattern.
func (r *reader) imports(file string, list []string) (all []string) {
	for _, one := range list {
		if !path.IsAbs(one) {
			one = path.Join(path.Dir(file), one)
		}
		if strings.Contains(one, "*") {
			all = append(all, r.glob(path.Clean(one))...)
		} else {
			all = append(all, path.Clean(one))
		}
	}
	return all
}

// Files of CRI-O, crio.conf(5) and crio.conf.d(5).
const (
	crioFile    = "/etc/crio/crio.conf"
	crioDropIns = "/etc/crio/crio.conf.d/*"
)

// crioConf is the section of a file of CRI-O. plugin_dir is a deprecated key, searched after plugin_dirs.
type crioConf struct {
	CRIO struct {
		Network struct {
			NetworkDir string   `toml:"network_dir"`
			PluginDir  string   `toml:"plugin_dir"`
			PluginDirs []string `toml:"plugin_dirs"`
		} `toml:"network"`
	} `toml:"crio"`
}

// crio reads the main file and the drop-in files in the order of their names. A later file replaces single keys of an earlier one.
func (r *reader) crio() {
	files := r.glob(crioDropIns)
	if r.exists(crioFile) {
		files = append([]string{crioFile}, files...)
	}
	extra := ""
	for _, file := range files {
		var f crioConf
		if !r.decode(file, &f) {
			continue
		}
		network := f.CRIO.Network
		r.ConfDir, extra = cmp.Or(network.NetworkDir, r.ConfDir), cmp.Or(network.PluginDir, extra)
		if len(network.PluginDirs) > 0 {
			r.BinDirs = network.PluginDirs
		}
	}
	if extra != "" {
		r.BinDirs = append(r.BinDirs, extra)
	}
}

// maxArguments bounds the command line of a runtime, in bytes.
const maxArguments = 64 << 10

// started returns the main files of the running containerds by their sockets, for k3s with another --data-dir, or a user's own
// unit. It accepts only processes of root in the mount namespace of the node's first process, because a pod can run a program
// of any name.
func (r *reader) started() map[string]string {
	files := map[string]string{}
	proc := filepath.Join(r.root, "proc")
	mounts, err := os.Readlink(proc + "/1/ns/mnt")
	entries, _ := os.ReadDir(proc)
	for _, e := range entries {
		dir := filepath.Join(proc, e.Name())
		name, unread := os.ReadFile(filepath.Join(dir, "comm")) //nolint:gosec // a procfs; unlike cmdline it waits for no lock of the process
		if err != nil || unread != nil || string(name) != "containerd\n" {
			continue
		}
		if own, err := os.Readlink(filepath.Join(dir, "ns/mnt")); err != nil || own != mounts || !ofRoot(dir) {
			continue
		}
		if text, _, err := hostfs.ReadFile(filepath.Join(dir, "cmdline"), maxArguments); err == nil {
			if config, socket := containerdArguments(strings.Split(string(text), "\x00")); path.IsAbs(config) {
				files[socket] = path.Clean(config)
			}
		}
	}
	return files
}

func ofRoot(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Sys().(*syscall.Stat_t).Uid == 0 //nolint:forcetypeassert // of Linux
}

// containerdArguments returns --config and --address from a command line of containerd. It removes a leading "/var" from the
// address if that path leads to /run.
func containerdArguments(args []string) (config, socket string) {
	socket = "/run/containerd/containerd.sock"
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		switch strings.TrimLeft(name, "-") {
		case name: // not a flag
		case "config", "c":
			config = value
		case "address", "a":
			socket = strings.Replace(value, "/var/run/", "/run/", 1)
		}
	}
	return config, socket
}
