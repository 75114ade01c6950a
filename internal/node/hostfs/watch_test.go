package hostfs_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// A journal is the log of a watch.
type journal struct {
	agenttest.Buffer

	stalled sync.Mutex // while it is held, the watch waits at its next record
}

func (j *journal) Write(p []byte) (int, error) {
	j.stalled.Lock()
	defer j.stalled.Unlock()
	return j.Buffer.Write(p)
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// await waits for a line in the log after mark, and returns the lines: the path of each record, or else its level.
func (j *journal) await(t *testing.T, mark int, line string) (lines []string) {
	t.Helper()
	agenttest.Until(t, func() string { return fmt.Sprintf("no %q in %q", line, lines) }, func() bool {
		lines = nil
		for text := range strings.Lines(j.String()[mark:]) {
			var record struct{ Path, Level string }
			check.OK(t, json.Unmarshal([]byte(text), &record))
			lines = append(lines, cmp.Or(record.Path, record.Level))
		}
		return slices.Contains(lines, line)
	})
	return lines
}

// A fixture is a watch, its log, and a sentinel path.
type fixture struct {
	*hostfs.Watch
	log      *journal
	sentinel string
	paths    []hostfs.Path
}

func newFixture(tb testing.TB, paths ...hostfs.Path) *fixture {
	tb.Helper()
	f := &fixture{log: &journal{}, sentinel: filepath.Join(unlinked(tb, tb.TempDir()), "sentinel")}
	f.Watch, f.paths = hostfs.NewWatch(f.log.logger()), append(paths, at(f.sentinel))
	tb.Cleanup(f.Close)
	f.Set(f.paths...)
	f.expect(tb, "the first setting")
	return f
}

// at returns a path without a filter.
func at(elements ...string) hostfs.Path { return hostfs.Path{Name: filepath.Join(elements...)} }

// quiet is the time without a report after which a watch is at rest: its own work takes microseconds. If quiet is too short on
// a slow machine, a report is attributed to the next change, and no test fails wrongly.
const quiet = 10 * time.Millisecond

// expect waits for a change and for the changes that follow it at once. It fails if they do not end.
func (f *fixture) expect(tb testing.TB, change string) {
	tb.Helper()
	select {
	case <-f.Changed():
	case <-time.After(agenttest.Generous):
		tb.Fatalf("%s: not reported", change)
	}
	for range 50 {
		select {
		case <-f.Changed():
		case <-time.After(quiet):
			return
		}
	}
	tb.Fatalf("%s: changes without end", change)
}

// ignores makes a change that must not be reported: the first report is the later change of the sentinel.
func (f *fixture) ignores(t *testing.T, change string, do op) {
	t.Helper()
	mark := len(f.log.String())
	check.OK(t, do())
	check.OK(t, os.Mkdir(f.sentinel, 0o755))
	if paths := f.log.await(t, mark, f.sentinel); paths[0] != f.sentinel {
		t.Errorf("%s: reported %q", change, paths)
	}
	f.expect(t, "the sentinel")
	check.OK(t, os.Remove(f.sentinel))
	f.expect(t, "the sentinel's end")
}

// A step of a test makes a change that must be reported.
type step struct {
	change string
	do     op
}

func (f *fixture) expectEach(t *testing.T, steps ...step) {
	t.Helper()
	for _, s := range steps {
		check.OK(t, s.do(), s.change)
		f.expect(t, s.change)
	}
}

// changes returns all kinds of changes of the entry f of a directory. f does not exist before and after them.
func changes(dir string) []step {
	f, aside := filepath.Join(dir, "f"), dir+".aside"
	return []step{
		{"create", write(f, "")},
		{"write", write(f, "text")},
		{"append", func() error {
			file, err := os.OpenFile(f, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				return err
			}
			_, err = file.WriteString("more")
			return errors.Join(err, file.Close())
		}},
		{"truncate", func() error { return os.Truncate(f, 0) }},
		{"chmod", chmod(f, 0o644)},
		{"chown", func() error { return os.Chown(f, 12, 34) }},
		{"rename away", rename(f, aside)},
		{"rename back", rename(aside, f)},
		{"rename onto", each(write(aside, "other"), rename(aside, f))},
		{"a durable write", func() error { return hostfs.Disk{}.WriteFile(f, []byte("new"), 0o600) }},
		{"an exchange, which runtimes wait for", func() error {
			return hostfs.Disk{}.Replace(f, []byte("new"), []byte("newer"), 0o600)
		}},
		{"rename within", rename(f, f+".bak")},
		{"link", func() error { return os.Link(f+".bak", f) }},
		{"remove", each(remove(f), remove(f+".bak"))},
		{"symlink", symlink("nowhere", f)},
		{"removed symlink", remove(f)},
		{"pipe", func() error { return syscall.Mkfifo(f, 0o600) }},
		{"removed pipe", remove(f)},
	}
}

func TestWatch_EveryKindOfChange(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "d")
		check.OK(t, os.Mkdir(dir, 0o755))
		for name, path := range map[string]hostfs.Path{
			"directory": at(dir),
			"filtered":  {Name: dir, Only: func(base string) bool { return base == "f" }},
			"file":      at(dir, "f"),
		} {
			t.Run(name, func(t *testing.T) { newFixture(t, path).expectEach(t, changes(dir)...) })
		}
	})
}

