package hostfs_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
)

// between lets another writer in right before an operation.
type between struct {
	hostfs.Kernel
	before func()
	// plain makes renameat2 a stranger, as in some file systems.
	plain bool
}

func (b *between) RenameFlags(from, to string, flags uint) error {
	if b.plain {
		return syscall.EINVAL
	}
	b.now()
	return b.Kernel.RenameFlags(from, to, flags)
}

func (b *between) now() {
	if b.before != nil {
		b.before()
		b.before = nil
	}
}

func TestReplace(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		there, old string // "-" is none
		other      string // written in between, "" is nobody, "-" removes
		plain      bool
		want       string
		changed    bool
	}{
		{"old content", "a", "a", "", false, "new", false},
		{"other content", "b", "a", "", false, "b", true},
		{"longer content", "ab", "a", "", false, "ab", true},
		{"none wanted, none there", "-", "-", "", false, "new", false},
		{"none wanted, one there", "b", "-", "", false, "b", true},
		{"one wanted, none there", "-", "a", "", false, "-", true},
		{"written in between", "a", "a", "theirs", false, "theirs", true},
		{"made in between", "-", "-", "theirs", false, "theirs", true},
		{"removed in between", "a", "a", "-", false, "-", true},
		{"plain renames", "a", "a", "", true, "new", false},
		{"plain renames, other content", "b", "a", "", true, "b", true},
		{"plain renames, none", "-", "-", "", true, "new", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "f.conflist")
			if tc.there != "-" {
				write(t, file, tc.there)
			}
			ops := &between{plain: tc.plain}
			switch tc.other {
			case "":
			case "-":
				ops.before = func() { _ = os.Remove(file) }
			default:
				ops.before = func() { write(t, file, tc.other) }
			}
			var old []byte
			if tc.old != "-" {
				old = []byte(tc.old)
			}
			err := hostfs.Disk{Ops: ops}.Replace(file, old, []byte("new"), 0o640)
			if errors.Is(err, hostfs.ErrChanged) != tc.changed || !tc.changed && err != nil {
				t.Errorf("error %v, changed wanted: %v", err, tc.changed)
			}
			got, err := os.ReadFile(file)
			if errors.Is(err, os.ErrNotExist) {
				got = []byte("-")
			}
			if string(got) != tc.want {
				t.Errorf("content %q, want %q", got, tc.want)
			}
			entries, err := os.ReadDir(filepath.Dir(file))
			if err != nil || len(entries) > 1 {
				t.Errorf("left behind: %v, %v", entries, err)
			}
		})
	}
}

// A kill at any call leaves the one content or the other.
func TestReplaceIsKilled(t *testing.T) {
	t.Parallel()
	for at := 0; ; at++ {
		file := filepath.Join(t.TempDir(), "f")
		write(t, file, "old")
		faults := hostfstest.KillAt(at)
		_ = hostfs.Disk{Ops: faults}.Replace(file, []byte("old"), []byte("new"), 0o600)
		got, err := os.ReadFile(file)
		if err != nil || string(got) != "old" && string(got) != "new" {
			t.Fatalf("killed at call %d: %q, %v", at, got, err)
		}
		if len(faults.Log()) <= at {
			break
		}
	}
}

func TestMove(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		before  func(from, to string)
		changed bool
		want    map[string]string
	}{
		{"free name", nil, false, map[string]string{"to": "a"}},
		{"written in between", func(from, _ string) { write(t, from, "theirs") }, true, map[string]string{"from": "theirs"}},
		{"name taken in between", func(_, to string) { write(t, to, "theirs") }, true, map[string]string{"from": "a", "to": "theirs"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
			write(t, from, "a")
			ops := &between{}
			if tc.before != nil {
				ops.before = func() { tc.before(from, to) }
			}
			if err := (hostfs.Disk{Ops: ops}).Move(from, to, []byte("a")); errors.Is(err, hostfs.ErrChanged) != tc.changed {
				t.Errorf("error %v", err)
			}
			for name, want := range tc.want {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
					t.Errorf("%s: %q, %v; want %q", name, got, err, want)
				}
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != len(tc.want) {
				t.Errorf("files %v, %v", entries, err)
			}
		})
	}
}

// The kernel reports an exchange as two renames, which is what runtimes wait for.
func TestExchangeIsSeen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "a.conflist")
	write(t, file, "old")
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err = unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_MOVED_FROM); err != nil {
		t.Fatal(err)
	}
	if err = (hostfs.Disk{}).Replace(file, []byte("old"), []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 4096)
	n, err := unix.Read(fd, buffer)
	if err != nil || !strings.Contains(string(buffer[:n]), "a.conflist") {
		t.Errorf("the event does not name the file: %q, %v", buffer[:max(n, 0)], err)
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Error(err)
	}
}
