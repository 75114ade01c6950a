package logrelay

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/unixsock"
)

// quiet are options of a socket at a path.
func quiet(path string) Options {
	return Options{Path: path, Records: slog.DiscardHandler}
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.UnixListener)
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

func TestModes(t *testing.T) {
	for _, c := range []struct{ dir, socket, wantDir, wantSocket fs.FileMode }{
		{0, 0, 0o700, 0o600},
		{0o755, 0o666, 0o755, 0o666},
	} {
		t.Run(fmt.Sprint(c.wantSocket), func(t *testing.T) {
			above := filepath.Join(runDir(t), "above")
			o := quiet(filepath.Join(above, "istio-cni", "log.sock"))
			o.DirMode, o.Mode = c.dir, c.socket
			s, err := Open(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if got := modeOf(t, filepath.Dir(o.Path)).Perm(); got != c.wantDir {
				t.Errorf("directory has %v, want %v", got, c.wantDir)
			}
			if got := modeOf(t, o.Path); got.Perm() != c.wantSocket || got.Type() != fs.ModeSocket {
				t.Errorf("socket has %v, want %v", got, c.wantSocket)
			}
			if got := modeOf(t, above).Perm(); got&0o500 != 0o500 {
				t.Errorf("the directory above has %v", got)
			}
		})
	}
}

func TestADirectoryThatIsThereStaysAsItIs(t *testing.T) {
	dir := runDir(t)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), quiet(filepath.Join(dir, "log.sock")))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got := modeOf(t, dir).Perm(); got != 0o711 {
		t.Errorf("it has %v now", got)
	}
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	var path string
	b := start(t, func(o *Options, _ *limits) {
		path = o.Path
		_ = listen(t, path).Close()
	})
	if !b.Listening() {
		t.Error("not listening")
	}
	b.ordinary(t)
}

func TestALiveSocketIsNotStolen(t *testing.T) {
	t.Run("served", func(t *testing.T) {
		b := start(t, nil)
		_, err := Open(t.Context(), quiet(b.options.Path))
		want := fmt.Sprintf("making socket %q: another process serves it: process %d", b.options.Path, os.Getpid())
		if !errors.Is(err, unixsock.ErrServed) || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		b.ordinary(t)
	})
	t.Run("accepting_nobody", func(t *testing.T) {
		path := filepath.Join(runDir(t), "log.sock")
		listen(t, path)
		if _, err := Open(t.Context(), quiet(path)); !errors.Is(err, unixsock.ErrServed) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("queue_full", func(t *testing.T) {
		path := filepath.Join(runDir(t), "log.sock")
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = syscall.Close(fd) }()
		if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}), syscall.Listen(fd, 0)); err != nil {
			t.Fatal(err)
		}
		var full error
		for full == nil {
			var conn net.Conn
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			conn, full = dial(ctx, path)
			cancel()
			if conn != nil {
				defer func() { _ = conn.Close() }()
			}
		}
		if _, err := Open(t.Context(), quiet(path)); !errors.Is(err, unixsock.ErrServed) {
			t.Errorf("got %v, where a client has %v", err, full)
		}
		if modeOf(t, path).Type() != fs.ModeSocket {
			t.Error("the socket is gone")
		}
	})
}

func TestWhatIsNoSocketStays(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"file":      func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"symlink":   func(path string) error { return os.Symlink("/nowhere", path) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(runDir(t), "log.sock")
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			before := modeOf(t, path)
			_, err := Open(t.Context(), quiet(path))
			if !errors.Is(err, unixsock.ErrNoSocket) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v", err)
			}
			if after := modeOf(t, path); after != before {
				t.Errorf("it was %v and is %v", before, after)
			}
		})
	}
}

func TestALongPathIsSaidToBeLong(t *testing.T) {
	path := "/tmp/" + strings.Repeat("x", 100) + "/log.sock"
	if _, err := Open(t.Context(), quiet(path)); !errors.Is(err, unixsock.ErrTooLong) {
		t.Errorf("got %v", err)
	}
}

func TestOfTwoThatStartAtTheSameTimeOneWins(t *testing.T) {
	for range 200 {
		path := filepath.Join(runDir(t), "log.sock")
		_ = listen(t, path).Close() // a stale one, which both want to remove
		var all sync.WaitGroup
		servers, errs := make([]*Server, 4), make([]error, 4)
		together := make(chan struct{})
		for i := range servers {
			all.Go(func() {
				<-together
				servers[i], errs[i] = Open(t.Context(), quiet(path))
			})
		}
		close(together)
		all.Wait()
		won, listening := 0, 0
		for i, s := range servers {
			if s != nil {
				won++
				if s.Listening() {
					listening++
				}
				s.Close()
			} else if !errors.Is(errs[i], unixsock.ErrServed) {
				t.Error(errs[i])
			}
		}
		if won != 1 || listening != 1 {
			t.Fatalf("%d have it and %d are reached", won, listening)
		}
	}
}