func TestWatch_NewSet(t *testing.T) {
	dir := unlinked(t, t.TempDir())
	f := newFixture(t, at(dir, "a"), at(dir, "b"))
	set := func(paths ...hostfs.Path) op { return func() error { f.Set(paths...); return nil } }
	same := slices.Clone(f.paths)
	slices.Reverse(same)
	f.ignores(t, "the same set", set(same...))
	f.expectEach(t, step{"a smaller set", set(at(dir, "a"))}, step{"a larger set", set(f.paths...)})
	f.ignores(t, "a file that is in no set", write(filepath.Join(dir, "c"), ""))
	f.expectEach(t, step{"a file that is in the set again", write(filepath.Join(dir, "b"), "")}, step{"no paths", set()})
}

func TestWatch_OtherNames(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		conf, bin := filepath.Join(dir, "net.d"), filepath.Join(dir, "bin")
		check.OK(t, errors.Join(os.Mkdir(conf, 0o755), os.Mkdir(bin, 0o755)))
		f := newFixture(t, hostfs.Path{Name: conf, Only: func(base string) bool {
			return slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(base))
		}}, at(bin, "istio-cni"))
		temp := filepath.Join(conf, ".05-cilium.conflist123")
		f.ignores(t, "a temporary file of another program",
			each(write(temp, "x"), chmod(temp, 0o640), rename(temp, temp+"4"), remove(temp+"4")))
		for _, path := range []string{filepath.Join(bin, "bridge"), filepath.Join(dir, "other"), conf + ".d"} {
			f.ignores(t, "a neighbour of a file or of a directory", each(write(path, "x"), remove(path)))
		}
		path := filepath.Join(conf, "10-x.conflist")
		f.expectEach(t, step{"a configuration", write(path, "x")})
		f.ignores(t, "reading", func() error {
			_, _, err := hostfs.ReadFile(path, 100)
			_, listed := hostfs.List(conf, nil)
			return errors.Join(err, listed)
		})
	})
}

// The new directory often gets the inode number of the old one at once, and the events of both are mixed.
func TestWatch_Churn(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "a", "b")
		f := newFixture(t, at(dir, "f"), at(dir))
		for i := range 200 {
			again := each(remove(filepath.Join(base, "a")), mkdir(dir))
			if i%3 == 0 {
				again = each(again, rename(dir, dir+"2"), rename(dir+"2", dir))
			}
			if i%20 != 0 { // most rounds wait for nothing
				check.OK(t, again())
				continue
			}
			f.expectEach(t, step{"the churn", again}, step{"the file of round " + fmt.Sprint(i), write(filepath.Join(dir, "f"), "")})
		}
	})
}

