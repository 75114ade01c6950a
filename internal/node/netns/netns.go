// Package netns runs functions inside network namespaces.
//
// It promises that a function runs on an operating system thread of its own in the requested namespace, that the
// caller's thread, the process's first thread and every pooled thread stay in their namespaces, and that a panic or
// runtime.Goexit of the function becomes an error. A path is resolved once: checks and work are on the same open file, so a
// path that changes in between has no effect, and a file that is no network namespace is refused with an error that names
// it.
//
// It never names a namespace, creates only those of [New], and programs none.
//
// Start reading at [Open] and [Namespace.Do]. [Namespace.DoIsolated] adds a private view of a few files for the
// processes that the function starts. [Do] is for callers that need no check before they enter, [In] for functions with a
// result.
package netns

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The namespace of the reading thread, of the first thread of this process and of the node's first process.
// The first one needs thread-self: "self" is the first thread's.
const (
	threadPath  = "/proc/thread-self/ns/net"
	processPath = "/proc/self/ns/net"
	initPath    = "/proc/1/ns/net"
)

// Do runs fn in the network namespace at path, as [Namespace.Do] does.
func Do(path string, fn func() error) error {
	target, err := Open(path)
	if err != nil {
		return err
	}
	defer target.Close()
	return target.Do(fn)
}

// Do runs fn in the namespace. Do returns when fn has returned, with fn's error.
//
// Within fn, Do of the same Namespace runs its function at once, on the same thread: several steps cost one entry. Otherwise
// fn runs on a locked thread that is not the caller's and not the process's first one, so nothing else in
// the process can be seen in, or see, the namespace. The thread then returns to its namespace; a thread that
// cannot return is ended. Processes started by fn are in the namespace; goroutines started by fn are not.
//
// Do returns a panic in fn as an error with the stack.
func (n *Namespace) Do(fn func() error) error {
	if n.inside() {
		return guard(fn)
	}
	return onThread(func() (reusable bool, err error) {
		home, err := Open(threadPath)
		if err != nil {
			return true, err
		}
		defer home.Close()
		if err = n.enter(); err != nil {
			return true, err
		}
		entries.Add(1)
		thread := int64(unix.Gettid())
		n.thread.CompareAndSwap(0, thread) // another thread may be inside
		defer n.thread.CompareAndSwap(thread, 0)
		err = guard(fn)
		// fn may have moved the thread, too. If the thread cannot return to its namespace it ends.
		return home.enter() == nil, err
	})
}

// inside reports whether the calling thread runs a function of Do, which has not left the namespace.
func (n *Namespace) inside() bool {
	if n.thread.Load() != int64(unix.Gettid()) {
		return false
	}
	now, err := InodeOf(threadPath)
	return err == nil && now == n.inode
}

// entries counts the entries of all namespaces.
var entries atomic.Uint64 //nolint:gochecknoglobals // of the whole process

// Entries returns how many times this process has entered a namespace by Do, each on a thread that is moved and moved back.
func Entries() uint64 { return entries.Load() }

// In is [Namespace.Do] for a function with a result.
func In[T any](n *Namespace, fn func() (T, error)) (result T, err error) {
	err = n.Do(func() (err error) {
		result, err = fn()
		return err
	})
	return result, err
}
