// Package netns runs functions inside network namespaces.
//
// It promises that a function runs on its own operating system thread in the requested namespace, that the caller's
// thread, the process's first thread and every pooled thread stay in their namespaces, and that a panic or
// runtime.Goexit of the function becomes an error. It resolves a path once, so that checks and work are on the same open
// file and a later change of the path has no effect. It refuses a file that is not a network namespace with an error
// that names the file.
//
// It never names a namespace, creates namespaces only in [New], and writes no rules.
//
// Start reading at [Open] and [Namespace.Do]. [Namespace.DoIsolated] adds a private view of a few files for the
// processes that the function starts. [Do] is for callers that need no check before they enter, [In] for functions that
// return a value.
package netns

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The network namespaces of the reading thread, of the first thread of this process, and of the node's first process.
// /proc/self is the first thread's, so the calling thread needs /proc/thread-self.
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
// Within fn, Do of the same Namespace runs its function on the same thread, so that several steps cost one entry. Otherwise fn
// runs on a locked thread, neither the caller's nor the process's first, so that nothing else in the process runs in
// the namespace. The thread then returns to its own namespace, or ends if it cannot return. Processes that fn starts
// are in the namespace; goroutines that fn starts are not.
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
		n.thread.CompareAndSwap(0, thread) // unless another thread is inside
		defer n.thread.CompareAndSwap(thread, 0)
		err = guard(fn)
		// fn may also have moved the thread. A thread that cannot return to its namespace ends.
		return home.enter() == nil, err
	})
}

// inside reports whether the calling thread runs a function of Do and is still in the namespace.
func (n *Namespace) inside() bool {
	if n.thread.Load() != int64(unix.Gettid()) {
		return false
	}
	now, err := InodeOf(threadPath)
	return err == nil && now == n.inode
}

// entries counts the entries of all namespaces.
var entries atomic.Uint64 //nolint:gochecknoglobals // of the whole process

// Entries returns the number of times that Do has moved a thread of this process into a namespace.
func Entries() uint64 { return entries.Load() }

// In is [Namespace.Do] for a function that returns a value.
func In[T any](n *Namespace, fn func() (T, error)) (result T, err error) {
	err = n.Do(func() (err error) {
		result, err = fn()
		return err
	})
	return result, err
}

// errEnded is the error of a function that ended its goroutine instead of returning.
var errEnded = errors.New("running in a network namespace: the function called runtime.Goexit")

// onThread runs fn on a locked thread and waits for it. The thread ends with its goroutine unless fn returns
// reusable.
//
// fn never runs on the process's first thread. The Go runtime cannot end that thread, and /proc/self shows its namespaces for
// the whole process: any reader would mistake the pod's network for the node's.
func onThread(fn func() (reusable bool, err error)) error {
	done := make(chan error, 1)
	go func() {
		err := errEnded
		defer func() { done <- err }()

		runtime.LockOSThread() //nolint:forbidigo // the one place
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine occupies the first thread, the next goroutine gets another thread.
			err = onThread(fn)
			runtime.UnlockOSThread() //nolint:forbidigo // the one place
			return
		}
		// Goexit in fn leaves both unchanged.
		var reusable bool
		if reusable, err = fn(); reusable {
			runtime.UnlockOSThread() //nolint:forbidigo // the one place
		}
	}()
	return <-done
}

// guard runs fn and turns a panic into an error.
func guard(fn func() error) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case error:
			err = fmt.Errorf("panic in a network namespace: %w\n%s", p, debug.Stack())
		default:
			err = fmt.Errorf("panic in a network namespace: %v\n%s", p, debug.Stack())
		}
	}()
	return fn()
}

// Lacking returns the capabilities (capabilities(7)) that the calling thread lacks to find the network namespaces of other processes
// (CAP_SYS_PTRACE), to enter them (CAP_SYS_ADMIN) and to read their rules (CAP_NET_ADMIN).
func Lacking() ([]string, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // 32 capabilities each
	if err := unix.Capget(&header, &data[0]); err != nil {
		return nil, fmt.Errorf("reading the capabilities of this process: %w", err)
	}
	var all []string
	for _, c := range []struct {
		number int
		name   string
	}{{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"}} {
		if data[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			all = append(all, c.name)
		}
	}
	return all, nil
}
