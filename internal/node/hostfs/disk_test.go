package hostfs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// A job is a call of a method in a directory.
type job struct {
	name    string
	prepare func(dir string) op
	do      func(disk hostfs.Disk, dir string) error
	states  []string // of the directory: before, after, and valid ones in between, see state
}

// big is longer than one chunk of a copy.
var big = strings.Repeat("0123456789abcdef", 20000)

func jobs() []job {
	const mode = 0o640
	f := func(dir string) string { return filepath.Join(dir, "f") }
	nothing := func(string) op { return each() }
	old := func(dir string) op { return write(f(dir), "old") }
	linked := func(target string) func(string) op {
		return func(dir string) op { return each(write(filepath.Join(dir, "target"), "old"), symlink(target, f(dir))) }
	}
	withBig := func(then func(string) op) func(string) op {
		return func(dir string) op { return each(write(filepath.Join(dir, "big"), big), then(dir)) }
	}
	written := func(disk hostfs.Disk, dir string) error { return disk.WriteFile(f(dir), []byte("new"), mode) }
	copied := func(disk hostfs.Disk, dir string) error {
		_, err := disk.Copy(filepath.Join(dir, "big"), f(dir), mode)
		return err
	}
	link := func(disk hostfs.Disk, dir string) error {
		_, err := disk.Symlink("there", f(dir))
		return err
	}
	return []job{
		{"write a new file", nothing, written, []string{"", "f=new"}},
		{"write over a file", old, written, []string{"f=old", "f=new"}},
		{"write over a file of another owner", func(dir string) op {
			return each(old(dir), func() error { return os.Chown(f(dir), 12, 34) })
		}, written, []string{"f=old", "f=new"}},
		{"write through a link", linked("target"), written, []string{"f->target target=old", "f->target target=new"}},
		{"copy to a new file", withBig(nothing), copied, []string{"big=BIG", "big=BIG f=BIG"}},
		{"copy over a file", withBig(old), copied, []string{"big=BIG f=old", "big=BIG f=BIG"}},
		{"copy that changes the mode alone", withBig(func(dir string) op {
			return write(f(dir), big)
		}), copied, []string{"big=BIG f=BIG", "big=BIG f=BIG"}},
		{"new link", nothing, link, []string{"", "f->there"}},
		{"link over a file", old, link, []string{"f=old", "f->there"}},
		{"link over a link", linked("elsewhere"), link, []string{"f->elsewhere target=old", "f->there target=old"}},
		{"rename", old, func(disk hostfs.Disk, dir string) error {
			return disk.Rename(f(dir), filepath.Join(dir, "g"))
		}, []string{"f=old", "g=old"}},
		{"rename to another directory", func(dir string) op {
			return each(old(dir), mkdir(filepath.Join(dir, "sub")))
		}, func(disk hostfs.Disk, dir string) error {
			return disk.Rename(f(dir), f(filepath.Join(dir, "sub")))
		}, []string{"f=old sub/", "sub/ sub/f=old"}},
		{"remove", old, func(disk hostfs.Disk, dir string) error { return disk.Remove(f(dir)) }, []string{"f=old", ""}},
		{"make directories", nothing, func(disk hostfs.Disk, dir string) error {
			return disk.MkdirAll(filepath.Join(dir, "a", "b"), 0o775) // wider than the umask allows
		}, []string{"", "a/ a/b/", "a/"}},
		{"sweep", func(dir string) op {
			return each(write(f(dir)+".tmp.1", "x"), write(f(dir)+".tmp.22", "x"))
		}, func(disk hostfs.Disk, dir string) error {
			_, err := disk.Sweep(dir, "f")
			return err
		}, []string{"", ""}},
	}
}

var temporary = regexp.MustCompile(`^(.*/)?(f|target)(\.istio-cni)?\.tmp\.[0-9]+$`)

// state describes the files of the directory, and counts the temporary ones.
func state(t *testing.T, dir string) (text string, temps int) {
	t.Helper()
	var all []string
	check.OK(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		switch link, _ := os.Readlink(path); {
		case temporary.MatchString(name):
			temps++
		case d.IsDir():
			all = append(all, name+"/")
		case link != "":
			all = append(all, name+"->"+link)
		default:
			all = append(all, name+"="+strings.ReplaceAll(content(path), big, "BIG"))
		}
		return nil
	}))
	return strings.Join(all, " "), temps
}

// prepared returns a directory for the job.
func prepared(t *testing.T, j job) string {
	t.Helper()
	dir := hostfstest.Memory(t)
	check.OK(t, j.prepare(dir)())
	return dir
}

