package hostfs

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrChanged is a file that is not what the caller took it for. Nothing was changed.
var ErrChanged = errors.New("somebody else changed it just now")

// Replace is WriteFile for a file that has other writers: it takes the place of this old content only, nil meaning that
// there is no file, and of any other it is ErrChanged. Both contents change places in one step, and what came out is
// looked at then: of a writer that came between, nothing is lost. File systems that cannot do that are looked at right
// before the rename instead.
func (d Disk) Replace(path string, old, data []byte, mode fs.FileMode) error {
	target, info, err := d.resolve(path)
	if err == nil && (info == nil) != (old == nil) {
		err = ErrChanged
	}
	if err == nil {
		err = d.replaceBy(target, func(temp *os.File) error { return d.fill(temp, data, mode, info) }, func(temp string) error {
			return d.swap(temp, target, old)
		})
	}
	return wrapPath("writing", path, err)
}

// swap puts the temporary file in the place of the old content and removes that.
func (d Disk) swap(temp, path string, old []byte) error {
	if old == nil {
		return d.moveNew(temp, path)
	}
	err := d.ops().RenameFlags(temp, path, unix.RENAME_EXCHANGE)
	switch {
	case unsupported(err):
		if !holds(path, old) {
			return ErrChanged
		}
		return wrap("renaming temporary file", d.ops().Rename(temp, path))
	case errors.Is(err, fs.ErrNotExist):
		return ErrChanged
	case err != nil:
		return wrap("exchanging with temporary file", err)
	case !holds(temp, old):
		return errors.Join(ErrChanged, wrap("exchanging back", d.ops().RenameFlags(temp, path, unix.RENAME_EXCHANGE)))
	}
	_ = d.ops().Remove(temp) // the next sweep tries again
	return nil
}

// moveNew renames to a name that must be free.
func (d Disk) moveNew(from, to string) error {
	err := d.ops().RenameFlags(from, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, fs.ErrExist) {
		return ErrChanged
	}
	if !unsupported(err) {
		return wrap("renaming", err)
	}
	if _, err := os.Lstat(to); err == nil {
		return ErrChanged
	}
	return wrap("renaming", d.ops().Rename(from, to))
}

// unsupported tells of a file system that knows plain renames only, renameat2(2).
func unsupported(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOSYS)
}

// holds reports whether the file has this content. One that cannot be read holds nothing.
func holds(path string, content []byte) bool {
	data, _, err := readFile(path, int64(len(content)))
	return err == nil && bytes.Equal(data, content)
}

// Move renames a file of this content to a name that must be free, and to nothing else: it is ErrChanged if somebody wrote
// the one or made the other meanwhile.
func (d Disk) Move(from, to string, content []byte) error {
	err := d.moveNew(from, to)
	if err == nil && !holds(to, content) {
		err = errors.Join(ErrChanged, wrap("renaming back", d.moveNew(to, from)))
	}
	if err == nil {
		err = d.syncDir(filepath.Dir(to))
	}
	return wrapPath("renaming", from, err)
}