func TestWatch_MissingPaths(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		a, x := filepath.Join(base, "a"), filepath.Join(base, "x")
		dir := filepath.Join(a, "b", "c")
		f := newFixture(t, at(dir), at(x, "y", "token"))
		f.expectEach(t,
			step{"all directories: the kernel reports only the first", mkdir(dir)},
			step{"a parent of the file", mkdir(x)},
			step{"the parent of the file", mkdir(filepath.Join(x, "y"))},
			step{"the file", write(filepath.Join(x, "y", "token"), "")},
			step{"a file in the place of a directory", each(remove(a), write(a, ""))},
			step{"the directory again", each(remove(a), mkdir(dir))},
			step{"a file at the end of it", write(filepath.Join(dir, "f"), "")},
			step{"the parent's parent renamed", each(mkdir(filepath.Join(base, "new", "b", "c")), rename(a, filepath.Join(base, "old")))},
			step{"another in its place", rename(filepath.Join(base, "new"), a)},
		)
		f.expectEach(t, changes(dir)...)
	})
}

// TestWatch_KubeletVolume updates a volume like the kubelet's AtomicWriter: with a new directory, and a new link to it that is
// renamed onto ..data. The old directory is removed afterwards.
func TestWatch_KubeletVolume(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "serviceaccount")
		token, data := filepath.Join(dir, "token"), filepath.Join(dir, "..data")
		for name, path := range map[string]hostfs.Path{
			"file":      at(token),
			"directory": at(dir),
			"only data": {Name: dir, Only: func(base string) bool { return base == "..data" }},
		} {
			t.Run(name, func(t *testing.T) {
				check.OK(t, each(remove(dir), mkdir(dir), symlink("..data/token", token))())
				f, old := newFixture(t, path), ""
				for i := range 10 {
					fresh := filepath.Join(dir, fmt.Sprintf("..2026_01_02_03_04_05.%d", i))
					check.OK(t, each(mkdir(fresh), write(filepath.Join(fresh, "token"), fmt.Sprint(i)), symlink(filepath.Base(fresh), data+"_tmp"),
						rename(data+"_tmp", data), remove(old))())
					f.expect(t, fmt.Sprintf("swap %d", i))
					check.Equal(t, content(token), fmt.Sprint(i), "token")
					old = fresh
				}
				if name == "file" {
					f.expectEach(t, step{"a write in the volume", write(token, "in place")})
				}
			})
		}
	})
}

func TestWatch_Links(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		one, two, link := filepath.Join(base, "one", "net.d"), filepath.Join(base, "two", "net.d"), filepath.Join(base, "current")
		check.OK(t, each(mkdir(one), mkdir(two), symlink("one", link), symlink(link+"/../one/./net.d", filepath.Join(base, "conf")),
			symlink("conf/f", filepath.Join(base, "f")))())
		f := newFixture(t, at(link, "net.d"), at(base, "f"))
		f.expectEach(t,
			step{"a file behind the links", write(filepath.Join(one, "f"), "")},
			step{"another link", each(remove(link), symlink("two", link))},
			step{"a file behind the new link", write(filepath.Join(two, "g"), "")},
			step{"the other path's file", write(filepath.Join(one, "f"), "x")},
		)
		f.ignores(t, "a file behind the old link", write(filepath.Join(one, "g"), ""))
		f.expectEach(t,
			step{"a link to itself", each(remove(link), symlink("current", link))},
			step{"a directory in its place", each(remove(link), mkdir(filepath.Join(link, "net.d")))},
			step{"a file in that", write(filepath.Join(link, "net.d", "h"), "")},
		)
	})
}

