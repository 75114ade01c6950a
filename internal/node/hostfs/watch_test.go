package hostfs_test

import (
	"cmp"
	"encoding/json"
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
)

// A journal is a watch's log.
type journal struct {
	agenttest.Buffer

	stalled sync.Mutex // held, the watch waits at its next record
}

func (j *journal) Write(p []byte) (int, error) {
	j.stalled.Lock()
	defer j.stalled.Unlock()
	return j.Buffer.Write(p)
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// await returns what was logged since mark, of each record its path or else its level, when the line is in it.
func (j *journal) await(t *testing.T, mark int, line string) (lines []string) {
	t.Helper()
	agenttest.Until(t, func() string { return fmt.Sprintf("no %q in %q", line, lines) }, func() bool {
		lines = nil
		for text := range strings.Lines(j.String()[mark:]) {
			var record struct{ Path, Level string }
			must(t, json.Unmarshal([]byte(text), &record))
			lines = append(lines, cmp.Or(record.Path, record.Level))
		}
		return slices.Contains(lines, line)
	})
	return lines
}

// A listener is a watch in a test.
type listener struct {
	*hostfs.Watch
	log      *journal
	sentinel string // a path that is watched besides
	paths    []hostfs.Path
}

func listen(tb testing.TB, paths ...hostfs.Path) *listener {
	tb.Helper()
	l := &listener{log: &journal{}, sentinel: filepath.Join(unlinked(tb, tb.TempDir()), "sentinel")}
	l.Watch, l.paths = hostfs.NewWatch(l.log.logger()), append(paths, at(l.sentinel))
	tb.Cleanup(l.Close)
	l.Set(l.paths...)
	l.hear(tb, "the first setting")
	return l
}

// at is a path with no filter.
func at(elements ...string) hostfs.Path { return hostfs.Path{Name: filepath.Join(elements...)} }

// hear waits for a change and for what follows it at once.
func (l *listener) hear(tb testing.TB, what string) {
	tb.Helper()
	select {
	case <-l.Changed():
	case <-time.After(agenttest.Generous):
		tb.Fatalf("%s: not heard", what)
	}
	l.settle(tb)
}

// quiet is how long nothing must be heard for a watch to be at rest: its own work is microseconds. If that is too short on
// a slow machine, a change is taken for the next one's, and no test fails that should not.
const quiet = 10 * time.Millisecond

// settle waits until there is nothing to hear. A watch that spins never gets there.
func (l *listener) settle(tb testing.TB) {
	tb.Helper()
	for range 50 {
		select {
		case <-l.Changed():
		case <-time.After(quiet):
			return
		}
	}
	tb.Fatal("changes without end")
}

// deaf does something that must not be heard: the sentinel's event comes after it and is the first.
func (l *listener) deaf(t *testing.T, what string, do func()) {
	t.Helper()
	mark := len(l.log.String())
	do()
	must(t, os.Mkdir(l.sentinel, 0o755))
	if paths := l.log.await(t, mark, l.sentinel); paths[0] != l.sentinel {
		t.Errorf("%s: heard of %q", what, paths)
	}
	l.hear(t, "the sentinel")
	must(t, os.Remove(l.sentinel))
	l.hear(t, "the sentinel's end")
}

// A step of a test does something that must be heard.
type step struct {
	what string
	do   func() error
}

func (l *listener) hearEach(t *testing.T, steps ...step) {
	t.Helper()
	for _, s := range steps {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.what, err)
		}
		l.hear(t, s.what)
	}
}

