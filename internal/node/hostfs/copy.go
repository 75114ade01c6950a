package hostfs

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// bigFile is the minimum size in bytes of a file whose pages are dropped from the page cache.
const bigFile = 1 << 20

// Copy makes to a regular file with the content of from and exactly this mode. It is as durable and atomic as WriteFile. It
// replaces a running program without writing to its file, so the program keeps running.
//
// Unlike WriteFile it replaces a symbolic link instead of its target, and does not keep the owner: the file is a program,
// which this process must own.
func (d Disk) Copy(from, to string, mode fs.FileMode) error {
	if err := d.copy(from, to, mode); err != nil {
		return fmt.Errorf("copying %q to %q: %w", from, to, err)
	}
	return nil
}

func (d Disk) copy(from, to string, mode fs.FileMode) error {
	source, info, err := openRegular(from)
	if err != nil {
		return wrapPath("opening", from, err)
	}
	defer func() { _ = source.Close() }() // only read

	// The kernel executes no file that a process has open for writing (ETXTBSY), and a child that is forked now would have
	// it open until execve(2): the container runtime would fail to start the new plugin. So the lock prevents forks until
	// the file is closed.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fill := func(temp *os.File) error {
		n, err := io.Copy(tempWriter{d, temp}, source)
		if err == nil && n != info.Size() {
			err = fmt.Errorf("reading %q: %d bytes of %d: it is being changed", from, n, info.Size())
		}
		dropPageCache(source)
		if err != nil {
			return err
		}
		return d.chmod(temp, mode)
	}
	return d.replace(to, fill, d.renameOnto)
}

// A tempWriter writes to a temporary file with the operations of a Disk.
type tempWriter struct {
	disk Disk
	temp *os.File
}

func (w tempWriter) Write(data []byte) (int, error) { return len(data), w.disk.write(w.temp, data) }

// dropPageCache drops the clean pages of a big file from the page cache, so that the kernel does
// not charge a copy to the agent's memory.
func dropPageCache(file *os.File) {
	if info, err := file.Stat(); err != nil || info.Size() < bigFile {
		return
	}
	_ = unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// Comparisons caches which pairs of files had equal content. A result is valid while stat(2) returns the same for both
// files. The zero value is empty; Comparisons is safe for concurrent use.
type Comparisons struct {
	known sync.Map // of statuses, by the path of the copy
}

// statuses are the statuses of a file and its copy.
type statuses [2]syscall.Stat_t

// clockStep is the longest interval in which two changes can get the same time: file systems have steps of up to 2 s.
const clockStep = 2 * time.Second

// Identical reports whether to is as Disk.Copy makes it. An unreadable from is an error. An unreadable to is a different file.
func (c *Comparisons) Identical(from, to string, mode fs.FileMode) (bool, error) {
	source, info, err := openRegular(from)
	if err != nil {
		return false, fmt.Errorf("comparing %q with %q: %w", to, from, wrapPath("opening", from, err))
	}
	defer func() { _ = source.Close() }() // only read
	if old, statErr := os.Lstat(to); statErr != nil || old.Size() != info.Size() || old.Mode() != mode {
		return false, nil
	}
	target, _, err := openRegular(to)
	if err != nil {
		return false, nil
	}
	defer func() { _ = target.Close() }() // only read
	same, err := c.equal(source, target)
	return same, wrapPath("comparing", from, err)
}

func (c *Comparisons) equal(source, target *os.File) (bool, error) {
	before := statuses{stat(source), stat(target)}
	if known, _ := c.known.Load(target.Name()); known == before {
		return true, nil
	}
	want, err := digest(source)
	if err != nil {
		return false, err
	}
	// A program that ran after its pages were evicted is cached in single pages, and a start costs up to 1.7 times as much. After a
	// read of the whole file it is cached in large blocks.
	dropPageCache(target)
	if have, _ := digest(target); have != want { // Copy replaces an unreadable copy
		return false, nil
	}
	after := statuses{stat(source), stat(target)}
	changed := time.Unix(0, max(after[0].Ctim.Nano(), after[1].Ctim.Nano()))
	if after == before && time.Since(changed) > clockStep {
		c.known.Store(target.Name(), after)
	}
	return true, nil
}

// stat returns the status of a file without its access time. Every change of the file sets ctime, which no process can set.
func stat(file *os.File) (s syscall.Stat_t) {
	if info, err := file.Stat(); err == nil {
		s = *info.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // of Linux
	}
	s.Atim = syscall.Timespec{} // reading changes it
	return s
}

func digest(file *os.File) (string, error) {
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return "", err
	}
	return string(hash.Sum(nil)), nil
}