func TestALockedDirectoryIsWaitedForAndNotForEver(t *testing.T) {
	dir := runDir(t)
	file, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), quiet(filepath.Join(dir, "log.sock"))); !errors.Is(err, unixsock.ErrLocked) {
		t.Errorf("got %v", err)
	}
	opened := make(chan error, 1)
	go func() {
		s, err := Open(t.Context(), quiet(filepath.Join(dir, "log.sock")))
		if err == nil {
			s.Close()
		}
		opened <- err
	}()
	_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

func TestTheSocketIsRemovedAtTheEndIfItIsOurs(t *testing.T) {
	t.Run("ours", func(t *testing.T) {
		b := start(t, nil)
		b.stop()
		if _, err := os.Lstat(b.options.Path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("it stays: %v", err)
		}
		if b.Listening() {
			t.Error("still listening")
		}
		err := b.Rebind(t.Context())
		if _, missing := os.Lstat(b.options.Path); err != nil || !errors.Is(missing, fs.ErrNotExist) {
			t.Errorf("made again after the end: %v", err)
		}
	})
	t.Run("another's", func(t *testing.T) {
		b := start(t, nil)
		if err := os.Remove(b.options.Path); err != nil {
			t.Fatal(err)
		}
		listen(t, b.options.Path)
		if b.Listening() {
			t.Error("another's socket is taken for ours")
		}
		if err := b.Rebind(t.Context()); !errors.Is(err, unixsock.ErrServed) {
			t.Errorf("rebound over it: %v", err)
		}
		b.stop()
		if modeOf(t, b.options.Path).Type() != fs.ModeSocket {
			t.Error("it was removed")
		}
	})
	t.Run("never_served", func(t *testing.T) {
		path := filepath.Join(runDir(t), "log.sock")
		s, err := Open(t.Context(), quiet(path))
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		s.Close()
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("it stays: %v", err)
		}
	})
}

func TestItComesBackWhenItsFileIsDeleted(t *testing.T) {
	b := start(t, nil)
	for name, harm := range map[string]func() error{
		"file":      func() error { return os.Remove(b.options.Path) },
		"directory": func() error { return os.RemoveAll(b.dir) },
		"renamed":   func() error { return os.Rename(b.options.Path, b.options.Path+".away") },
		"stale":     func() error { _ = os.Remove(b.options.Path); return listen(t, b.options.Path).Close() },
	} {
		t.Run(name, func(t *testing.T) {
			before := b.dial(t)
			if err := harm(); err != nil {
				t.Fatal(err)
			}
			if b.Listening() {
				t.Fatal("it did not notice")
			}
			if err := b.Rebind(t.Context()); err != nil || !b.Listening() {
				t.Fatalf("not made again: %v", err)
			}
			b.ordinary(t)
			if got := modeOf(t, b.options.Path).Perm(); got != 0o600 {
				t.Errorf("it has %v", got)
			}
			if err := b.Rebind(t.Context()); err != nil {
				t.Errorf("once more: %v", err)
			}
			_ = before.Close()
		})
	}
	if got := strings.Count(b.log.String(), "made again"); got != 4 {
		t.Errorf("told %d times of 4: %s", got, b.log.String())
	}
}

func TestItEndsThoughTheLogHangs(t *testing.T) {
	release, reached := make(chan struct{}), make(chan struct{})
	b := start(t, func(o *Options, _ *limits) {
		o.Records = slog.NewTextHandler(hanging{sync.OnceFunc(func() { close(reached) }), release}, nil)
	})
	sent := make(chan error, 1)
	go func() { _, err := b.post(t, strings.NewReader("["+quoted+"]")); sent <- err }()
	<-reached
	b.stop()
	close(release)
	if err := <-sent; err == nil {
		t.Error("answered though the log hung")
	}
}

const quoted = `"{\"level\":\"info\",\"time\":\"2026-05-04T03:02:01Z\",\"msg\":\"x\"}"`

type hanging struct {
	reached func()
	release chan struct{}
}

func (h hanging) Write(p []byte) (int, error) {
	h.reached()
	<-h.release
	return len(p), nil
}
