package hostfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// ReadFile returns the content and the mode of a regular file, or of the target of a symbolic link. For another kind of file the
// error is ErrNotRegular, without waiting; for a file of more than limit bytes it is ErrTooLarge.
func ReadFile(path string, limit int64) ([]byte, fs.FileMode, error) {
	data, mode, err := readFile(path, limit)
	return data, mode, wrapPath("reading", path, err)
}

func readFile(path string, limit int64) ([]byte, fs.FileMode, error) {
	file, info, err := openRegular(path)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = file.Close() }() // only read
	// The size can change, and some file systems do not report it.
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return nil, 0, cause(err)
	}
	if int64(len(data)) > limit {
		return nil, 0, fmt.Errorf("%w: at most %d bytes are read", ErrTooLarge, limit)
	}
	return data, info.Mode(), nil
}

// openRegular opens a regular file for reading. It does not open other kinds because open(2) can wait for the other end of a
// pipe, or start a device.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	if root, _ := hostpath.Root(path); root != "/" {
		if seen, err := hostpath.Follow(path); err == nil {
			path = seen
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, cause(err)
	}
	if !info.Mode().IsRegular() {
		return nil, nil, ErrNotRegular
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) //nolint:gosec // the caller's path
	if err != nil {
		return nil, nil, cause(err)
	}
	info, err = file.Stat() // the file may have been replaced
	if err == nil && !info.Mode().IsRegular() {
		err = ErrNotRegular
	}
	if err != nil {
		return nil, nil, errors.Join(cause(err), file.Close())
	}
	return file, info, nil
}

// List returns the names in the directory that want accepts (nil: all), in byte order. Like libcni it skips directories and
// follows no links.
func List(dir string, want func(name string) bool) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, wrapPath("listing", dir, inDirectory(dir, err))
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && (want == nil || want(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