// steps returns the number of operations of the job.
func steps(t *testing.T, j job) int {
	t.Helper()
	dir := prepared(t, j)
	n := hostfstest.Count(func(disk hostfs.Disk) { check.OK(t, j.do(disk, dir)) })
	if after, temps := state(t, dir); after != j.states[1] || temps != 0 {
		t.Fatalf("the job ends with %q and %d temporary files, want %q", after, temps, j.states[1])
	}
	if n < 2 {
		t.Fatalf("%d operations: nothing to interrupt", n)
	}
	return n
}

// eachOperation does each job with a fault at each of its operations. check receives the directory, the failed operation and
// the error.
func eachOperation(t *testing.T, fault func(int) *hostfstest.Faults, check func(t *testing.T, j job, dir, failed string, err error)) {
	t.Helper()
	for _, j := range jobs() {
		t.Run(j.name, func(t *testing.T) {
			for n := range steps(t, j) {
				faults := fault(n)
				dir := prepared(t, j)
				err := j.do(hostfs.Disk{Before: faults.Before}, dir)
				check(t, j, dir, faults.Log()[n], err)
			}
		})
	}
}

func TestDisk_KilledAtEachOperation(t *testing.T) {
	faults := map[string]func(int) *hostfstest.Faults{"killed": hostfstest.KillAt, "power cut": hostfstest.PowerCutAt}
	for kind, fault := range faults {
		eachOperation(t, fault, func(t *testing.T, j job, dir, failed string, err error) {
			t.Helper()
			if !errors.Is(err, hostfstest.ErrKilled) {
				t.Errorf("%s at %q: error %v", kind, failed, err)
			}
			if got, _ := state(t, dir); !slices.Contains(j.states, got) {
				t.Errorf("%s at %q: left %q", kind, failed, got)
			}
			// The next process completes the job.
			check.OK(t, j.do(hostfs.Disk{}, dirAfter(t, j, dir)))
			_, err = hostfs.Disk{}.Sweep(dir, "f", "target")
			check.OK(t, err)
			if got, temps := state(t, dir); got != j.states[1] || temps != 0 {
				t.Errorf("%s at %q: the next run ends with %q and %d temporary files", kind, failed, got, temps)
			}
		})
	}
}

// dirAfter returns a fresh directory for a job that cannot run twice.
func dirAfter(t *testing.T, j job, dir string) string {
	t.Helper()
	if got, _ := state(t, dir); strings.HasPrefix(j.name, "rename") && got == j.states[1] {
		return prepared(t, j)
	}
	return dir
}

func TestDisk_ErrnoAtEachOperation(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EIO, syscall.EROFS, syscall.EACCES} {
		fail := func(n int) *hostfstest.Faults { return hostfstest.FailAt(n, errno) }
		eachOperation(t, fail, func(t *testing.T, j job, dir, failed string, err error) {
			t.Helper()
			if !errors.Is(err, errno) || !strings.Contains(err.Error(), dir) {
				t.Errorf("%v at %q: error %v, want it with the path", errno, failed, err)
			}
			got, temps := state(t, dir)
			wantTemps := 0
			if strings.HasPrefix(failed, "remove ") && j.name == "sweep" {
				wantTemps = 1
			}
			late := strings.HasPrefix(failed, "syncdir") || strings.HasPrefix(j.name, "make")
			if temps != wantTemps || got != j.states[0] && (!late || !slices.Contains(j.states, got)) {
				t.Errorf("%v at %q: left %q and %d temporary files", errno, failed, got, temps)
			}
		})
	}
}

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
	for i, want := range []struct {
		target  string
		changed bool
	}{{"a", true}, {"a", false}, {"b", true}} {
		changed, err := disk.Symlink(want.target, link)
		check.OK(t, err)
		if got, _ := os.Readlink(link); got != want.target || changed != want.changed {
			t.Errorf("%d: to %q, changed %v", i, got, changed)
		}
	}
	if _, err := disk.Symlink("a", dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("over a directory: error %v", err)
	}
	if got := names(t, filepath.Dir(dir)); len(got) != 1 {
		t.Errorf("left %q", got)
	}
}

func TestRemove_MissingFile(t *testing.T) {
	dir := t.TempDir()
	n := hostfstest.Count(func(disk hostfs.Disk) {
		check.OK(t, disk.Remove(filepath.Join(dir, "missing")))
		check.OK(t, disk.Remove(filepath.Join(dir, "no", "directory")))
	})
	check.Equal(t, n, 2, "operations")
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
	if n := hostfstest.Count(func(disk hostfs.Disk) { check.OK(t, disk.MkdirAll(filepath.Join(dir, "a", "b"), 0o700)) }); n != 0 {
		t.Errorf("%d operations for an existing directory", n)
	}
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
