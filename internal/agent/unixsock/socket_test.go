package unixsock_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	check.OK(t, err)
	return info.Mode()
}

func TestOpen_Modes(t *testing.T) {
	for _, c := range []struct {
		name        string
		dir, socket fs.FileMode
		exists      bool // the directory exists, with mode 0711
		want        fs.FileMode
	}{
		{"of_root", 0o700, 0o600, false, 0o700},
		{"of_all", 0o755, 0o666, false, 0o755},
		{"directory_exists", 0o700, 0o600, true, 0o711},
	} {
		t.Run(c.name, func(t *testing.T) {
			above := filepath.Join(agenttest.SocketDir(t), "above")
			dir := filepath.Join(above, "istio-cni")
			if c.exists {
				check.OK(t, errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o711)))
			}
			b := start(t, func(o *unixsock.Options) { o.Path, o.DirMode, o.Mode = filepath.Join(dir, "log.sock"), c.dir, c.socket })
			check.Equal(t, modeOf(t, dir).Perm(), c.want, "directory has")
			if got := modeOf(t, b.Path); got.Perm() != c.socket || got.Type() != fs.ModeSocket {
				t.Errorf("socket has %v, want %v", got, c.socket)
			}
			if got := modeOf(t, above).Perm(); got&0o500 != 0o500 {
				t.Errorf("the directory above has %v", got)
			}
		})
	}
}

func TestOpen_LiveSocket(t *testing.T) {
	t.Run("served", func(t *testing.T) {
		b := start(t, nil)
		_, err := unixsock.Open(t.Context(), agenttest.SocketOptions(b.Path))
		want := fmt.Sprintf("making socket %q: another process serves it", b.Path)
		if !errors.Is(err, unixsock.ErrServed) || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		answers(t, b)
	})
	t.Run("queue_full", func(t *testing.T) {
		path := filepath.Join(agenttest.SocketDir(t), "log.sock")
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		check.OK(t, err)
		defer func() { _ = syscall.Close(fd) }()
		check.OK(t, errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}), syscall.Listen(fd, 0)))
		var full error
		for full == nil {
			var conn net.Conn
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			conn, full = agenttest.Dial(ctx, path)
			cancel()
			if conn != nil {
				defer func() { _ = conn.Close() }()
			}
		}
		check.Is(t, check.Err(unixsock.Open(t.Context(), agenttest.SocketOptions(path))), unixsock.ErrServed, "a client has", full)
		check.Equal(t, modeOf(t, path).Type(), fs.ModeSocket, "the socket is gone")
	})
}

func TestOpen_NotASocket(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"file":      func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"symlink":   func(path string) error { return os.Symlink("/nowhere", path) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(agenttest.SocketDir(t), "log.sock")
			check.OK(t, put(path))
			before := modeOf(t, path)
			_, err := unixsock.Open(t.Context(), agenttest.SocketOptions(path))
			if err == nil || !strings.Contains(err.Error(), path) || errors.Is(err, unixsock.ErrServed) {
				t.Errorf("got %v", err)
			}
			check.Equal(t, modeOf(t, path), before, "it was")
		})
	}
}

func TestServe_RemovesOwnSocket(t *testing.T) {
	t.Run("ours", func(t *testing.T) {
		b := start(t, nil)
		b.Stop()
		check.Is(t, check.Err(os.Lstat(b.Path)), fs.ErrNotExist, "the stale file")
		err := b.Rebind(t.Context())
		if _, missing := os.Lstat(b.Path); err != nil || !errors.Is(missing, fs.ErrNotExist) {
			t.Errorf("bound again after the end: %v", err)
		}
	})
	t.Run("another's", func(t *testing.T) {
		b := start(t, nil)
		check.OK(t, os.Remove(b.Path))
		agenttest.Listen(t, b.Path)
		check.Is(t, b.Rebind(t.Context()), unixsock.ErrServed, "over another file")
		b.Stop()
		check.Equal(t, modeOf(t, b.Path).Type(), fs.ModeSocket, "it was removed")
	})
}

func TestServe_BoundAgain(t *testing.T) {
	o := agenttest.SocketOptions(filepath.Join(agenttest.SocketDir(t), "log.sock"))
	s, err := unixsock.Open(t.Context(), o)
	if err == nil {
		err = errors.Join(os.Remove(o.Path), s.Rebind(t.Context()))
	}
	check.OK(t, err)
	agenttest.Go(t, func(ctx context.Context) { s.Serve(ctx, hello) })
	if got, err := get(t.Context(), o.Path); got != "hello" || err != nil {
		t.Errorf("answer %q, %v", got, err)
	}
}

func TestServe_FileDeleted(t *testing.T) {
	b := start(t, nil)
	for name, harm := range map[string]func() error{
		"file":      func() error { return os.Remove(b.Path) },
		"directory": func() error { return os.RemoveAll(b.Dir) },
		"renamed":   func() error { return os.Rename(b.Path, b.Path+".away") },
		"stale":     func() error { _ = os.Remove(b.Path); return agenttest.Listen(t, b.Path).Close() },
	} {
		t.Run(name, func(t *testing.T) {
			before := b.Dial(t)
			check.OK(t, harm())
			check.OK(t, b.Rebind(t.Context()), "binding it again")
			answers(t, b)
			check.Equal(t, modeOf(t, b.Path).Perm(), 0o600, "it has")
			check.OK(t, b.Rebind(t.Context()), "once more")
			_ = before.Close()
		})
	}
	check.Equal(t, strings.Count(b.Log.String(), "made again"), 4, "records in", b.Log.String())
}
