package hostpath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Root splits a path after the root directory of another process (/host/proc/1/root). The kernel follows that link to the other
// root, but its text is "/" (proc_pid_root(5)), so a walk over the links of a path must begin there. The root of any other path
// is "/".
func Root(path string) (root, rest string) {
	parts := strings.Split(filepath.Clean(path), "/")
	for i := range len(parts) - 2 {
		if parts[i] == "proc" && parts[i+2] == "root" && parts[i+1] != "" && strings.Trim(parts[i+1], "0123456789") == "" {
			return strings.Join(parts[:i+3], "/"), "/" + strings.Join(parts[i+3:], "/")
		}
	}
	return "/", path
}

// Follow resolves the links of an existing path. Below the root directory of another process, absolute links stay below that root,
// whereas the kernel would follow them into this container.
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

// Whole returns the first root below which the node's whole file system is visible, rather than single mounts, or
// "".
func Whole(roots ...string) string {
	at := slices.IndexFunc(roots, func(root string) bool {
		return exists(filepath.Join(root, "etc")) && exists(filepath.Join(root, "usr"))
	})
	if at < 0 {
		return ""
	}
	return roots[at]
}

// Same reports whether two paths lead to the same directory, which may be mounted twice.
func Same(a, b string) bool {
	one, err := os.Stat(a)
	other, otherErr := os.Stat(b)
	return err == nil && otherErr == nil && os.SameFile(one, other)
}
