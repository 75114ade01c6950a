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
	PID int // as the holder sees itself, which in another container is another number; 0 if it is not known yet
}

func (e *HeldError) Error() string {
	if e.PID == 0 {
		return "held by another process"
	}
	return fmt.Sprintf("held by process %d", e.PID)
}

// A FileLock is a lock that this process holds.
type FileLock struct{ file *os.File }

// Lock locks a file, which it creates if need be, readable by its owner alone, and writes the process number into it. If
// another process holds the lock the error is a *HeldError, without waiting. The lock ends with Close or with the process,
// however it dies; child processes do not inherit it. The file stays.
func Lock(path string) (*FileLock, error) {
	for {
		lock, err := lockOnce(path)
		if err != nil {
			return nil, wrapPath("locking", path, err)
		}
		if lock.isAt(path) {
			return lock, nil
		}
		// Removed, or replaced, before it was locked: others will lock another file.
		if err := lock.Close(); err != nil {
			return nil, err
		}
	}
}

func lockOnce(path string) (*FileLock, error) {
	const flags = os.O_RDWR | os.O_CREATE | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	file, err := os.OpenFile(path, flags, 0o600) //nolint:gosec // the caller's path
	if err != nil {
		return nil, cause(inDirectory(filepath.Dir(path), err))
	}
	if err := acquire(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &FileLock{file: file}, nil
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

// isAt reports whether the locked file is the one that others find.
func (l *FileLock) isAt(path string) bool {
	mine, err := l.file.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(path)
	return err == nil && os.SameFile(mine, current)
}

// Reacquire locks the file again if the locked one was removed, so that others cannot find it. It reports whether it had
// to.
func (l *FileLock) Reacquire(path string) (bool, error) {
	if l.isAt(path) {
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
