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

// script does something before or instead of each exchange.
type script struct {
	hostfs.Kernel

	at []func() error // by exchange; an error is the exchange's
}

func (s *script) RenameFlags(from, to string, flags uint) error {
	if flags == unix.RENAME_EXCHANGE && len(s.at) > 0 {
		next := s.at[0]
		s.at = s.at[1:]
		if err := next(); err != nil {
			return err
		}
	}
	return s.Kernel.RenameFlags(from, to, flags)
}

// TestAFailedReplaceRemovesNothing has other writers before the exchange and before the one back, which may fail as well.
// Their last content is in the file, at the latest after the next sweep, and nothing else is left.
func TestAFailedReplaceRemovesNothing(t *testing.T) {
	t.Parallel()
	theirs, fails := "theirs", syscall.EIO
	for _, tc := range []struct {
		name  string
		at    func(file string) []func() error
		want  string // at once, "" is whatever
		swept string
	}{
		{"removed before the exchange back", func(file string) []func() error {
			return []func() error{replacing(file, theirs), func() error { return os.Remove(file) }}
		}, theirs, theirs},
		{"replaced before the exchange back", func(file string) []func() error {
			return []func() error{replacing(file, theirs), replacing(file, "third")}
		}, "third", "third"},
		{"written in place before the exchange back", func(file string) []func() error {
			return []func() error{replacing(file, theirs), func() error { return os.WriteFile(file, []byte("third"), 0o600) }}
		}, "third", "third"},
		{"replaced before each of many exchanges", func(file string) []func() error {
			var all []func() error
			for n := range 9 {
				all = append(all, replacing(file, strings.Repeat("x", n+1)))
			}
			return all
		}, "xxxxxxxxx", "xxxxxxxxx"},
		{"the exchange back fails", func(file string) []func() error {
			return []func() error{replacing(file, theirs), func() error { return fails }}
		}, "", theirs},
		{"the exchange back fails, and the file is written after it", func(file string) []func() error {
			return []func() error{replacing(file, theirs), func() error { _ = replacing(file, "third")(); return fails }}
		}, "third", "third"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "f.conflist")
			write(t, file, "old")
			err := hostfs.Disk{Ops: &script{at: tc.at(file)}}.Replace(file, []byte("old"), []byte("new"), 0o600)
			if !errors.Is(err, hostfs.ErrChanged) {
				t.Errorf("error %v", err)
			}
			if got := content(file); tc.want != "" && got != tc.want {
				t.Errorf("content %q, want %q; %q", got, tc.want, names(t, dir))
			}
			_, err = hostfs.Disk{}.SweepOwn(dir)
			must(t, err)
			if got := content(file); got != tc.swept || len(names(t, dir)) != 1 {
				t.Errorf("after a sweep: content %q, want %q; %q", got, tc.swept, names(t, dir))
			}
		})
	}
}

func replacing(file, text string) func() error {
	return func() error {
		if err := os.WriteFile(file+".theirs", []byte(text), 0o600); err != nil {
			return err
		}
		return os.Rename(file+".theirs", file)
	}
}

// TestAFaultOfReplaceAtEveryCallLosesNothing has another writer right before the exchange, and a process that is killed, a
// call that fails, or none of both at each of its calls.
func TestAFaultOfReplaceAtEveryCallLosesNothing(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(int) *hostfstest.Faults{
		"killed": hostfstest.KillAt, "failed": func(n int) *hostfstest.Faults { return hostfstest.FailAt(n, syscall.EIO) },
	} {
		for _, other := range []string{"", "theirs"} {
			for at, met := 0, true; met; at++ {
				dir := t.TempDir()
				file := filepath.Join(dir, "f.conflist")
				write(t, file, "old")
				faults := fault(at)
				ops := &written{Faults: faults}
				if other != "" {
					ops.before = func() { _ = replacing(file, other)() }
				}
				err := hostfs.Disk{Ops: ops}.Replace(file, []byte("old"), []byte("new"), 0o600)
				met = len(faults.Log()) > at
				_, swept := hostfs.Disk{}.SweepOwn(dir)
				must(t, swept)
				got := content(file)
				valid := got == "old" || got == "new"
				if other != "" {
					valid = got == other || ops.before != nil && got == "old"
				}
				if !valid || len(names(t, dir)) != 1 {
					t.Errorf("%s at call %d, other writer %q: content %q, %q, error %v", name, at, other, got, names(t, dir), err)
				}
			}
		}
	}
}

// written lets another writer in before the first exchange that is not kept from happening.
type written struct {
	*hostfstest.Faults

	before func()
}

func (w *written) RenameFlags(from, to string, flags uint) error {
	if w.before != nil {
		w.before()
		w.before = nil
	}
	return w.Faults.RenameFlags(from, to, flags)
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
