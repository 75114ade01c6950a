package hostfs

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A Path is a file or a directory to watch, whether it exists or not.
type Path struct {
	Name string // absolute
	// Only says which entries count if the path is a directory; nil counts all. It is called with a base name, at any
	// time and by another goroutine.
	Only func(base string) bool
}

// recheck is how often the watch looks whether it still watches what the paths lead to. The kernel says nothing when a
// file system is mounted over a directory or taken away, and a directory that could not be watched may be one that can.
const recheck = 10 * time.Second

// polling is how often a change is reported without an event while the kernel has no inotify instance, or not enough
// watches, for us. Programs of the same user share them, so both may come to an end, and come back, at any time.
const polling = 2 * time.Second

// settleRounds bounds how often a walk is repeated because what it saw is changing under it.
const settleRounds = 32

// Watch reports that something changed at one of a set of paths, not what: whoever hears it compares what is with what
// should be. It is one inotify instance and two goroutines for as long as the program runs. While the kernel has no
// instance or watch for it, it reports a change every two seconds instead.
//
// Each path is walked from the root, through symbolic links, and each directory on the way is watched for the name that
// the path takes in it. So a path may come to be, go, be renamed away or be replaced at any of its parts, also the way
// the kubelet replaces a volume: the file is a link to ..data/file, ..data a link to a directory with the time in its
// name, and an update renames a new link onto ..data. Whatever concerns one of these names is a change and a reason to
// walk again. A directory at the end of a path is watched for its own entries as well, but not for what is below them
// or behind links in it.
//
// A change is told to whoever listens to Changed after the watches have been set anew, and so is each time that they
// are: what happened before is to be seen, what happens after is told again.
type Watch struct {
	log *slog.Logger
	// heard is called with each path of which an event counts, and with an empty one when events were lost.
	heard   func(path string)
	changed chan struct{}
	wake    chan struct{}
	stop    chan struct{}
	stopped sync.Once
	running sync.WaitGroup

	// What counts, for the goroutine that reads the events. It takes no lock that is held while watches are set:
	// the kernel's side of them waits until events are read.
	seen atomic.Pointer[sight]
	lost suspects

	arming  sync.Mutex // what is below
	paths   []Path
	kernel  *fsnotify.Watcher   // nil while there is no instance
	armed   map[string]identity // by directory
	trouble string              // what was logged last

	polls atomic.Bool
}

// NewWatch returns a watch of nothing.
func NewWatch(log *slog.Logger) *Watch { return newWatch(log, func(string) {}) }

func newWatch(log *slog.Logger, heard func(path string)) *Watch {
	w := &Watch{
		log:     log,
		heard:   heard,
		changed: make(chan struct{}, 1),
		wake:    make(chan struct{}, 1),
		stop:    make(chan struct{}),
		armed:   make(map[string]identity),
	}
	w.seen.Store(&sight{})
	w.running.Go(w.look)
	return w
}

// open gets an inotify instance if there is none yet.
func (w *Watch) open() error {
	if w.kernel != nil {
		return nil
	}
	select {
	case <-w.stop:
		return fsnotify.ErrClosed
	default:
	}
	kernel, err := fsnotify.NewWatcher()
	if err != nil {
		return &watchError{doing: "starting watch", err: err}
	}
	w.kernel = kernel
	w.running.Go(func() { w.heed(kernel) })
	return nil
}

// Polling reports whether changes are reported every now and then because the kernel does not.
func (w *Watch) Polling() bool { return w.polls.Load() }

