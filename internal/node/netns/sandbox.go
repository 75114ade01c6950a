package netns

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A Bind puts the file Source in the place of the existing file Target. Source has to mean the same file to every thread, and
// may be an open namespace (see Namespace.Path): the kernel binds no other file of another mount namespace.
type Bind struct {
	Source, Target string
}

// DoIsolated is [Namespace.Do] on a thread that also has a mount namespace of its own, in which the binds are mounted.
// Processes started by fn inherit it; no other thread or process sees any of the mounts, and they are gone
// when fn and those processes are.
//
// Isolation is best effort: where the node denies the mount namespace (privilege, seccomp, SELinux) or one of
// the binds, fn runs without that part, and the error isolation names the missing part. err is fn's
// error, or that of entering the network namespace, in which case fn has not run.
func (n *Namespace) DoIsolated(binds []Bind, fn func() error) (isolation, err error) {
	err = onThread(func() (reusable bool, err error) {
		// A thread cannot leave its mount namespace cleanly: after unshare(CLONE_FS) it shares no root and working
		// directory with the other threads any more, and setns(2) refuses threads that do. So it is never reusable.
		if err = n.enter(); err != nil {
			return false, err
		}
		isolation = isolate(binds)
		return false, guard(fn)
	})
	return isolation, err
}

// isolate gives the calling thread a mount namespace and mounts into it. Nothing is mounted unless the new
// namespace has been cut off from the one it was copied from: the mounts would appear on the node.
func isolate(binds []Bind) error {
	// CLONE_NEWNS implies CLONE_FS (unshare(2)); it is spelled out because the thread must not share it.
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
