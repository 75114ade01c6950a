// Package netns runs functions inside network namespaces.
//
// It promises that a function runs on an operating system thread of its own which is in the namespace that
// was asked for, that the caller's thread, the process's first thread and every pooled thread stay where
// they were, and that neither a panic nor runtime.Goexit of the function gets further than an error. A path
// is held open and looked at before anything changes namespace, so what it names cannot change half-way and
// something that is no network namespace is refused by name.
//
// It never names a namespace, makes none but a [Scratch] of its own process, and programs nothing inside one.
//
// Start reading at [Do]. [DoIsolated] adds a private view of a few files for the processes that the function
// starts; [Same] and [IsHost] compare namespaces.
package netns

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// The namespace of the reading thread, of the first thread of this process and of the node's first process.
// The first one needs thread-self: "self" is the first thread's.
const (
	threadPath  = "/proc/thread-self/ns/net"
	processPath = "/proc/self/ns/net"
	initPath    = "/proc/1/ns/net"
)

// Do runs fn in the network namespace at path: a bind mount, /proc/PID/ns/net or /proc/self/fd/N. An empty
// path is the namespace the caller is in. Do returns when fn has returned, with fn's error.
//
// fn runs on a locked thread that is not the caller's and not the process's first one, so nothing else in
// the process can be seen in, or see, the namespace. The thread then goes back to where it was; one that
// cannot is ended. Processes started by fn are in the namespace; goroutines started by fn are not.
//
// A panic in fn comes back as an error with the stack.
func Do(path string, fn func() error) error {
	target, err := open(path)
	if err != nil {
		return err
	}
	defer target.close()

	return onThread(func() (reusable bool, err error) {
		home, err := open(threadPath)
		if err != nil {
			return true, err
		}
		defer home.close()
		if err = target.enter(); err != nil {
			return true, err
		}
		err = guard(fn)
		// It may have moved the thread, too. Where that cannot be undone the thread ends.
		return home.enter() == nil, err
	})
}

// Same reports whether a and b are one network namespace. An empty path is the caller's.
func Same(a, b string) (bool, error) {
	first, err := open(a)
	if err != nil {
		return false, err
	}
	defer first.close()
	second, err := open(b)
	if err != nil {
		return false, err
	}
	defer second.close()
	return first.id == second.id, nil
}

// IsHost reports whether path is the network namespace of this process or of process 1, that is, whether
// programming it would program the node. An empty path is the caller's namespace. Process 1 is left out when
// it may not be looked at.
func IsHost(path string) (bool, error) {
	target, err := open(path)
	if err != nil {
		return false, err
	}
	defer target.close()

	own, err := identify(processPath)
	if err != nil {
		return false, fmt.Errorf("reading the network namespace of this process: %w", err)
	}
	if target.id == own {
		return true, nil
	}
	first, err := identify(initPath)
	return err == nil && target.id == first, nil
}

// OfOtherUsers reports whether the namespace belongs to another user namespace than that of this process, as that of a
// pod with hostUsers: false does (NS_GET_USERNS, linux/nsfs.h). An empty path is the caller's namespace.
func OfOtherUsers(path string) (bool, error) {
	target, err := open(path)
	if err != nil {
		return false, err
	}
	defer target.close()
	owner, err := unix.IoctlRetInt(int(target.handle), unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return false, nil // it is of one above ours, as in a container whose network is older than its users
	}
	if err != nil {
		return false, fmt.Errorf("asking for the owner of network namespace %q: %w", path, err)
	}
	defer unix.Close(owner) //nolint:errcheck // nothing was written
	its, err := identify(fmt.Sprintf("/proc/self/fd/%d", owner))
	if err != nil {
		return false, fmt.Errorf("asking for the owner of network namespace %q: %w", path, err)
	}
	own, err := identify("/proc/self/ns/user")
	if err != nil {
		return false, fmt.Errorf("reading the user namespace of this process: %w", err)
	}
	return its != own, nil
}
