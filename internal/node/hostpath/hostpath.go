// Package hostpath finds files of the node as this process sees them, which may be from inside of a container.
//
// It promises to search a path of the node below each prefix under which the node's file system may be mounted, not to
// follow links of the node which lead out of such a prefix (/var/run), and never to mistake a procfs of the container for
// the node's. It opens nothing and changes nothing.
//
// Start reading at [View].
package hostpath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// View is where this process sees the node's file system.
type View struct {
	// Roots are prefixes under which paths of the node are seen, best first. Without any they are seen as they are.
	Roots []string
	// Proc is the procfs of the node, "" if it is not seen.
	Proc string
}

// Detect returns the view of this moment: the roots that exist, and the procfs below one of them or as it is. The first
// process of a procfs sees the processes of its own container only, so its procfs is not the node's.
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

// Candidates returns the paths at which a path of the node may be seen, best first. The last resort is the root directory of
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

// Existing returns the paths at which one of the paths of the node exists, each once: below a root, or as it is spelled on the
// node, where a container may have it mounted. A path that exists nowhere is returned as it is, so that an error names it.
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

// Find returns the path at which a file of the node is visible if it exists. It reports whether such a file would be
// visible: this process sees its directory, or the node's whole file system.
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

// below spells a path of the node below a root. /var/run is a link to /run, which leads out of the root when it is followed
// here, unless a container has a mount there.
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
