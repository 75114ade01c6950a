package hostfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// Errors of ReadFile and Copy for files that they refuse to read.
var (
	ErrNotRegular = errors.New("not a regular file")
	ErrTooLarge   = errors.New("file too large")
)

// A linkError is the error of a symbolic link that does not lead to a regular file. Usually the link is absolute and starts at
// the node's root. The agent sees only a few of the node's directories, under other names.
type linkError struct{ error }

func (e linkError) Unwrap() error { return e.error }

// errNoDirectory is ENOENT because of a missing directory rather than a missing file.
var errNoDirectory = fmt.Errorf("%w", syscall.ENOENT)

// inDirectory returns errNoDirectory for ENOENT of a call that creates a file in a directory.
func inDirectory(dir string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return wrapPath("looking for directory", dir, errNoDirectory)
	}
	return err
}

// wrap adds the operation to an error and drops the standard library's text about the operation.
func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, cause(err))
}

func wrapPath(doing, path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %q: %w", doing, path, cause(err))
}

// cause returns the errno in an error of the standard library, else the error.
func cause(err error) error {
	switch e := err.(type) { //nolint:errorlint // only the outermost error: this package made the texts of deeper errors
	case *fs.PathError:
		return e.Err
	case *os.LinkError:
		return e.Err
	case *os.SyscallError:
		return e.Err
	}
	return err
}

const elsewhere = "the CNI directories differ per platform: set the chart's global.platform (such as gke, k3s or " +
	"openshift), or cniBinDir and cniConfDir"

// Hint returns a remedy for an error of this package, or "".
func Hint(err error) string {
	if _, ok := errors.AsType[linkError](err); ok {
		return "the agent sees the node's directories under other names: let the link be relative and stay within its " +
			"directory, or name the file itself"
	}
	switch {
	case errors.Is(err, syscall.EROFS):
		return "the file system is read-only; " + elsewhere
	case errors.Is(err, errNoDirectory):
		return "the directory does not exist on this node; " + elsewhere
	case errors.Is(err, fs.ErrPermission):
		return "access is refused even to root: look for denials of SELinux (the chart's seLinuxOptions.type=spc_t) or AppArmor, " +
			"and for an immutable attribute (lsattr)"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "the disk or the quota is full: make room (df and df -i show whether blocks or inodes are used up)"
	case errors.Is(err, syscall.EIO):
		return "the disk reports an error: look at the kernel's log (dmesg)"
	case errors.Is(err, syscall.ENOTDIR):
		return "a part of the path is a file where a directory is needed; " + elsewhere
	}
	return ""
}
