package hostfs

import (
	"log/slog"

	"github.com/fsnotify/fsnotify"
)

// Knows reports whether the digest of the path would be told without reading.
func (d *Digests) Knows(path string) bool {
	_, ok := d.recall(path)
	return ok
}

// Recheck does at once what the watch does every now and then.
func (w *Watch) Recheck() {
	if w.rearm() {
		signal(w.changed)
	}
}

// Stall keeps the watch from reading further than the next event about the end of a directory, until resume.
func (w *Watch) Stall() (resume func()) {
	w.lost.mu.Lock()
	return w.lost.mu.Unlock
}

// Drop ends the kernel's watch of a directory.
func (w *Watch) Drop(dir string) error { return w.kernel.Remove(dir) }

// Overflow is what the watch gets when the kernel's queue overflowed.
func (w *Watch) Overflow() { w.kernel.Errors <- fsnotify.ErrEventOverflow }

// NewHeardWatch is NewWatch with something that is called for each event that counts.
func NewHeardWatch(log *slog.Logger, heard func(path string)) *Watch { return newWatch(log, heard) }

// Watched returns how many directories the watch has the kernel watch.
func (w *Watch) Watched() int {
	w.arming.Lock()
	defer w.arming.Unlock()
	if w.kernel == nil {
		return 0
	}
	return len(w.kernel.WatchList())
}

// NoWatch is what the kernel says when it does not watch.
func NoWatch(err error) error { return &watchError{doing: "watching", err: err} }
