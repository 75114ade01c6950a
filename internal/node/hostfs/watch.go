package hostfs

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// A Path is a file or a directory to watch, whether it exists or not.
type Path struct {
	Name string // absolute
	// Only selects entries by base name if the path is a directory; nil selects all. Another goroutine calls it, at any
	// time.
	Only func(base string) bool
}

const (
	// recheckInterval is the interval of reports without an event: the kernel reports no mount over a directory, no
	// unmount and no removal of a directory that a mount still holds.
	recheckInterval = 10 * time.Second
	// pollInterval replaces it while this user has no free inotify instance, or not enough watches. All programs of
	// a user share them, so that they can run out, and become free again, at any time.
	pollInterval = 2 * time.Second
)

// Watch reports that an entry changed at one of a set of paths, without naming it: the receiver compares all files with
// their desired state. A Watch uses one inotify instance and three goroutines until Close.
//
// Watch walks each path from the root, through symbolic links, and watches each directory on the way for the entries
// in the paths. So any element of a path can be created, removed, renamed or replaced, also in the way that the kubelet
// updates a volume (the file is a link to ..data/file, and a new link is renamed onto ..data). If a path ends at a
// directory, Watch also watches its entries, but no files below them or behind links in it.
//
// Watch renews the watches of all directories at each relevant event and every ten seconds, and only then reports a
// change. So the receiver notices a change without an event within ten seconds.
type Watch struct {
	log     *slog.Logger
	changed chan struct{}
	wake    chan struct{}
	end     func()
	running sync.WaitGroup
	polling atomic.Bool
	// watched is nil during a walk: then each event counts.
	watched atomic.Pointer[watchSet]
	paths   atomic.Pointer[[]Path]

	kernel *fsnotify.Watcher // only for the walking goroutine; nil without an inotify instance
}

// NewWatch returns a watch without paths.
func NewWatch(log *slog.Logger) *Watch {
	stop := make(chan struct{})
	w := &Watch{log: log, changed: make(chan struct{}, 1), wake: make(chan struct{}, 1), end: sync.OnceFunc(func() { close(stop) })}
	w.paths.Store(&[]Path{})
	w.running.Go(func() { w.run(stop) })
	return w
}

// Polling reports whether Watch reports a change every two seconds because inotify is not available.
func (w *Watch) Polling() bool { return w.polling.Load() }

// Set replaces the paths to watch. If the set of names differs from the last one, Watch reports one change as soon as it
// watches them.
func (w *Watch) Set(paths ...Path) {
	paths = slices.SortedStableFunc(slices.Values(paths), func(a, b Path) int { return strings.Compare(a.Name, b.Name) })
	before := w.paths.Swap(&paths)
	if !slices.EqualFunc(*before, paths, func(a, b Path) bool { return a.Name == b.Name }) {
		signal(w.wake)
	}
}

// Changed returns a channel that receives after a change since the last receive. The channel is never closed.
func (w *Watch) Changed() <-chan struct{} { return w.changed }

// Close ends the watch and waits for its goroutines.
func (w *Watch) Close() {
	w.end()
	w.running.Wait()
}

// signal sends to the channel unless a signal is pending.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run walks the paths at each relevant event and at each interval, and then reports a change.
func (w *Watch) run(stop <-chan struct{}) {
	defer func() {
		if w.kernel != nil {
			_ = w.kernel.Close() // ends the goroutine that reads it
		}
	}()
	timer := time.NewTimer(recheckInterval)
	defer timer.Stop()
	for {
		select {
		case <-stop:
			return
		case <-w.wake:
		case <-timer.C:
		}
		w.report(w.walk())
		signal(w.changed)
		if w.Polling() {
			timer.Reset(pollInterval)
		} else {
			timer.Reset(recheckInterval)
		}
	}
}

// walk watches the directories on the way of all paths. It includes the watched directories because another directory may now
// have the name. Watches of earlier walks stay: the kernel ends a watch with its directory. An event during a walk causes
// another walk.
func (w *Watch) walk() error {
	if err := w.open(); err != nil {
		return err
	}
	w.watched.Store(nil)
	set := &watchSet{names: map[string]bool{}, ends: map[string][]Path{}}
	var errs []error
	for _, p := range *w.paths.Load() {
		errs = append(errs, set.add(p, w.kernel.Add))
	}
	w.watched.Store(set)
	return errors.Join(errs...)
}

// open creates the inotify instance if it does not exist yet.
func (w *Watch) open() error {
	if w.kernel != nil {
		return nil
	}
	kernel, err := fsnotify.NewWatcher()
	if err == nil {
		w.kernel = kernel
		w.running.Go(func() { w.readEvents(kernel) })
	}
	return err
}

// readEvents reads the kernel's events until the instance is closed. It never blocks otherwise, because fsnotify adds no
// watch while an error is unread.
func (w *Watch) readEvents(kernel *fsnotify.Watcher) {
	for {
		select {
		case event, ok := <-kernel.Events:
			if !ok {
				return
			}
			if w.watched.Load().counts(filepath.Clean(event.Name)) {
				w.log.Debug("path changed", "path", event.Name, "operation", event.Op)
				signal(w.wake)
			}
		case err, ok := <-kernel.Errors:
			if !ok {
				return
			}
			// Usually the queue overflowed: any event may be lost.
			w.log.Warn("inotify events were lost, comparing all files", "error", err)
			signal(w.wake)
		}
	}
}

// report logs the first of a series of failures, and its end.
func (w *Watch) report(err error) {
	switch before := w.polling.Swap(err != nil); {
	case err != nil && !before:
		w.log.Warn("inotify is not available, polling the files every two seconds", "error", err, "hint", watchHint(err))
	case err == nil && before:
		w.log.Info("inotify is available again, the files are watched")
	}
}

func watchHint(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return "the node has no inotify watches left: raise the sysctl fs.inotify.max_user_watches"
	case errors.Is(err, syscall.EMFILE):
		return "the node has no inotify instances left: raise the sysctl fs.inotify.max_user_instances"
	}
	return Hint(err)
}

// A watchSet holds the names and directories on the way of a list of paths.
type watchSet struct {
	names map[string]bool   // the elements of all paths, including links' targets
	ends  map[string][]Path // the paths that end at a directory, by its path without links
}

// add walks a path. It watches each directory before it examines the entry, so that a later change of the entry is an
// event. The walk ends where the next entry is missing or a file, or after too many links.
func (s *watchSet) add(path Path, watch func(dir string) error) error {
	var err error
	root, below := hostpath.Root(path.Name)
	end, failed := hostpath.Walk(root, below, func(dir, name string) bool {
		if err = watch(dir); err != nil {
			err = wrapPath("watching", dir, err)
			return false
		}
		s.names[name] = true
		info, missing := os.Lstat(filepath.Join(dir, name)) // its appearance is an event
		return missing == nil && (info.IsDir() || info.Mode().Type() == fs.ModeSymlink)
	})
	if end != "" && failed == nil {
		s.ends[end] = append(s.ends[end], path)
		err = wrapPath("watching", end, watch(end))
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	return err
}

// counts reports whether an event at a path may concern a path of the set.
func (s *watchSet) counts(path string) bool {
	dir, base := filepath.Split(path)
	return s == nil || s.names[base] || slices.ContainsFunc(s.ends[filepath.Clean(dir)], func(p Path) bool {
		return p.Only == nil || p.Only(base)
	})
}
