package hostfs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// big is longer than one chunk of a copy.
var big = strings.Repeat("0123456789abcdef", 20000)

func TestWriteFile(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		disk := hostfs.Disk{}
		path := filepath.Join(dir, "mode")
		for _, mask := range []int{0, 0o022, 0o077} {
			umask(t, mask)
			for _, mode := range []fs.FileMode{0o600, 0o640, 0o644, 0o777, fs.ModeSetuid | 0o755} {
				check.OK(t, disk.WriteFile(path, nil, mode))
				check.Equal(t, modeOf(t, path), mode, "umask", mask, "mode")
			}
		}
		// WriteFile keeps the owner, and the mode bits that chown clears.
		check.OK(t, os.Chown(path, 12, 34))
		check.OK(t, disk.WriteFile(path, []byte("new"), fs.ModeSetuid|0o755))
		var stat syscall.Stat_t
		check.OK(t, syscall.Stat(path, &stat))
		if stat.Uid != 12 || stat.Gid != 34 || modeOf(t, path) != fs.ModeSetuid|0o755 {
			t.Errorf("owner %d:%d, mode %v", stat.Uid, stat.Gid, modeOf(t, path))
		}
		if err := disk.WriteFile(dir, nil, 0o600); !errors.Is(err, syscall.EISDIR) {
			t.Errorf("over a directory: %v", err)
		}
		pipe := filepath.Join(dir, "pipe")
		check.OK(t, syscall.Mkfifo(pipe, 0o600))
		check.OK(t, disk.WriteFile(pipe, []byte("new"), 0o600)) // without waiting for a reader
		check.Equal(t, content(pipe), "new")
	})
}

func TestWriteFile_ThroughLink(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		target := filepath.Join(dir, "real", "f")
		check.OK(t, each(mkdir(filepath.Dir(target)), write(target, "old"))())
		for _, c := range [][2]string{{"relative", "real/f"}, {"absolute", target}, {"twice", "relative"}} {
			name, to := c[0], c[1]
			link := filepath.Join(dir, name)
			check.OK(t, os.Symlink(to, link))
			check.OK(t, hostfs.Disk{}.WriteFile(link, []byte(name), 0o600))
			if got, _ := os.Readlink(link); got != to || content(target) != name {
				t.Errorf("%s: link to %q, target %q", name, got, content(target))
			}
		}
		check.Diff(t, "result", []string{"f"}, names(t, filepath.Dir(target)))
		// The test has its own null device because wrong code would replace the machine's.
		null := filepath.Join(dir, "null")
		check.OK(t, syscall.Mknod(null, syscall.S_IFCHR|0o666, 1<<8|3))
		for name, to := range map[string]string{
			"dangling": filepath.Join(dir, "another", "root", "f"), "masked": null, "directory": dir, "loop": "loop",
		} {
			link := filepath.Join(dir, name)
			check.OK(t, os.Symlink(to, link))
			err := hostfs.Disk{}.WriteFile(link, []byte("new"), 0o600)
			text := fmt.Sprintf("following symbolic link %q to %q: ", link, to)
			if err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(hostfs.Hint(err), "let the link be relative") {
				t.Errorf("%s: error %v, hint %q", name, err, hostfs.Hint(err))
			}
			if got, _ := os.Readlink(link); got != to {
				t.Errorf("%s: link to %q", name, got)
			}
		}
	})
}

func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	disk := hostfs.Disk{}
	link := filepath.Join(dir, "f")
	for _, want := range []string{"a", "b"} {
		check.OK(t, disk.Symlink(want, link))
		target, err := os.Readlink(link)
		check.OK(t, err)
		check.Equal(t, target, want, "the link leads to")
	}
	check.Fails(t, disk.Symlink("a", dir), dir)
	if got := names(t, filepath.Dir(dir)); len(got) != 1 {
		t.Errorf("left %q", got)
	}
}

