package netns

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A Bind puts the file Source in the place of the existing file Target.
type Bind struct {
	Source, Target string
}

// DoIsolated is [Namespace.Do] on a thread that also has a mount namespace of its own, in which the binds are mounted.
// Processes started by fn inherit it; no other thread or process sees any of the mounts, and they are gone
// when fn and those processes are.
//
// Isolation is best effort: where the node denies the mount namespace (privilege, seccomp, SELinux) or one of
// the binds, fn runs with as much of it as could be had, and isolation says what is missing. err is fn's
// error, or that of entering the network namespace, in which case fn has not run.
//
// Sources are opened before anything changes namespace; they are the files their paths meant to the
// caller.
func (n *Namespace) DoIsolated(binds []Bind, fn func() error) (isolation, err error) {
	mounts, isolation := hold(binds)
	defer func() {
		for _, m := range mounts {
			m.source.close()
		}
	}()

	err = onThread(func() (reusable bool, err error) {
		// A mount namespace cannot be given back: its thread shares no root and working directory with the
		// others any more, and setns refuses threads that do. So this thread is never reusable.
		if err = n.enter(); err != nil {
			return false, err
		}
		isolation = errors.Join(isolation, isolate(mounts))
		return false, guard(fn)
	})
	return isolation, err
}

// A mount is a bind whose source is open.
type mount struct {
	Bind
	source *file
}

// hold opens the sources. A bind whose source cannot be opened is left out and named in the error.
func hold(binds []Bind) ([]mount, error) {
	var (
		mounts   []mount
		problems []error
	)
	for _, b := range binds {
		source, err := locate(b.Source)
		if err != nil {
			problems = append(problems, fmt.Errorf("opening %q to mount it over %q: %w", b.Source, b.Target, err))
			continue
		}
		mounts = append(mounts, mount{Bind: b, source: source})
	}
	return mounts, errors.Join(problems...)
}

// isolate gives the calling thread a mount namespace and mounts into it. Nothing is mounted unless the new
// namespace has been cut off from the one it was copied from: the mounts would appear on the node.
func isolate(mounts []mount) error {
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
	for _, m := range mounts {
		if err := m.attach(); err != nil {
			problems = append(problems, fmt.Errorf("mounting %q over %q: %w", m.Source, m.Target, err))
		}
	}
	return errors.Join(problems...)
}

// attach mounts in the calling thread's mount namespace.
//
// The held file belongs to the mount namespace it was opened in, and the kernel binds such a file only if it
// is a namespace (fs/namespace.c, do_loopback). Any other source is looked up again in the copy, and must be
// the same file still.
func (m mount) attach() error {
	source := m.source
	if source.inNsfs() != nil {
		again, err := locate(m.Source)
		if err != nil {
			return err
		}
		defer again.close()
		if again.inode != source.inode {
			return errors.New("the source has become another file")
		}
		source = again
	}
	return unix.Mount(source.procPath(), m.Target, "", unix.MS_BIND, "")
}
