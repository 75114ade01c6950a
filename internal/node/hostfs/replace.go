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

// ErrChanged means that a file does not have the content that the caller expects. Nothing was changed.
var ErrChanged = errors.New("another program changed it just now")

// maxExchange bounds the bytes of a file that are compared with the expected content.
const maxExchange = 16 << 20

// Replace is WriteFile for a file with other writers: it replaces only the old content (nil: no file), and returns
// ErrChanged for any other content. Replace exchanges the new file with the present file (RENAME_EXCHANGE), reads the
// exchanged file, and exchanges both back if another program wrote it. On file systems without RENAME_EXCHANGE it compares
// the content right before the rename.
func (d Disk) Replace(path string, old, data []byte, mode fs.FileMode) error {
	return d.put(path, data, mode, func(temp, target string) error { return d.exchange(temp, target, old, data) })
}

// exchange swaps the temporary file, which has the content data, with the file at path, and removes the old content. If the
// swapped-out content is not old, exchange swaps both files back and expects data to come out. Any third content is newer
// because another program wrote it in between, and is swapped back in turn.
func (d Disk) exchange(temp, path string, old, data []byte) error {
	if old == nil {
		return d.moveNew(temp, path)
	}
	const attempts = 100
	expected, placed := old, data
	for n := range attempts {
		err := d.rename(temp, path, unix.RENAME_EXCHANGE)
		switch {
		case unsupported(err) && holds(path, old):
			return wrap("renaming temporary file", d.rename(temp, path, 0))
		case unsupported(err), errors.Is(err, fs.ErrNotExist):
			return ErrChanged
		case err != nil:
			return wrap("exchanging with temporary file", err)
		}
		found, _, err := readFile(temp, maxExchange)
		if err == nil && bytes.Equal(found, expected) && n > 0 {
			return ErrChanged
		}
		if err == nil && bytes.Equal(found, expected) {
			_ = d.remove(temp) // the next sweep tries again
			return nil
		}
		expected, placed = placed, found
	}
	return ErrChanged
}

// moveNew renames a file to a name that must be free.
func (d Disk) moveNew(from, to string) error {
	err := d.rename(from, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, fs.ErrExist) {
		return ErrChanged
	}
	if !unsupported(err) {
		return wrap("renaming", err)
	}
	if _, err := os.Lstat(to); err == nil {
		return ErrChanged
	}
	return wrap("renaming", d.rename(from, to, 0))
}

// unsupported reports whether a file system supports no flags of renameat2(2).
func unsupported(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOSYS)
}

// holds reports whether the file is readable and has this content.
func holds(path string, content []byte) bool {
	data, _, err := readFile(path, int64(len(content)))
	return err == nil && bytes.Equal(data, content)
}

// Move renames a file with this content to a name that must be free. It returns ErrChanged if another program wrote the file
// or created the name.
func (d Disk) Move(from, to string, content []byte) error {
	err := d.moveNew(from, to)
	if err == nil && !holds(to, content) {
		err = errors.Join(ErrChanged, wrap("renaming back", d.moveNew(to, from)))
	}
	if err == nil {
		err = d.SyncDir(filepath.Dir(to))
	}
	return wrapPath("renaming", from, err)
}