func TestRemove_MissingFile(t *testing.T) {
	dir := t.TempDir()
	calls := hostfstest.Record(func(disk hostfs.Disk) {
		check.OK(t, disk.Remove(filepath.Join(dir, "missing")))
		check.OK(t, disk.Remove(filepath.Join(dir, "no", "directory")))
	})
	check.Equal(t, len(calls), 2, "operations", calls)
	full := filepath.Join(dir, "full")
	check.OK(t, os.MkdirAll(filepath.Join(full, "x"), 0o755))
	if err := (hostfs.Disk{}).Remove(full); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Errorf("a directory that is not empty: error %v", err)
	}
}

func TestMkdirAll(t *testing.T) {
	umask(t, 0o077)
	dir := t.TempDir()
	disk := hostfs.Disk{}
	check.OK(t, disk.MkdirAll(filepath.Join(dir, "a", "b")+"/", 0o750))
	for path, want := range map[string]fs.FileMode{"a": 0o755, "a/b": 0o750} {
		check.Equal(t, modeOf(t, filepath.Join(dir, path)), want, path, "mode")
	}
	calls := hostfstest.Record(func(disk hostfs.Disk) { check.OK(t, disk.MkdirAll(filepath.Join(dir, "a", "b"), 0o700)) })
	check.Equal(t, len(calls), 0, "operations for an existing directory", calls)
	readOnly := hostfs.Disk{Before: hostfstest.FailAt(0, syscall.EROFS).Before}
	check.Is(t, readOnly.MkdirAll(filepath.Join(dir, "c", "d"), 0o700), syscall.EROFS)
	put(t, filepath.Join(dir, "f"), "")
	for _, path := range []string{"f", "f/sub"} {
		if err := disk.MkdirAll(filepath.Join(dir, path), 0o755); !errors.Is(err, syscall.ENOTDIR) {
			t.Errorf("%s: error %v", path, err)
		}
	}
}

func TestSweep(t *testing.T) {
	t.Parallel()
	named := []string{
		"10-x.conflist.istio-cni.tmp.5", "10-x.conflist.tmp.1", "10-x.conflist.tmp.4294967295", "istio-cni.istio-cni.tmp.7", "istio-cni.tmp.7",
	}
	own := []string{"other.conf.istio-cni.tmp.5"} // another process may be writing it
	kept := []string{
		".05-cilium.conflist123", ".istio-cni.tmp.1", "10-x.conflist", "10-x.conflist.istio-cni.tmp.", "10-x.conflist.istio-cni.tmp.1.conf",
		"10-x.conflist.tmp.", "10-x.conflist.tmp.1.conf", "10-x.conflist.tmp.1a", "110-x.conflist.tmp.1", "istio-cni",
		"istio-cni.istio-cni.tmp.a", "other.tmp.7",
	}
	dirs := []string{"d.istio-cni.tmp.1", "istio-cni.tmp.8"}
	for name, tc := range map[string]struct {
		sweep func(disk hostfs.Disk, dir string, names ...string) ([]string, error)
		want  []string
	}{"named files": {hostfs.Disk.Sweep, named}, "own files": {hostfs.Disk.SweepOwn, slices.Concat(named, own)}} {
		dir := t.TempDir()
		all := slices.Sorted(slices.Values(slices.Concat(named, own, kept, dirs)))
		for _, file := range all {
			if slices.Contains(dirs, file) {
				check.OK(t, os.Mkdir(filepath.Join(dir, file), 0o755))
			} else {
				put(t, filepath.Join(dir, file), "")
			}
		}
		removed, err := tc.sweep(hostfs.Disk{}, dir, "10-x.conflist", "istio-cni")
		for i := range removed {
			removed[i] = filepath.Base(removed[i])
		}
		left := slices.DeleteFunc(all, func(file string) bool { return slices.Contains(tc.want, file) })
		if diff := cmp.Diff(tc.want, removed) + cmp.Diff(left, names(t, dir)); diff != "" || err != nil {
			t.Errorf("%s: error %v, removed and left (-want +got):\n%s", name, err, diff)
		}
		if removed, err := tc.sweep(hostfs.Disk{}, filepath.Join(dir, "missing"), "f"); err != nil || removed != nil {
			t.Errorf("%s: missing directory: %q, error %v", name, removed, err)
		}
	}
}
