package hostfs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// A HeldError is the error of a lock that another process holds.
type HeldError struct {
	PID int // in the holder's PID namespace, which can be another container's; 0 if unknown
}

func (e *HeldError) Error() string {
	if e.PID == 0 {
		return "held by another process"
	}
	return fmt.Sprintf("held by process %d", e.PID)
}

// A FileLock is a lock that this process holds.
type FileLock struct{ file *os.File }

// Lock locks a file and writes the process ID into it. It creates a missing file with mode 0600. Lock does not wait: if
// another process holds the lock, the error is a *HeldError. The lock ends with Close or with the process, however that
// ends. Child processes do not inherit the lock. The file stays.
func Lock(path string) (*FileLock, error) {
	file, err := OpenLocked(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, acquire)
	if err != nil {
		return nil, wrapPath("locking", path, err)
	}
	return &FileLock{file: file}, nil
}

// OpenLocked opens a file and calls lock, which locks it (flock(2)). It creates a missing file with mode 0600. Another process can
// remove or replace the file before it is locked, and others will lock the new one: then OpenLocked opens the new one.
func OpenLocked(path string, flags int, lock func(*os.File) error) (*os.File, error) {
	for {
		file, err := os.OpenFile(path, flags|os.O_CREATE, 0o600) //nolint:gosec // the caller's path
		if err != nil {
			return nil, cause(inDirectory(filepath.Dir(path), err))
		}
		if err = lock(file); err == nil && isAt(file, path) {
			return file, nil
		}
		if err = errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
	}
}

func acquire(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return cause(err)
	}
	if !info.Mode().IsRegular() {
		return ErrNotRegular
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		held := &HeldError{}
		_, _ = fmt.Fscan(io.LimitReader(file, 32), &held.PID) // the holder may not have written it yet
		return held
	}
	if err != nil {
		return wrap("flock", err)
	}
	if err = errors.Join(file.Chmod(0o600), file.Truncate(0)); err == nil {
		_, err = file.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	}
	return wrap("writing process number", err)
}

// isAt reports whether an open file is still the file at path.
func isAt(file *os.File, path string) bool {
	mine, err := file.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(path)
	return err == nil && os.SameFile(mine, current)
}

// Reacquire locks the file at path if the locked file was removed, so that other processes cannot find it. It reports whether
// it did.
func (l *FileLock) Reacquire(path string) (bool, error) {
	if isAt(l.file, path) {
		return false, nil
	}
	fresh, err := Lock(path)
	if err != nil {
		return false, err
	}
	old := l.file
	l.file = fresh.file
	return true, wrapPath("unlocking", old.Name(), old.Close())
}

// Close releases the lock.
func (l *FileLock) Close() error { return wrapPath("unlocking", l.file.Name(), l.file.Close()) }
