package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// ErrServed says that another process serves the socket.
var ErrServed = errors.New("another process serves it")

// What is wrong with a path. ErrLocked may end by itself.
var (
	ErrNoSocket = errors.New("something that is no socket is in its place")
	ErrTooLong  = errors.New("too long for a socket")
	ErrLocked   = errors.New("the directory stays locked")
)

const (
	maxPath   = 107 // sun_path, less the zero at its end
	lockEach  = 10 * time.Millisecond
	lockAtAll = 2 * time.Second
	probe     = time.Second
)

// socket is a listening socket with the file by which it is reached.
type socket struct {
	path     string
	listener *net.UnixListener
	file     fs.FileInfo
}

// bind makes the socket, in place of one that nobody serves.
//
// The lock on the directory keeps two agents that start at the same time from each taking the other's socket for a
// stale one. Who connects before the mode is set is still judged by who it is.
func bind(ctx context.Context, path string, dirMode, mode fs.FileMode) (*socket, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("making socket %q of %d bytes, where %d are possible: %w", path, len(path), maxPath, ErrTooLong)
	}
	dir := filepath.Dir(path)
	err := makeDir(dir, dirMode)
	if err != nil {
		return nil, err
	}
	unlock, err := lockDir(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err = removeStale(ctx, path); err != nil {
		return nil, err
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("making socket: %w", err)
	}
	s := &socket{path: path, listener: listener.(*net.UnixListener)} //nolint:forcetypeassert // it is what "unix" means
	s.listener.SetUnlinkOnClose(false)                               // which would remove whatever is there by then
	if s.file, err = os.Lstat(path); err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
		s.remove()
		return nil, fmt.Errorf("setting the mode of socket: %w", err)
	}
	return s, nil
}

// makeDir makes the directory of a socket. One that is there stays as it is.
func makeDir(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil { //nolint:gosec // as /var and /run are
		return fmt.Errorf("making directory of socket: %w", err)
	}
	err := os.Mkdir(dir, mode)
	if err == nil {
		err = os.Chmod(dir, mode) // the umask has no say
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making directory of socket: %w", err)
	}
	return nil
}

// lockDir locks the directory as a file. Plugins do so for a moment when they rotate their log.
func lockDir(ctx context.Context, dir string) (unlock func(), err error) {
	file, err := os.Open(dir) //nolint:gosec // the path is the operator's
	if err != nil {
		return nil, fmt.Errorf("locking directory of socket: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockAtAll, ErrLocked)
	defer cancel()
	for {
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil // which unlocks
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) || !pause(ctx, lockEach) {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			_ = file.Close()
			return nil, fmt.Errorf("locking directory %q of socket: %w", dir, err)
		}
	}
}

// pause waits and reports whether ctx is still on.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// removeStale removes a socket that nobody serves, as an agent leaves that was killed.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("examining socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("making socket %q: %w", path, ErrNoSocket)
	}
	ctx, cancel := context.WithTimeout(ctx, probe)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		defer func() { _ = conn.Close() }()
		return fmt.Errorf("making socket %q: %w%s", path, ErrServed, whose(conn))
	case errors.Is(err, syscall.ECONNREFUSED):
		if err = os.Remove(path); err != nil {
			return fmt.Errorf("removing stale socket: %w", err)
		}
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return nil
	default: // such as a queue that is full: somebody has it
		return fmt.Errorf("making socket %q: %w: %w", path, ErrServed, err)
	}
}

// whose names the process at the other end.
func whose(conn net.Conn) string {
	if unix, ok := conn.(*net.UnixConn); ok {
		if who, err := peer(unix); err == nil {
			return fmt.Sprintf(": process %d", who.Pid)
		}
	}
	return ""
}

// peer returns who connected, or on our own connections who listens, as the kernel has it.
func peer(conn *net.UnixConn) (*syscall.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("examining connection: %w", err)
	}
	var who *syscall.Ucred
	var inner error
	if err = raw.Control(func(fd uintptr) {
		who, inner = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err == nil {
		err = inner
	}
	if err != nil {
		return nil, fmt.Errorf("asking who is at the other end: %w", err)
	}
	return who, nil
}

// isInPlace reports whether the file at the path is this socket. Its inode is not used again while the socket is open.
func (s *socket) isInPlace() bool {
	info, err := os.Lstat(s.path)
	return err == nil && s.file != nil && os.SameFile(info, s.file)
}

// remove takes the file away, if it is this socket's, and closes the socket.
func (s *socket) remove() {
	if s.isInPlace() {
		_ = os.Remove(s.path) // it is stale then, and the next agent removes it
	}
	_ = s.listener.Close() // it is closed whatever it says
}
