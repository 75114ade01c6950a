package hostpath

import (
	"fmt"
	"os"
	"path/filepath"
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