// changes are all ways for the entry f of a directory to change. There is nothing before and after.
func changes(dir string) []step {
	f, aside := filepath.Join(dir, "f"), dir+".aside"
	write := func(path, text string) func() error {
		return func() error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	rename := func(from, to string) func() error { return func() error { return os.Rename(from, to) } }
	return []step{
		{"create", write(f, "")},
		{"write", write(f, "text")},
		{"append", func() error {
			file, err := os.OpenFile(f, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			_, err = file.WriteString("more")
			return err
		}},
		{"truncate", func() error { return os.Truncate(f, 0) }},
		{"chmod", func() error { return os.Chmod(f, 0o644) }},
		{"chown", func() error { return os.Chown(f, 12, 34) }},
		{"rename away", rename(f, aside)},
		{"rename back", rename(aside, f)},
		{"prepare another", func() error {
			if err := os.WriteFile(aside, []byte("other"), 0o600); err != nil {
				return err
			}
			return os.Chmod(f, 0o600) // to be heard
		}},
		{"rename onto", rename(aside, f)},
		{"a durable write", func() error { return hostfs.Disk{}.WriteFile(f, []byte("new"), 0o600) }},
		{"an exchange, which runtimes wait for", func() error {
			return hostfs.Disk{}.Replace(f, []byte("new"), []byte("newer"), 0o600)
		}},
		{"rename within", rename(f, f+".bak")},
		{"link", func() error { return os.Link(f+".bak", f) }},
		{"remove", func() error { return errorsOf(os.Remove(f), os.Remove(f+".bak")) }},
		{"symlink", func() error { return os.Symlink("nowhere", f) }},
		{"removed symlink", func() error { return os.Remove(f) }},
		{"pipe", func() error { return syscall.Mkfifo(f, 0o600) }},
		{"removed pipe", func() error { return os.Remove(f) }},
	}
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestWatchHearsEveryKindOfChange(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "d")
		must(t, os.Mkdir(dir, 0o755))
		for name, path := range map[string]hostfs.Path{
			"directory": at(dir),
			"filtered":  {Name: dir, Only: func(base string) bool { return base == "f" }},
			"file":      at(dir, "f"),
		} {
			t.Run(name, func(t *testing.T) {
				listen(t, path).hearEach(t, changes(dir)...)
			})
		}
	})
}

func TestWatchReportsOnceAfterEachNewSet(t *testing.T) {
	dir := unlinked(t, t.TempDir())
	l := listen(t, at(dir, "a"), at(dir, "b"))
	same := slices.Clone(l.paths)
	slices.Reverse(same)
	l.deaf(t, "the same set", func() { l.Set(same...) })
	l.Set(at(dir, "a"))
	l.hear(t, "a smaller set")
	l.Set(l.paths...)
	l.hear(t, "a larger set")
	l.deaf(t, "reading", func() { put(t, filepath.Join(dir, "c"), "") })
	put(t, filepath.Join(dir, "b"), "")
	l.hear(t, "a file that is in the set again")
	l.Set()
	l.hear(t, "no paths")
}

func TestWatchIsDeafToOtherNames(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		conf := filepath.Join(dir, "net.d")
		must(t, os.Mkdir(conf, 0o755))
		bin := filepath.Join(dir, "bin")
		must(t, os.Mkdir(bin, 0o755))
		l := listen(t, hostfs.Path{Name: conf, Only: func(base string) bool {
			return slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(base))
		}}, at(bin, "istio-cni"))
		l.deaf(t, "a temporary file of another", func() {
			temp := filepath.Join(conf, ".05-cilium.conflist123")
			put(t, temp, "x")
			must(t, os.Chmod(temp, 0o600))
			must(t, os.Rename(temp, temp+"4"))
			must(t, os.Remove(temp+"4"))
		})
		l.deaf(t, "the neighbours of a file and of the directories", func() {
			for _, path := range []string{filepath.Join(bin, "bridge"), filepath.Join(dir, "other"), conf + ".d"} {
				put(t, path, "x")
				must(t, os.Remove(path))
			}
		})
		path := filepath.Join(conf, "10-x.conflist")
		put(t, path, "x")
		l.hear(t, "a configuration")
		l.deaf(t, "reading", func() {
			_, _, err := hostfs.ReadFile(path, 100)
			must(t, err)
			_, err = hostfs.List(conf, nil)
			must(t, err)
		})
	})
}

func TestWatchOfADirectoryThatIsDeletedAndMadeAgain(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "net.d")
		must(t, os.Mkdir(dir, 0o755))
		l := listen(t, at(dir))
		for i := range 3 {
			put(t, filepath.Join(dir, "f"), "")
			l.hearEach(t,
				step{"the file before", func() error { return nil }},
				step{"delete", func() error { return os.RemoveAll(dir) }},
				step{"make again", func() error { return os.Mkdir(dir, 0o700) }},
				step{"chmod of it", func() error { return os.Chmod(dir, 0o755) }},
				step{"a file in it", func() error { return os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600) }},
				step{"rename away", func() error { return os.Rename(dir, dir+".old") }},
				step{"another in its place", func() error { return os.Mkdir(dir, 0o755) }},
				step{"a file in that", func() error { return os.WriteFile(filepath.Join(dir, "f2"), nil, 0o600) }},
			)
			l.deaf(t, "a file in what was renamed away", func() { put(t, filepath.Join(dir+".old", "f3"), "") })
			must(t, os.RemoveAll(dir+".old"))
		}
	})
}

