package runtimeconf

import (
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// maxArguments bounds the command line of a runtime, in bytes.
const maxArguments = 64 << 10

// started returns the main files of the running containerds by their sockets: k3s with another --data-dir, or a unit of the
// user's own. A process counts if it is root's and in the mount namespace of the node's first process, because a pod can run a
// program of any name.
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

// containerdArguments returns --config and --address of a command line of containerd, the latter without its first "/var" if that
// leads to /run.
func containerdArguments(args []string) (config, socket string) {
	socket = "/run/containerd/containerd.sock"
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		switch strings.TrimLeft(name, "-") {
		case name: // no flag
		case "config", "c":
			config = value
		case "address", "a":
			socket = strings.Replace(value, "/var/run/", "/run/", 1)
		}
	}
	return config, socket
}
