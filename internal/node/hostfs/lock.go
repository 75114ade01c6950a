package hostfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// A HeldError says that another process has the lock.
type HeldError struct {
	Path string
	PID  int // as the holder sees itself, which in another container is another number; 0 if it is not known yet
}

func (e *HeldError) Error() string {
	if e.PID == 0 {
		return "held by another process"
	}
	return fmt.Sprintf("held by process %d", e.PID)
}

// Held is a lock that this process has.
type Held struct{ file *os.File }

// Lock takes the lock of a file, which it makes if need be, readable by its owner alone, and writes its process number
// into it. If another has the lock the error is a *HeldError, without waiting. The lock ends with Close or with the
// process, however it dies; processes that are started do not get it. The file stays.
func Lock(path string) (*Held, error) {
	for {
		held, err := lock(path)
		if err != nil {
			return nil, wrapPath("locking", path, err)
		}
		if held.isAt(path) {
			return held, nil
		}
		// Removed, or replaced, before it was locked: others will lock another file.
		if err := held.Close(); err != nil {
			return nil, err
		}
	}
}

func lock(path string) (*Held, error) {
	const flags = os.O_RDWR | os.O_CREATE | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	file, err := os.OpenFile(path, flags, 0o600) //nolint:gosec // the caller's path
	if err != nil {
		return nil, cause(inDirectory(filepath.Dir(path), err))
	}
	held := &Held{file: file}
	if err := held.take(path); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return held, nil
}

func (h *Held) take(path string) error {
	info, err := h.file.Stat()
	if err != nil {
		return cause(err)
	}
	if !info.Mode().IsRegular() {
		return ErrNotRegular
	}
	err = h.flock()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return &HeldError{Path: path, PID: h.holder()}
	}
	if err != nil {
		return wrap("flock", err)
	}
	if err := h.file.Chmod(0o600); err != nil {
		return wrap("changing mode", err)
	}
	return wrap("writing process number", h.sign())
}

func (h *Held) flock() error {
	connection, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	var locked error
	err = connection.Control(func(fd uintptr) {
		for {
			locked = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB)
			if !errors.Is(locked, syscall.EINTR) {
				return
			}
		}
	})
	return errors.Join(err, locked)
}

// sign replaces the number of the last holder.
func (h *Held) sign() error {
	if err := h.file.Truncate(0); err != nil {
		return cause(err)
	}
	_, err := h.file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return cause(err)
}

// holder reads the number in the file, 0 if there is none.
func (h *Held) holder() int {
	text := make([]byte, 32)
	n, _ := h.file.ReadAt(text, 0) // the end of the file is an error too
	pid, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		return 0
	}
	return pid
}

// isAt reports whether the locked file is the one that others find.
func (h *Held) isAt(path string) bool {
	mine, err := h.file.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(path)
	return err == nil && os.SameFile(mine, current)
}

// Again takes the lock anew if its file was removed, so that others cannot find it. It reports whether it had to.
func (h *Held) Again(path string) (bool, error) {
	if h.isAt(path) {
		return false, nil
	}
	fresh, err := Lock(path)
	if err != nil {
		return false, err
	}
	old := h.file
	h.file = fresh.file
	return true, wrapPath("unlocking", old.Name(), old.Close())
}

// Close gives the lock back.
func (h *Held) Close() error { return wrapPath("unlocking", h.file.Name(), h.file.Close()) }
