package hostpath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Root divides a path of this process behind the root directory of another process (/host/proc/1/root): the kernel goes there,
// but the text of that link is "/" (proc_pid_root(5)), so a walk over the links of a path has to begin there. The root of any
// other path is "/".
func Root(path string) (root, rest string) {
	parts := strings.Split(filepath.Clean(path), "/")
	for i := range len(parts) - 2 {
		if parts[i] == "proc" && parts[i+2] == "root" && parts[i+1] != "" && strings.Trim(parts[i+1], "0123456789") == "" {
			return strings.Join(parts[:i+3], "/"), "/" + strings.Join(parts[i+3:], "/")
		}
	}
	return "/", path
}

// Follow returns a path without links, which exists. Below the root directory of another process absolute links lead there, where
// the kernel would follow them into this container.
func Follow(path string) (string, error) {
	root, rest := Root(path)
	if root == "/" {
		return filepath.EvalSymlinks(path)
	}
	seen, err := Resolve(root, rest)
	if err == nil {
		_, err = os.Lstat(seen)
	}
	return seen, err
}

// Whole returns the first of the roots below which the node's whole file system is seen, not only what is mounted there, "" for
// none.
func Whole(roots ...string) string {
	at := slices.IndexFunc(roots, func(root string) bool {
		return exists(filepath.Join(root, "etc")) && exists(filepath.Join(root, "usr"))
	})
	if at < 0 {
		return ""
	}
	return roots[at]
}

// Same reports whether two paths are one directory, which may be mounted twice.
func Same(a, b string) bool {
	one, err := os.Stat(a)
	other, otherErr := os.Stat(b)
	return err == nil && otherErr == nil && os.SameFile(one, other)
}