// The new directory often gets the inode number of the old one, at once, and the events of both are mixed.
func TestWatchSurvivesChurn(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "a", "b")
		f := filepath.Join(dir, "f")
		l := listen(t, at(f), at(dir))
		for i := range 200 {
			must(t, os.RemoveAll(filepath.Join(base, "a")))
			must(t, os.MkdirAll(dir, 0o755))
			if i%3 == 0 {
				must(t, os.Rename(dir, dir+"2"))
				must(t, os.Rename(dir+"2", dir))
			}
			if i%20 != 0 {
				continue // most rounds wait for nothing
			}
			l.hear(t, "the churn")
			put(t, f, fmt.Sprint(i))
			l.hear(t, fmt.Sprintf("the file of round %d", i))
		}
	})
}

func TestWatchOfWhatIsMissing(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		dir := filepath.Join(base, "a", "b", "c")
		l := listen(t, at(dir), at(base, "x", "y", "token"))
		// At once, so that the kernel tells of the first alone.
		must(t, os.MkdirAll(dir, 0o755))
		l.hear(t, "all of the directories")
		must(t, os.Mkdir(filepath.Join(base, "x"), 0o755))
		l.hear(t, "a parent of the file")
		must(t, os.Mkdir(filepath.Join(base, "x", "y"), 0o755))
		l.hear(t, "the parent of the file")
		must(t, os.WriteFile(filepath.Join(base, "x", "y", "token"), nil, 0o600))
		l.hear(t, "the file")
		// A file in the place of a directory, and away again.
		must(t, os.RemoveAll(filepath.Join(base, "a")))
		put(t, filepath.Join(base, "a"), "")
		l.hear(t, "a file in the way")
		must(t, os.Remove(filepath.Join(base, "a")))
		must(t, os.MkdirAll(dir, 0o755))
		l.hear(t, "the way is free")
		put(t, filepath.Join(dir, "f"), "")
		l.hear(t, "a file at the end of it")
		// Another directory in the place of a parent's parent.
		must(t, os.MkdirAll(filepath.Join(base, "new", "b", "c"), 0o755))
		must(t, os.Rename(filepath.Join(base, "a"), filepath.Join(base, "old")))
		l.hear(t, "the parent's parent is renamed")
		must(t, os.Rename(filepath.Join(base, "new"), filepath.Join(base, "a")))
		l.hear(t, "another is in its place")
		l.hearEach(t, changes(dir)...)
	})
}

// volume is a directory as the kubelet makes it of a secret, a ConfigMap or a projected volume.
type volume struct {
	dir string
	n   int
}

// swap updates the volume: a new directory, a new link to it, and the link renamed onto ..data, as the kubelet's
// AtomicWriter does; the old directory is removed afterwards.
func (v *volume) swap(tb testing.TB, token string) {
	tb.Helper()
	old, _ := os.Readlink(filepath.Join(v.dir, "..data"))
	v.n++
	fresh := fmt.Sprintf("..2026_01_02_03_04_05.%d", v.n)
	must(tb, os.MkdirAll(filepath.Join(v.dir, fresh), 0o755))
	put(tb, filepath.Join(v.dir, fresh, "token"), token)
	must(tb, os.Symlink(fresh, filepath.Join(v.dir, "..data_tmp")))
	must(tb, os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	if old == "" {
		must(tb, os.Symlink("..data/token", filepath.Join(v.dir, "token")))
		return
	}
	must(tb, os.RemoveAll(filepath.Join(v.dir, old)))
}

func TestWatchOfAKubeletVolume(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		v := &volume{dir: filepath.Join(base, "serviceaccount")}
		token := filepath.Join(v.dir, "token")
		for name, path := range map[string]hostfs.Path{
			"file":      at(token),
			"directory": at(v.dir),
			"only data": {Name: v.dir, Only: func(base string) bool { return base == "..data" }},
		} {
			t.Run(name, func(t *testing.T) {
				*v = volume{dir: v.dir}
				must(t, os.RemoveAll(v.dir))
				l := listen(t, path)
				for i := range 10 {
					v.swap(t, fmt.Sprint(i))
					l.hear(t, fmt.Sprintf("swap %d", i))
					if got := content(token); got != fmt.Sprint(i) {
						t.Fatalf("token %q", got)
					}
				}
				if name == "file" {
					put(t, token, "in place")
					l.hear(t, "a write in the volume")
				}
			})
		}
	})
}

