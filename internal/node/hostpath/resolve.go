package hostpath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxLinks is the kernel's bound for links in one path, path_resolution(7).
const maxLinks = 40

// Resolve returns where a path of the node is below root, with every link followed as the node itself follows it: an absolute
// target begins at root again, and ".." does not leave it. Parts that do not exist stay as they are spelled. The error is ELOOP.
func Resolve(root, path string) (string, error) {
	return Walk(root, path, func(string, string) bool { return true })
}

// Walk is Resolve. It calls step with each directory on the way and the name in it that is looked up next. If step returns false
// the walk ends there, and the result is empty.
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
		if err != nil { // no link, or absent
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
