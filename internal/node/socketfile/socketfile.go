// Package socketfile binds listening unix sockets to files.
//
// It promises that it never replaces a socket which another process serves, but replaces a socket that a killed process left, and
// that it never removes a file that is not its own. It accepts no connection.
//
// Start reading at Bind.
package socketfile

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

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// ErrServed is the error of a socket that another process serves.
var ErrServed = errors.New("another process serves it")

// probeTimeout bounds the connection to an existing socket.
const probeTimeout = time.Second

// Options describe a socket.
type Options struct {
	// Network is "unix" or "unixpacket" (SOCK_SEQPACKET).
	Network string
	// Path is the path of the socket; 107 bytes at most. A missing directory is created.
	Path string
	// DirMode is the mode of a created directory, Mode the socket's mode.
	DirMode, Mode fs.FileMode
}

// Socket is a listening socket with its file.
type Socket struct {
	*net.UnixListener

	path string
	file fs.FileInfo
}

// Bind creates the socket, in place of a stale one. Two agents never bind at the same time: they have their own lock. The
// caller also checks the credentials of a client that connects before the mode is set.
func Bind(ctx context.Context, o Options) (*Socket, error) {
	err := (hostfs.Disk{}).MkdirAll(filepath.Dir(o.Path), o.DirMode)
	if err == nil {
		err = removeStale(ctx, o.Network, o.Path)
	}
	if err != nil {
		return nil, fmt.Errorf("making socket %q: %w", o.Path, err)
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, o.Network, o.Path)
	if err != nil {
		return nil, fmt.Errorf("making socket: %w", err)
	}
	s := &Socket{UnixListener: listener.(*net.UnixListener), path: o.Path} //nolint:forcetypeassert // by the network
	s.SetUnlinkOnClose(false)                                              // close would remove any later file at the path
	if s.file, err = os.Lstat(o.Path); err == nil {
		err = os.Chmod(o.Path, o.Mode)
	}
	if err != nil {
		s.Remove()
		return nil, fmt.Errorf("setting the mode of socket: %w", err)
	}
	return s, nil
}

// removeStale removes a socket that no process serves, such as a killed agent's.
func removeStale(ctx context.Context, network, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && info.Mode().Type() != fs.ModeSocket {
		err = errors.New("something that is no socket is in its place")
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, path)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, fs.ErrNotExist): // removed meanwhile
		return nil
	case err != nil: // such as EAGAIN for a full backlog: a process serves the socket
		return fmt.Errorf("%w: %w", ErrServed, err)
	}
	_ = conn.Close()
	return ErrServed
}

// InPlace reports whether the file at the path is this socket. The kernel does not reuse its inode while the socket is open.
func (s *Socket) InPlace() bool {
	info, err := os.Lstat(s.path)
	return err == nil && os.SameFile(info, s.file)
}

// Remove removes the file if it is this socket's, and closes the socket.
func (s *Socket) Remove() {
	if s.InPlace() {
		_ = os.Remove(s.path) // after an error the file is stale, and the next agent removes it
	}
	_ = s.Close() // the listener is closed even with an error
}
