// Package hostpath finds files of the node from this process, which may run in a container.
//
// It promises to search a path of the node below each prefix under which the node's file system may be mounted, not to
// follow the node's links out of such a prefix (/var/run), and never to mistake the container's procfs for the node's. It
// opens nothing and changes nothing.
//
// Start reading at [View].
package hostpath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// View is the location of the node's file system for this process.
type View struct {
	// Roots are prefixes of the node's paths, best first. Without a root, the node's paths need no prefix.
	Roots []string
	// Proc is the path of the node's procfs, or "" if this process cannot see it.
	Proc string
}

// Detect returns the current view: the existing roots, and the procfs below one of them or at proc itself. If this
// process is PID 1, the procfs at proc is its container's, so Detect rejects it.
func Detect(roots []string, proc string) View {
	v := View{Roots: slices.DeleteFunc(slices.Clone(roots), func(root string) bool { return !exists(root) })}
	for _, root := range v.Roots {
		if seen := filepath.Join(root, proc); exists(filepath.Join(seen, "1/ns")) {
			v.Proc = seen
			return v
		}
	}
	if exists(filepath.Join(proc, "1/ns")) && os.Getpid() != 1 {
		v.Proc = proc
	}
	return v
}

// Candidates returns the paths here that may lead to a path of the node, best first. The last resort is the root directory of
// the node's first process.
func (v View) Candidates(path string) []string {
	path = filepath.Clean(path)
	if rest, found := strings.CutPrefix(path, "/proc/"); found {
		return []string{filepath.Join(v.Proc, rest)}
	}
	var all []string
	if len(v.Roots) == 0 {
		all = append(all, path)
	}
	roots := v.Roots
	if v.Proc != "" {
		roots = append(slices.Clone(roots), filepath.Join(v.Proc, "1/root"))
	}
	for _, root := range roots {
		all = append(all, below(root, path)...)
	}
	return all
}

// Existing returns the paths at which one of the node's paths exists, each once: below a root, or at the node's own path, where
// a container may have a mount. It returns a path that exists nowhere unchanged, so that an error names it.
func (v View) Existing(paths ...string) []string {
	var all []string
	for _, path := range paths {
		found := false
		for _, root := range append(slices.Clone(v.Roots), "/") {
			seen := filepath.Join(root, path)
			if !exists(seen) {
				continue
			}
			if found = true; !slices.Contains(all, seen) {
				all = append(all, seen)
			}
		}
		if !found {
			all = append(all, path)
		}
	}
	return all
}

// Find returns the path at which a file of the node would be visible, and whether an existing file is visible: this process
// sees the directory, or the node's whole file system.
func (v View) Find(file string) (string, bool) {
	if len(v.Roots) == 0 {
		return file, true
	}
	for _, root := range v.Roots {
		for _, seen := range below(root, filepath.Clean(file)) {
			if exists(filepath.Dir(seen)) || exists(filepath.Join(root, "usr")) {
				return seen, true
			}
		}
	}
	return "", false
}

// below returns the spellings of a node's path below a root. /var/run is a link to /run, which leads out of the root here
// unless the container has a mount there.
func below(root, path string) []string {
	if rest, found := strings.CutPrefix(path, "/var/run/"); found {
		return []string{filepath.Join(root, "run", rest), filepath.Join(root, path)}
	}
	return []string{filepath.Join(root, path)}
}

// exists reports whether stat(2) finds a file at a path.
func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