// TestWatch_RootOfAnotherProcess: the watch reports events of that process's files, also behind absolute links.
func TestWatch_RootOfAnotherProcess(t *testing.T) {
	t.Parallel()
	base := unlinked(t, t.TempDir())
	root := fmt.Sprintf("/proc/%d/root", os.Getpid())
	check.OK(t, each(mkdir(filepath.Join(base, "one")), mkdir(filepath.Join(base, "two")), symlink(filepath.Join(base, "one"), filepath.Join(base, "current")))())
	f := newFixture(t, at(root, base, "current"), at(root, base, "two"))
	for _, dir := range []string{"one", "two"} {
		mark := len(f.log.String())
		check.OK(t, write(filepath.Join(base, dir, "f"), "")())
		f.log.await(t, mark, filepath.Join(root, base, dir, "f"))
		f.expect(t, "a file in "+dir)
	}
	check.OK(t, each(remove(filepath.Join(base, "current")), symlink(filepath.Join(base, "two"), filepath.Join(base, "current")))())
	f.expect(t, "another link")
}

// The kernel's queue overflows while the watch does not read it.
func TestWatch_QueueOverflow(t *testing.T) {
	dir := filepath.Join(hostfstest.Memory(t), "d")
	check.OK(t, os.Mkdir(dir, 0o755))
	l := newFixture(t, at(dir))
	limit := 0
	_, err := fmt.Sscan(content("/proc/sys/fs/inotify/max_queued_events"), &limit)
	check.OK(t, err)
	l.log.stalled.Lock()
	f, g := filepath.Join(dir, "f"), filepath.Join(dir, "g")
	check.OK(t, each(rename(dir, dir+"2"), rename(dir+"2", dir), write(f, ""), write(g, ""))()) // it stalls at the first
	for range 2 * limit {                                                                       // the kernel joins equal events, so they alternate
		check.OK(t, each(chmod(f, 0o600), chmod(g, 0o600))())
	}
	l.log.stalled.Unlock()
	l.log.await(t, 0, slog.LevelWarn.String())
	l.expect(t, "the overflow")
	l.expectEach(t, changes(dir)[1:]...)
}

func TestWatch_LeavesNothingBehind(t *testing.T) {
	dir := unlinked(t, t.TempDir())
	descriptors := func() int { return len(names(t, "/proc/self/fd")) }
	goroutines, files := runtime.NumGoroutine(), descriptors()
	for i := range 50 {
		w := hostfs.NewWatch(slog.New(slog.DiscardHandler))
		w.Set(at(dir), at(dir, "sub"))
		for range 20 { // without a receiver
			put(t, filepath.Join(dir, "f"), fmt.Sprint(i))
		}
		w.Close()
		w.Close()
		w.Set(at(dir))
	}
	agenttest.Until(t, func() string {
		return fmt.Sprintf("%d goroutines and %d files, at first %d and %d", runtime.NumGoroutine(), descriptors(), goroutines, files)
	}, func() bool { return runtime.NumGoroutine() <= goroutines && descriptors() <= files })
}

func TestWatch_Mounts(t *testing.T) {
	t.Parallel()
	if !ownMounts(t) {
		return
	}
	base := hostfstest.Memory(t)
	node, seen := filepath.Join(base, "node"), filepath.Join(base, "seen")
	check.OK(t, each(mkdir(node), mkdir(seen))())
	check.OK(t, unix.Mount(node, seen, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check.OK(t, unix.Unmount(seen, 0)) })
	f := newFixture(t, at(node, "f"), at(seen, "g"))
	f.expectEach(t, // one directory, watched once
		step{"the first path's file", write(filepath.Join(seen, "f"), "")},
		step{"the second path's file", write(filepath.Join(seen, "g"), "")},
		// The kernel reports no mount; the interval does.
		step{"a mount", func() error { return unix.Mount("tmpfs", seen, "tmpfs", 0, "") }},
		step{"a file of the mount", write(filepath.Join(seen, "g"), "")},
	)
	check.OK(t, unix.Unmount(seen, 0))
}
