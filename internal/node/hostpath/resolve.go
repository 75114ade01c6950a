package hostpath

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// maxLinks is the kernel's limit of links in one path, path_resolution(7).
const maxLinks = 40

// Resolve returns the path below root of a path of the node. It follows links as the node does: an absolute target begins at root,
// and ".." does not leave root. Missing elements keep their spelling. The only error is ELOOP.
func Resolve(root, path string) (string, error) {
	return Walk(root, path, func(string, string) bool { return true })
}

// Walk is Resolve with a callback. It calls step with each directory on the way and the next name to look up in it. If step returns
// false, the walk ends and the result is empty.
func Walk(root, path string, step func(dir, name string) bool) (string, error) {
	at, links := "/", 0
	for rest := strings.Split(path, "/"); len(rest) > 0; {
		next, dir := rest[0], filepath.Join(root, at)
		rest = rest[1:]
		switch next {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		if !step(dir, next) {
			return "", nil
		}
		target, err := os.Readlink(filepath.Join(dir, next))
		if err != nil { // not a link, or missing
			at = filepath.Join(at, next)
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("path %q: %w", path, syscall.ELOOP)
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return filepath.Join(root, at), nil
}

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

// Whole returns the first root below which the node's whole file system is visible, rather than single mounts, or "".
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
