package hostfs

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A Call is a system call that changes the node's files.
type Call struct {
	// Name is create, write, chown, chmod, sync, close, rename, remove, symlink, mkdir or syncdir.
	Name string
	// Path is the file or directory, the old name for rename, and the target for symlink.
	Path string
	// To is the new name for rename, and the link for symlink.
	To string
	// Data is the data of write.
	Data []byte
	// Flags are the flags of rename, see renameat2(2).
	Flags uint
}

// String returns the name and the paths, such as "rename /a/b.tmp.7 /a/b".
func (c Call) String() string { return strings.TrimSpace(c.Name + " " + c.Path + " " + c.To) }

// do makes a call, unless Before refuses it.
func (d Disk) do(c Call, call func() error) error {
	if d.Before != nil {
		if err := d.Before(c); err != nil {
			return err
		}
	}
	return call()
}

// on is do for a call with one path.
func (d Disk) on(name, path string, call func() error) error {
	return d.do(Call{Name: name, Path: path}, call)
}

// rename calls renameat2(2) or, without flags, rename(2), which every file system supports.
func (d Disk) rename(from, to string, flags uint) error {
	return d.do(Call{Name: "rename", Path: from, To: to, Flags: flags}, func() error {
		if flags == 0 {
			return os.Rename(from, to)
		}
		return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags)
	})
}

// remove removes a file, a link or an empty directory.
func (d Disk) remove(path string) error {
	return d.on("remove", path, func() error { return os.Remove(path) })
}

func (d Disk) chmod(file *os.File, mode fs.FileMode) error {
	return wrap("changing mode", d.on("chmod", file.Name(), func() error { return file.Chmod(mode) }))
}

// close closes the file even if Before refuses it.
func (d Disk) close(file *os.File) error {
	refused := d.on("close", file.Name(), func() error { return nil })
	return cmp.Or(file.Close(), refused)
}

// SyncDir makes the names in a directory durable. It is for changes that an earlier call failed to sync. It ignores a file system
// without fsync of directories because there is no stronger guarantee.
func (d Disk) SyncDir(path string) error {
	return wrapPath("syncing directory", path, d.on("syncdir", path, func() error {
		dir, err := os.Open(path) //nolint:gosec // the caller's path
		if err != nil {
			return err
		}
		err = dir.Sync()
		if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
			err = nil
		}
		return cmp.Or(err, dir.Close())
	}))
}
