package hostfs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// copyChunk is how much Copy holds in memory.
const copyChunk = 256 << 10

// bigFile is the size from which on the pages of a file are let go.
const bigFile = 1 << 20

// Copy makes to a regular file with the content of from and exactly this mode, and reports whether it had to. If only
// the mode is wrong only the mode is changed. It is as durable and atomic as WriteFile. A program that is running is replaced, not written to: it runs on.
//
// Unlike WriteFile it replaces a link instead of what the link leads to, and hands on no owner: the file is one that is
// executed, so it is ours alone.
func (d Disk) Copy(from, to string, mode fs.FileMode) (changed bool, err error) {
	same, old, err := d.compare(from, to)
	switch {
	case err != nil:
	case !same:
		changed, err = true, d.copy(from, to, mode)
	case !sameMode(old.Mode(), mode):
		changed, err = true, d.chmod(to, mode)
	}
	if err != nil {
		return changed, fmt.Errorf("copying %q to %q: %w", from, to, err)
	}
	return changed, nil
}

// Identical reports whether Copy would find nothing to do. With [Digests] it costs two stat(2) on a quiet node.
func (d Disk) Identical(from, to string, mode fs.FileMode) (bool, error) {
	same, old, err := d.compare(from, to)
	if err != nil {
		return false, fmt.Errorf("comparing %q with %q: %w", to, from, err)
	}
	return same && sameMode(old.Mode(), mode), nil
}

// compare reports whether to is a regular file with the content of from. Only from can be at fault: what cannot be read
// at to is not the same.
func (d Disk) compare(from, to string) (same bool, old fs.FileInfo, err error) {
	source, err := os.Stat(from)
	if err == nil && !source.Mode().IsRegular() {
		err = ErrNotRegular
	}
	if err != nil {
		return false, nil, wrapPath("examining", from, err)
	}
	old, err = os.Lstat(to)
	if err != nil || !old.Mode().IsRegular() || old.Size() != source.Size() {
		return false, old, nil //nolint:nilerr // the copy will tell whether it matters
	}
	want, err := d.Digests.sum(from)
	if err != nil {
		return false, old, err
	}
	have, err := d.Digests.sum(to)
	return err == nil && have == want, old, nil // what cannot be read is to be replaced
}

func (d Disk) copy(from, to string, mode fs.FileMode) (err error) {
	source, info, err := openRegular(from)
	if err != nil {
		return wrapPath("opening", from, err)
	}
	defer func() { _ = source.Close() }() // only read

	// What somebody holds open for writing cannot be executed (ETXTBSY), and a process that is forked meanwhile holds
	// it until it has become another program: the container runtime would fail to start the plugin that was just put
	// in place. So nothing is forked until the file is closed.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return d.replace(to, func(temp *os.File) error {
		if err := d.stream(temp, source, info.Size()); err != nil {
			return err
		}
		letGo(source)
		return wrap("changing mode", d.ops().Chmod(temp, mode))
	})
}

// stream writes the source, which must have the size it was seen to have: a shorter one is being changed.
func (d Disk) stream(temp, source *os.File, size int64) error {
	chunk := make([]byte, min(size+1, copyChunk))
	var total int64
	for {
		n, err := source.Read(chunk)
		if n > 0 {
			if failed := d.write(temp, chunk[:n]); failed != nil {
				return failed
			}
			total += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF) && total == size:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("reading source: %d bytes of %d: it is being changed", total, size)
		case err != nil:
			return wrap("reading source", err)
		}
	}
}

// letGo tells the page cache that a big file is not needed soon, so that a copy does not make the agent look large: the
// pages are counted as the agent's memory. Only pages that are on the disk can be let go.
func letGo(file *os.File) {
	if info, err := file.Stat(); err != nil || info.Size() < bigFile {
		return
	}
	connection, err := file.SyscallConn()
	if err != nil {
		return
	}
	_ = connection.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), 0, 0, unix.FADV_DONTNEED) })
}

func (d Disk) chmod(path string, mode fs.FileMode) error {
	file, _, err := openRegular(path)
	if err != nil {
		return wrapPath("opening", path, err)
	}
	err = wrap("changing mode", d.ops().Chmod(file, mode))
	if err == nil {
		err = wrap("syncing", d.ops().Sync(file))
	}
	if closed := d.ops().Close(file); err == nil {
		err = wrap("closing", closed)
	}
	return err
}

// Digests remembers the SHA-256 of files for as long as stat(2) says that they are the same: device, inode, size, and
// the times of the last change of content and of attributes, the latter of which nobody can set. The zero value is
// empty, and many may use it at the same time.
type Digests struct {
	mu    sync.Mutex
	known map[string]digest // by path
}

type digest struct {
	of  stamp
	sum [sha256.Size]byte
}

// A stamp changes whenever a file does, if a change is longer ago than its clock's step.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

func stampOf(file *os.File) (s stamp, err error) {
	var stat unix.Stat_t
	connection, err := file.SyscallConn()
	if err != nil {
		return stamp{}, err
	}
	if ctl := connection.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &stat) }); ctl != nil {
		return stamp{}, ctl
	}
	return newStamp(&stat), err
}

func newStamp(stat *unix.Stat_t) stamp {
	return stamp{
		dev: uint64(stat.Dev), ino: stat.Ino, size: stat.Size, //nolint:unconvert // the size differs between machines
		mtime: stat.Mtim, ctime: stat.Ctim,
	}
}

// settled reports whether a change from now on would show: file systems count in steps of up to two seconds. The clock
// is the one the kernel stamps files with.
func (s stamp) settled() bool {
	const step = 2 * time.Second
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
		return false
	}
	return now.Nano()-max(s.mtime.Nano(), s.ctime.Nano()) > int64(step)
}

// sum returns the digest of the regular file. A nil d remembers nothing.
func (d *Digests) sum(path string) ([sha256.Size]byte, error) {
	if known, ok := d.recall(path); ok {
		return known, nil
	}
	file, _, err := openRegular(path)
	if err != nil {
		return [sha256.Size]byte{}, wrapPath("opening", path, err)
	}
	defer func() { _ = file.Close() }() // only read
	before, err := stampOf(file)
	if err != nil {
		return [sha256.Size]byte{}, wrapPath("examining", path, err)
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return [sha256.Size]byte{}, wrapPath("reading", path, err)
	}
	sum := [sha256.Size]byte(hash.Sum(nil))
	if after, err := stampOf(file); err == nil && after == before && after.settled() {
		d.remember(path, digest{of: after, sum: sum})
	}
	return sum, nil
}

func (d *Digests) recall(path string) (sum [sha256.Size]byte, ok bool) {
	if d == nil {
		return sum, false
	}
	d.mu.Lock()
	known, ok := d.known[path]
	d.mu.Unlock()
	if !ok {
		return sum, false
	}
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil || newStamp(&stat) != known.of {
		return sum, false
	}
	return known.sum, true
}

func (d *Digests) remember(path string, known digest) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.known == nil {
		d.known = make(map[string]digest)
	}
	d.known[path] = known
}
