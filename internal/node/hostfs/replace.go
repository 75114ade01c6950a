package hostfs

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrChanged is a file that is not what the caller took it for. Nothing was changed.
var ErrChanged = errors.New("another program changed it just now")

// Replace is WriteFile for a file that has other writers: it takes the place of this old content only, nil meaning that
// there is no file, and of any other it is ErrChanged. Both contents change places in one step, and what came out is
// looked at then. What another writer put there goes back, and is never removed: if it cannot go back, it stays under the
// temporary name, and the next sweep brings it back. File systems that cannot exchange are looked at right before the
// rename instead.
func (d Disk) Replace(path string, old, data []byte, mode fs.FileMode) error {
	target, info, err := d.resolve(path)
	if err == nil && (info == nil) != (old == nil) {
		err = ErrChanged
	}
	if err == nil {
		err = d.replaceOld(target, old, data, func(temp *os.File) error { return d.fill(temp, data, mode, info) })
	}
	return wrapPath("writing", path, err)
}

func (d Disk) replaceOld(path string, old, data []byte, fill func(temp *os.File) error) error {
	temp, err := d.create(path, fingerprint(data))
	if err != nil {
		return err
	}
	done := false
	if err = d.complete(temp, fill); err == nil {
		done, err = d.swap(temp.Name(), path, old, data)
	}
	if err != nil && !done {
		_ = d.ops().Remove(temp.Name()) // the next sweep tries again
	}
	if err != nil {
		return err
	}
	return d.syncDir(filepath.Dir(path))
}

// swap puts the temporary file in the place of the old content and removes that. It reports whether the temporary file is
// no longer this write's to remove.
func (d Disk) swap(temp, path string, old, data []byte) (done bool, err error) {
	if old == nil {
		return false, d.moveNew(temp, path)
	}
	err = d.ops().RenameFlags(temp, path, unix.RENAME_EXCHANGE)
	switch {
	case unsupported(err):
		if !holds(path, old) {
			return false, ErrChanged
		}
		return false, wrap("renaming temporary file", d.ops().Rename(temp, path))
	case errors.Is(err, fs.ErrNotExist):
		return false, ErrChanged
	case err != nil:
		return false, wrap("exchanging with temporary file", err)
	case !holds(temp, old):
		return true, errors.Join(ErrChanged, d.undo(temp, path, digestOf(data)))
	}
	_ = d.ops().Remove(temp) // the next sweep tries again
	return true, nil
}

// undo takes back an exchange of the temporary file with the file at path, and removes the temporary file when it holds
// the content of this digest again. Anything else in it was put at path by a third writer meanwhile: that is the latest, so
// it goes back in turn, and what it replaced is expected then.
func (d Disk) undo(temp, path string, ours [sha256.Size]byte) error {
	const attempts = 100
	for range attempts {
		theirs := fileDigest(temp)
		err := d.ops().RenameFlags(temp, path, unix.RENAME_EXCHANGE)
		if errors.Is(err, fs.ErrNotExist) {
			err = d.moveNew(temp, path)
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if errors.Is(err, ErrChanged) {
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("exchanging back, the other content stays in %q until the next sweep: %w", temp, cause(err))
		}
		if ours != [sha256.Size]byte{} && fileDigest(temp) == ours {
			_ = d.ops().Remove(temp) // the next sweep tries again
			return nil
		}
		ours = theirs
	}
	return fmt.Errorf("exchanging back, the other content stays in %q: the file changes all the time", temp)
}

// undoInterrupted brings back what a process put under a temporary name and was killed before it could look at it: its own
// content is at path then, and not in the temporary file. Whether that is the case, the temporary name says: it has the
// fingerprint of the process' own content.
func (d Disk) undoInterrupted(temp, path string) error {
	_, digits, _ := strings.Cut(filepath.Base(temp), ownMark)
	if len(digits) <= fingerprintDigits {
		return nil
	}
	at := fileDigest(path)
	if printOf(at) != digits[:fingerprintDigits] || fileDigest(temp) == at {
		return nil
	}
	return d.undo(temp, path, at)
}

// fingerprintDigits are enough for any number of 64 bits.
const fingerprintDigits = 20

// fingerprint are digits by which a content is known again.
func fingerprint(content []byte) string { return printOf(digestOf(content)) }

func printOf(digest [sha256.Size]byte) string {
	return fmt.Sprintf("%0*d", fingerprintDigits, binary.BigEndian.Uint64(digest[:]))
}

func digestOf(content []byte) [sha256.Size]byte { return sha256.Sum256(content) }

// fileDigest is zero for a file that cannot be read.
func fileDigest(path string) [sha256.Size]byte {
	sum, err := (*Digests)(nil).sum(path)
	if err != nil {
		return [sha256.Size]byte{}
	}
	return sum
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
