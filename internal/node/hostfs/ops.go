package hostfs

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Ops are the operations that change the node's files, each one system call as far as the result shows. [Kernel]
// does them. Reading is not among them.
type Ops interface {
	// Create makes a file that must not exist yet, for writing, readable by its owner alone.
	Create(path string) (*os.File, error)
	Write(file *os.File, data []byte) (int, error)
	Chown(file *os.File, uid, gid int) error
	Chmod(file *os.File, mode fs.FileMode) error
	Sync(file *os.File) error
	// Close closes the file even if it fails.
	Close(file *os.File) error
	// Rename is renameat2(2): EINVAL is a file system that does not know the flags.
	Rename(from, to string, flags uint) error
	// Remove removes a file, a link or an empty directory.
	Remove(path string) error
	Symlink(target, link string) error
	Mkdir(path string, mode fs.FileMode) error
	// SyncDir makes creations, renames and removals in the directory outlive a loss of power.
	SyncDir(path string) error
}

// Kernel implements Ops by system calls.
type Kernel struct{}

// Create calls open(2) with O_EXCL, which follows no link.
func (Kernel) Create(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the caller's path
}

// Write calls write(2) until all is written.
func (Kernel) Write(file *os.File, data []byte) (int, error) { return file.Write(data) }

// Chown calls fchown(2).
func (Kernel) Chown(file *os.File, uid, gid int) error { return file.Chown(uid, gid) }

// Chmod calls fchmod(2).
func (Kernel) Chmod(file *os.File, mode fs.FileMode) error { return file.Chmod(mode) }

// Sync calls fsync(2).
func (Kernel) Sync(file *os.File) error { return file.Sync() }

// Close calls close(2).
func (Kernel) Close(file *os.File) error { return file.Close() }

// Rename calls renameat2(2), and rename(2) without flags, which every file system knows.
func (Kernel) Rename(from, to string, flags uint) error {
	if flags == 0 {
		return os.Rename(from, to)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags); err != nil {
		return &os.LinkError{Op: "renameat2", Old: from, New: to, Err: err}
	}
	return nil
}

// Remove calls unlink(2) or rmdir(2).
func (Kernel) Remove(path string) error { return os.Remove(path) }

// Symlink calls symlink(2).
func (Kernel) Symlink(target, link string) error { return os.Symlink(target, link) }

// Mkdir calls mkdir(2), so the umask counts.
func (Kernel) Mkdir(path string, mode fs.FileMode) error { return os.Mkdir(path, mode) }

// SyncDir calls fsync(2) for a directory. A file system without fsync of directories is no error: it has no better
// guarantee.
func (Kernel) SyncDir(path string) (err error) {
	dir, err := os.Open(path) //nolint:gosec // the caller's path
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	if err := dir.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}
