package hostfs_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// among runs the next of the other writers right before each rename with flags, then before, unless nil. With plain, renames
// with flags fail, as on some file systems.
func among(plain bool, before func(hostfs.Call) error, writers ...func() error) hostfs.Disk {
	return hostfs.Disk{Before: func(c hostfs.Call) error {
		var err error
		switch {
		case c.Flags != 0 && plain:
			err = syscall.EINVAL
		case c.Flags != 0 && len(writers) > 0:
			err, writers = writers[0](), writers[1:]
		}
		if err == nil && before != nil {
			err = before(c)
		}
		return err
	}}
}

// writing returns a writer that replaces the file, or writes in place. The text "-" removes the file.
func writing(file, text string, inPlace bool) func() error {
	switch {
	case text == "-":
		return remove(file)
	case inPlace:
		return write(file, text)
	}
	return each(write(file+".theirs", text), rename(file+".theirs", file))
}

// TestReplace: with other writers before the exchange and before each exchange back, the last content stays.
func TestReplace(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		there, old string // "-" means no file
		others     string // one write each, "-" removes
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
		{"made in between", "-", "-", "theirs", false, "theirs", true},
		{"removed in between", "a", "a", "-", false, "-", true},
		{"plain renames", "a", "a", "", true, "new", false},
		{"plain renames, other content", "b", "a", "", true, "b", true},
		{"plain renames, none", "-", "-", "", true, "new", false},
		{"written in between", "a", "a", "theirs", false, "theirs", true},
		{"written twice in between", "a", "a", "theirs third", false, "third", true},
		{"written and removed in between", "a", "a", "theirs -", false, "-", true},
		{"written often in between", "old", "old", "a bb ccc dddd eeeee ffffff", false, "ffffff", true},
	} {
		for _, inPlace := range []bool{false, true} {
			file := filepath.Join(t.TempDir(), "f.conflist")
			if tc.there != "-" {
				put(t, file, tc.there)
			}
			var writers []func() error
			for n, text := range strings.Fields(tc.others) {
				writers = append(writers, writing(file, text, inPlace && n > 0))
			}
			var old []byte
			if tc.old != "-" {
				old = []byte(tc.old)
			}
			err := among(tc.plain, nil, writers...).Replace(file, old, []byte("new"), 0o640)
			if errors.Is(err, hostfs.ErrChanged) != tc.changed || !tc.changed && err != nil {
				t.Errorf("%s, in place %v: error %v, changed wanted: %v", tc.name, inPlace, err, tc.changed)
			}
			left := names(t, filepath.Dir(file))
			if len(left) > 1 || tc.want == "-" && len(left) > 0 || tc.want != "-" && content(file) != tc.want {
				t.Errorf("%s, in place %v: content %q, want %q; files %q", tc.name, inPlace, content(file), tc.want, left)
			}
		}
	}
}

// TestReplace_FailsAtEachCall kills the process or fails the call at each call, with and without another writer right before
// the exchange: the file is whole, and a sweep removes the temporary files.
func TestReplace_FailsAtEachCall(t *testing.T) {
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
				var writers []func() error
				if other != "" {
					writers = append(writers, writing(file, other, false))
				}
				err := among(false, faults.Before, writers...).Replace(file, []byte("old"), []byte("new"), 0o600)
				met = len(faults.Log()) > at
				_, swept := hostfs.Disk{}.SweepOwn(dir)
				check.OK(t, swept)
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
		before  func(from, to string) op
		changed bool
		want    string // NAME=CONTENT of each file
	}{
		{"free name", func(_, _ string) op { return each() }, false, "to=a"},
		{"written in between", func(from, _ string) op { return write(from, "theirs") }, true, "from=theirs"},
		{"name taken in between", func(_, to string) op { return write(to, "theirs") }, true, "from=a to=theirs"},
	} {
		dir := t.TempDir()
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		put(t, from, "a")
		if err := among(false, nil, tc.before(from, to)).Move(from, to, []byte("a")); errors.Is(err, hostfs.ErrChanged) != tc.changed {
			t.Errorf("%s: error %v", tc.name, err)
		}
		var got []string
		for _, name := range names(t, dir) {
			got = append(got, name+"="+content(filepath.Join(dir, name)))
		}
		check.Equal(t, strings.Join(got, " "), tc.want, tc.name)
	}
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	check.OK(t, each(write(from, "a"), write(to, "b"), func() error { return hostfs.Disk{}.Rename(from, to) })())
	check.Equal(t, fmt.Sprint(names(t, dir), content(to)), "[to]a", "Rename replaces a file")
}
