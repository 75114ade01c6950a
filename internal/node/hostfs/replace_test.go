package hostfs_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
)

// writers lets other writers in right before the renames of a Disk with flags, one before each.
type writers struct {
	hostfs.Ops

	before []func() error
	plain  bool // such renames are unknown, as in some file systems
}

func (w *writers) Rename(from, to string, flags uint) error {
	if flags != 0 && w.plain {
		return syscall.EINVAL
	}
	if flags != 0 && len(w.before) > 0 {
		next := w.before[0]
		w.before = w.before[1:]
		if err := next(); err != nil {
			return err
		}
	}
	return w.Ops.Rename(from, to, flags)
}

// writing is another writer that replaces the file; a text "-" removes it.
func writing(file, text string) func() error {
	return func() error {
		if text == "-" {
			return os.Remove(file)
		}
		if err := os.WriteFile(file+".theirs", []byte(text), 0o600); err != nil {
			return err
		}
		return os.Rename(file+".theirs", file)
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
				put(t, file, tc.there)
			}
			ops := &writers{Ops: hostfs.Kernel{}, plain: tc.plain}
			if tc.other != "" {
				ops.before = append(ops.before, writing(file, tc.other))
			}
			var old []byte
			if tc.old != "-" {
				old = []byte(tc.old)
			}
			err := hostfs.Disk{Ops: ops}.Replace(file, old, []byte("new"), 0o640)
			if errors.Is(err, hostfs.ErrChanged) != tc.changed || !tc.changed && err != nil {
				t.Errorf("error %v, changed wanted: %v", err, tc.changed)
			}
			left := names(t, filepath.Dir(file))
			if len(left) > 1 || tc.want == "-" && len(left) > 0 || tc.want != "-" && content(file) != tc.want {
				t.Errorf("content %q, want %q; files %q", content(file), tc.want, left)
			}
		})
	}
}

// TestReplaceKeepsTheLatest has other writers before the exchange and before the one back: their last content stays.
func TestReplaceKeepsTheLatest(t *testing.T) {
	t.Parallel()
	for name, texts := range map[string][]string{
		"one": {"theirs"}, "replaced": {"theirs", "third"}, "removed": {"theirs", "-"}, "many": strings.Fields("a bb ccc dddd eeeee ffffff"),
	} {
		for _, inPlace := range []bool{false, true} {
			dir := t.TempDir()
			file := filepath.Join(dir, "f.conflist")
			put(t, file, "old")
			ops := &writers{Ops: hostfs.Kernel{}}
			for n, text := range texts {
				write := writing(file, text)
				if inPlace && n > 0 && text != "-" {
					write = func() error { return os.WriteFile(file, []byte(text), 0o600) }
				}
				ops.before = append(ops.before, write)
			}
			err := hostfs.Disk{Ops: ops}.Replace(file, []byte("old"), []byte("new"), 0o600)
			want, left := texts[len(texts)-1], names(t, dir)
			if !errors.Is(err, hostfs.ErrChanged) || len(left) > 1 || want != "-" && content(file) != want || want == "-" && len(left) > 0 {
				t.Errorf("%s, in place %v: content %q, want %q; %q, error %v", name, inPlace, content(file), want, left, err)
			}
		}
	}
}

// TestReplaceFailsAtEachCall has a process that is killed or a call that fails at each of its calls, with and without
// another writer right before the exchange: the file is whole, and a sweep removes the rest.
func TestReplaceFailsAtEachCall(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(int) *hostfstest.Faults{
		"killed": hostfstest.KillAt, "failed": func(n int) *hostfstest.Faults { return hostfstest.FailAt(n, syscall.EIO) },
	} {
		for _, other := range []string{"", "theirs"} {
			for at, met := 0, true; met; at++ {
				dir := t.TempDir()
				file := filepath.Join(dir, "f.conflist")
				put(t, file, "old")
				faults := fault(at)
				ops := &writers{Ops: faults}
				if other != "" {
					ops.before = append(ops.before, writing(file, other))
				}
				err := hostfs.Disk{Ops: ops}.Replace(file, []byte("old"), []byte("new"), 0o600)
				met = len(faults.Log()) > at
				_, swept := hostfs.Disk{}.SweepOwn(dir)
				must(t, swept)
				if got := content(file); !slices.Contains([]string{"old", "new", other}, got) || len(names(t, dir)) != 1 || !met && other != "" && got != other {
					t.Errorf("%s at call %d, other writer %q: content %q, %q, error %v", name, at, other, got, names(t, dir), err)
				}
			}
		}
	}
}

func TestMove(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		before  func(from, to string)
		changed bool
		want    string // see state
	}{
		{"free name", nil, false, "to=a"},
		{"written in between", func(from, _ string) { put(t, from, "theirs") }, true, "from=theirs"},
		{"name taken in between", func(_, to string) { put(t, to, "theirs") }, true, "from=a to=theirs"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
			put(t, from, "a")
			ops := &writers{Ops: hostfs.Kernel{}}
			if tc.before != nil {
				ops.before = append(ops.before, func() error { tc.before(from, to); return nil })
			}
			if err := (hostfs.Disk{Ops: ops}).Move(from, to, []byte("a")); errors.Is(err, hostfs.ErrChanged) != tc.changed {
				t.Errorf("error %v", err)
			}
			if got, _ := state(t, dir); got != tc.want {
				t.Errorf("files %q, want %q", got, tc.want)
			}
		})
	}
}