// Set makes these the paths to watch. If their names are not the last ones, in any order, one change is reported. The
// filters given last count, but to give others is no change.
//
// An error says which directories cannot be watched, which was logged. The others are, and those are tried again every now
// and then.
func (w *Watch) Set(paths ...Path) error {
	paths = slices.SortedStableFunc(slices.Values(paths), func(a, b Path) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range paths {
		if !filepath.IsAbs(p.Name) {
			return fmt.Errorf("watching %q: not an absolute path", p.Name)
		}
	}
	w.arming.Lock()
	same := slices.EqualFunc(w.paths, paths, func(a, b Path) bool { return a.Name == b.Name })
	w.paths = paths
	moved, err := w.arm()
	w.arming.Unlock()
	if moved || !same {
		signal(w.changed)
	}
	return err
}

// Changed receives when something changed since the last time it was received from. It is never closed.
func (w *Watch) Changed() <-chan struct{} { return w.changed }

// Close ends the watch and returns when its goroutines have ended.
func (w *Watch) Close() error {
	var err error
	w.stopped.Do(func() {
		close(w.stop)
		w.arming.Lock() // what is being armed ends first
		defer w.arming.Unlock()
		if w.kernel != nil {
			err = w.kernel.Close()
		}
	})
	w.running.Wait()
	return wrap("closing watch", err)
}

// signal makes sure that the channel has something to receive.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// heed reads the kernel's events until the watch is closed, and waits for nothing else.
func (w *Watch) heed(kernel *fsnotify.Watcher) {
	for {
		select {
		case event, ok := <-kernel.Events:
			if !ok {
				return
			}
			w.take(event)
		case err, ok := <-kernel.Errors:
			if !ok {
				return
			}
			// Above all a queue that overflowed: any event may be among those that were lost.
			w.log.Warn("events of files were lost, looking at everything", "error", err)
			w.lost.addAll()
			w.heard("")
			signal(w.wake)
		}
	}
}

func (w *Watch) take(event fsnotify.Event) {
	path := filepath.Clean(event.Name)
	s := w.seen.Load()
	if s.watches(path) && ended(event) {
		w.lost.add(path)
	}
	if s.counts(path, event) {
		w.log.Debug("path changed", "path", path, "operation", event.Op)
		w.heard(path)
		signal(w.wake)
	}
}

// look sets the watches anew after each event that counts, and then tells of it.
func (w *Watch) look() {
	timer := time.NewTimer(recheck)
	defer timer.Stop()
	for {
		woken := false
		select {
		case <-w.stop:
			return
		case <-w.wake:
			woken = true
		case <-timer.C:
		}
		if w.rearm() || woken || w.Polling() {
			signal(w.changed)
		}
		if w.Polling() {
			timer.Reset(polling)
		} else {
			timer.Reset(recheck)
		}
	}
}

func (w *Watch) rearm() (moved bool) {
	w.arming.Lock()
	defer w.arming.Unlock()
	select {
	case <-w.stop:
		return false
	default:
	}
	moved, _ = w.arm() // the error has been logged
	return moved
}

// arm walks the paths and watches the directories on them until that is one and the same picture, so that nothing can
// happen between the look and the watch. It reports whether any watch had to be set or anything looked different.
func (w *Watch) arm() (moved bool, err error) {
	for range settleRounds {
		s, walkErr := walk(w.paths)
		before := w.seen.Swap(s)
		set, armErr := w.follow(s)
		err = errors.Join(walkErr, armErr)
		if w.polls.Swap(armErr != nil) != (armErr != nil) {
			signal(w.wake) // the pause is another one from now on
		}
		if !set && before.equal(s) {
			w.tell(err)
			return moved, err
		}
		moved = true
	}
	// It does not hold still. What it does next is an event, or else is found by the next recheck.
	w.tell(err)
	return moved, err
}

// follow watches the directories of s and no others, and reports whether it set any watch.
func (w *Watch) follow(s *sight) (set bool, err error) {
	if err := w.open(); err != nil {
		return false, err
	}
	lost := w.lost.take()
	have := w.kernel.WatchList()
	for dir, id := range w.armed {
		place := s.places[dir]
		if place != nil && place.id == id && !lost.has(dir) && slices.Contains(have, dir) {
			continue
		}
		_ = w.kernel.Remove(dir) // the kernel may have done it before
		delete(w.armed, dir)
	}
	var errs []error
	for _, dir := range slices.Sorted(maps.Keys(s.places)) {
		if _, ok := w.armed[dir]; ok {
			continue
		}
		if err := w.kernel.Add(dir); err != nil {
			errs = append(errs, &watchError{doing: fmt.Sprintf("watching %q", dir), err: err})
			continue
		}
		w.armed[dir] = s.places[dir].id
		set = true
	}
	return set, errors.Join(errs...)
}

// tell logs a trouble once, and that it is over.
func (w *Watch) tell(err error) {
	trouble := ""
	if err != nil {
		trouble = err.Error()
	}
	if trouble == w.trouble {
		return
	}
	w.trouble = trouble
	if err == nil {
		w.log.Info("all paths are watched again")
		return
	}
	if w.Polling() {
		w.log.Warn("files are looked at every two seconds, as the kernel does not watch them", "error", err, "hint", Hint(err))
		return
	}
	w.log.Warn("some paths cannot be watched, trying again", "error", err, "hint", Hint(err))
}

// suspects are directories whose watch may have ended: what was watched was removed or renamed, and another directory,
// even of the same inode number, may be in its place.
type suspects struct {
	mu   sync.Mutex
	all  bool
	dirs map[string]bool
}

func (s *suspects) add(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dirs == nil {
		s.dirs = make(map[string]bool)
	}
	s.dirs[dir] = true
}

func (s *suspects) addAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = true
}

// take returns the suspects and forgets them.
func (s *suspects) take() *suspects {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := &suspects{all: s.all, dirs: s.dirs}
	s.all, s.dirs = false, nil
	return taken
}

func (s *suspects) has(dir string) bool { return s.all || s.dirs[dir] }
