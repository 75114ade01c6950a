package netns

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A Bind mounts the file Source over the existing file Target. Source must be the same file for every thread. It may be an open
// namespace (see Namespace.Path): the kernel binds no other file of another mount namespace.
type Bind struct {
	Source, Target string
}

// DoIsolated is [Namespace.Do] on a thread that also has its own mount namespace with the binds. Processes that fn starts
// inherit the mount namespace. No other thread or process sees the mounts, which end with fn and its processes.
//
// Isolation is best effort: if the node denies the mount namespace (privilege, seccomp, SELinux) or a bind, fn runs
// without it, and the error isolation names the missing part. err is the error of fn or, if fn has not run, of
// entering the network namespace.
func (n *Namespace) DoIsolated(binds []Bind, fn func() error) (isolation, err error) {
	err = onThread(func() (reusable bool, err error) {
		// A thread cannot leave its mount namespace cleanly: after unshare(CLONE_FS) it no longer shares the root and working
		// directory with the other threads, and setns(2) refuses threads that do. So it is never reusable.
		if err = n.enter(); err != nil {
			return false, err
		}
		isolation = isolate(binds)
		return false, guard(fn)
	})
	return isolation, err
}

// isolate moves the calling thread into a new mount namespace and mounts the binds. It mounts nothing unless
// propagation to the parent mount namespace is off, because the mounts would appear on the node.
func isolate(binds []Bind) error {
	// CLONE_NEWNS implies CLONE_FS (unshare(2)), which is explicit here because the thread must not share it.
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		if unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "") != nil {
			return fmt.Errorf("cutting the mount namespace off from the node's: %w", err)
		}
	}
	var problems []error
	for _, b := range binds {
		if err := unix.Mount(b.Source, b.Target, "", unix.MS_BIND, ""); err != nil {
			problems = append(problems, fmt.Errorf("mounting %q over %q: %w", b.Source, b.Target, err))
		}
	}
	return errors.Join(problems...)
}