func TestWatchFollowsLinks(t *testing.T) {
	onEachFS(t, func(t *testing.T, base string) {
		must(t, os.MkdirAll(filepath.Join(base, "one", "net.d"), 0o755))
		must(t, os.MkdirAll(filepath.Join(base, "two", "net.d"), 0o755))
		link := filepath.Join(base, "current")
		must(t, os.Symlink("one", link))
		must(t, os.Symlink(link+"/../one/./net.d", filepath.Join(base, "conf")))
		must(t, os.Symlink("conf/f", filepath.Join(base, "f")))
		l := listen(t, at(link, "net.d"), at(base, "f"))
		put(t, filepath.Join(base, "one", "net.d", "f"), "")
		l.hear(t, "a file behind the links")
		must(t, os.Remove(link))
		must(t, os.Symlink("two", link))
		l.hear(t, "the link is another")
		put(t, filepath.Join(base, "two", "net.d", "g"), "")
		l.hear(t, "a file behind the new link")
		put(t, filepath.Join(base, "one", "net.d", "f"), "x")
		l.hear(t, "the other path's file")
		l.deaf(t, "a file behind the old link", func() { put(t, filepath.Join(base, "one", "net.d", "g"), "") })
		must(t, os.Remove(link))
		must(t, os.Symlink("current", link))
		l.hear(t, "the link leads to itself")
		must(t, os.Remove(link))
		must(t, os.MkdirAll(filepath.Join(link, "net.d"), 0o755))
		l.hear(t, "a directory in its place")
		put(t, filepath.Join(link, "net.d", "h"), "")
		l.hear(t, "a file in that")
	})
}

// The queue of the kernel is real, and so is what it does when nobody reads.
func TestWatchAfterItsQueueOverflowed(t *testing.T) {
	base := hostfstest.Memory(t)
	dir := filepath.Join(base, "d")
	must(t, os.Mkdir(dir, 0o755))
	l := listen(t, at(dir))
	limit := 0
	_, err := fmt.Sscan(content("/proc/sys/fs/inotify/max_queued_events"), &limit)
	must(t, err)
	l.log.stalled.Lock()
	must(t, os.Rename(dir, dir+"2")) // at which it stalls
	must(t, os.Rename(dir+"2", dir))
	f, g := filepath.Join(dir, "f"), filepath.Join(dir, "g")
	put(t, f, "")
	put(t, g, "")
	for range 2 * limit { // the kernel joins equal events, so they alternate
		must(t, os.Chmod(f, 0o600))
		must(t, os.Chmod(g, 0o600))
	}
	l.log.stalled.Unlock()
	l.log.await(t, 0, slog.LevelWarn.String())
	l.hear(t, "the overflow")
	l.hearEach(t, changes(filepath.Join(base, "d"))[1:]...)
}

func TestWatchLeavesNothingBehind(t *testing.T) {
	dir := unlinked(t, t.TempDir())
	descriptors := func() int { return len(names(t, "/proc/self/fd")) }
	goroutines, files := runtime.NumGoroutine(), descriptors()
	for i := range 50 {
		w := hostfs.NewWatch(slog.New(slog.DiscardHandler))
		w.Set(at(dir), at(dir, "sub"))
		for range 20 { // nobody hears it
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

func TestWatchAndMounts(t *testing.T) {
	t.Parallel()
	if !ownMounts(t) {
		return
	}
	base := hostfstest.Memory(t)
	node, seen := filepath.Join(base, "node"), filepath.Join(base, "seen")
	must(t, os.Mkdir(node, 0o755))
	must(t, os.Mkdir(seen, 0o755))
	must(t, unix.Mount(node, seen, "", unix.MS_BIND, ""))
	l := listen(t, at(node, "f"), at(seen, "g"))
	for _, name := range []string{"f", "g"} { // of one directory, watched once
		put(t, filepath.Join(seen, name), "")
		l.hear(t, name)
	}
	must(t, unix.Mount("tmpfs", seen, "tmpfs", 0, ""))
	l.hear(t, "the interval") // the kernel reports no mount
	put(t, filepath.Join(seen, "g"), "")
	l.hear(t, "a file of the mount")
	must(t, unix.Unmount(seen, 0))
	must(t, os.Remove(filepath.Join(node, "f")))
	must(t, os.Remove(filepath.Join(node, "g")))
	must(t, os.Remove(node))
	must(t, unix.Unmount(seen, 0))
}
