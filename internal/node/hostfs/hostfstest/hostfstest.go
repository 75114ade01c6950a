// Package hostfstest ends or fails a piece of work on the node's files at each of its operations, to show that the files
// that it leaves are valid.
//
// The faults count from zero: KillAt(0) fails the first operation. A test goes over all of them with
//
//	for n := range hostfstest.Count(work) { ... hostfs.Disk{Ops: hostfstest.KillAt(n)} ... }
//
// with fresh files each time. All that is let through happens on the real file system.
package hostfstest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// ErrKilled is the error of every operation of a killed process.
var ErrKilled = errors.New("killed")

// Faults are operations that fail as configured. They are safe for concurrent use.
type Faults struct {
	kernel hostfs.Kernel
	at     int   // how many operations go through first
	err    error // error of the next one
	dead   bool  // whether all later ones get it too

	mu    sync.Mutex
	log   []string
	dirty map[*os.File]*os.File // written and not synced, by the file that was written; nil without a power cut
}

// KillAt lets n operations through and fails every other with ErrKilled, as if the process had been killed: nothing is
// cleaned up. A write at which it is killed is half done.
func KillAt(n int) *Faults { return &Faults{at: n, err: ErrKilled, dead: true} }

// PowerCutAt is KillAt for the node: content that is not synced until then is lost, so that the file is empty.
// Renames and the like are not lost; that is the worse case of the two.
func PowerCutAt(n int) *Faults {
	return &Faults{at: n, err: ErrKilled, dead: true, dirty: map[*os.File]*os.File{}}
}

// FailAt lets n operations through, fails one with err, and lets all others through. A write that fails is half done.
func FailAt(n int, err error) *Faults { return &Faults{at: n, err: err} }

// Count returns how many operations the work makes when all of them succeed.
func Count(work func(disk hostfs.Disk)) int { return len(Record(work)) }

// Record returns the operations the work makes, such as "rename /a/b.tmp.7 /a/b".
func Record(work func(disk hostfs.Disk)) []string {
	f := &Faults{at: -1}
	work(hostfs.Disk{Ops: f})
	return f.Log()
}

// Memory returns an empty directory in memory, where nothing waits for a disk.
func Memory(tb testing.TB) string {
	tb.Helper()
	var stat syscall.Statfs_t
	const tmpfsMagic = 0x01021994
	if err := syscall.Statfs("/dev/shm", &stat); err != nil || stat.Type != tmpfsMagic {
		tb.Fatal("/dev/shm is no tmpfs: this test needs one")
	}
	dir, err := os.MkdirTemp("/dev/shm", "hostfs") //nolint:usetesting // another file system than the test's
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Log returns the operations until now, the failed ones included.
func (f *Faults) Log() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// next records an operation and returns the error with which it is to fail.
func (f *Faults) next(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.log)
	f.log = append(f.log, fmt.Sprintf(format, args...))
	if f.err == nil || n < f.at || n > f.at && !f.dead {
		return nil
	}
	f.cutPower()
	return f.err
}

// do records an operation and carries it out unless it is to fail.
func (f *Faults) do(operation func() error, format string, args ...any) error {
	if err := f.next(format, args...); err != nil {
		return err
	}
	return operation()
}

func (f *Faults) cutPower() {
	for file := range maps.Values(f.dirty) {
		_ = file.Truncate(0) // a test would see content where it expects none
		_ = file.Close()
	}
	clear(f.dirty)
}

// Create implements [hostfs.Ops].
func (f *Faults) Create(path string) (*os.File, error) {
	if err := f.next("create %s", path); err != nil {
		return nil, err
	}
	file, err := f.kernel.Create(path)
	if err != nil || f.dirty == nil {
		return file, err
	}
	// Another way to the same inode, which outlives the close and the rename.
	second, err := os.OpenFile(path, os.O_WRONLY, 0) //nolint:gosec // the caller's path
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dirty[file] = second
	return file, nil
}

// Write implements [hostfs.Ops].
func (f *Faults) Write(file *os.File, data []byte) (n int, err error) {
	err = f.next("write %s", file.Name())
	switch {
	case err == nil:
		return f.kernel.Write(file, data)
	case f.dirty == nil: // a power cut would lose it
		n, _ = f.kernel.Write(file, data[:len(data)/2])
	}
	return n, err
}

// Chown implements [hostfs.Ops].
func (f *Faults) Chown(file *os.File, uid, gid int) error {
	return f.do(func() error { return f.kernel.Chown(file, uid, gid) }, "chown %s", file.Name())
}

// Chmod implements [hostfs.Ops].
func (f *Faults) Chmod(file *os.File, mode fs.FileMode) error {
	return f.do(func() error { return f.kernel.Chmod(file, mode) }, "chmod %s", file.Name())
}

// Sync implements [hostfs.Ops].
func (f *Faults) Sync(file *os.File) error {
	if err := f.next("sync %s", file.Name()); err != nil {
		return err
	}
	if err := f.kernel.Sync(file); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if second := f.dirty[file]; second != nil {
		delete(f.dirty, file)
		return second.Close()
	}
	return nil
}

// Close implements [hostfs.Ops]. The file is closed in any case: the kernel closes the files of a dead process.
func (f *Faults) Close(file *os.File) error {
	return errors.Join(f.next("close %s", file.Name()), f.kernel.Close(file))
}

// Rename implements [hostfs.Ops].
func (f *Faults) Rename(from, to string, flags uint) error {
	return f.do(func() error { return f.kernel.Rename(from, to, flags) }, "rename %s %s", from, to)
}

// Remove implements [hostfs.Ops].
func (f *Faults) Remove(path string) error {
	return f.do(func() error { return f.kernel.Remove(path) }, "remove %s", path)
}

// Symlink implements [hostfs.Ops].
func (f *Faults) Symlink(target, link string) error {
	return f.do(func() error { return f.kernel.Symlink(target, link) }, "symlink %s %s", target, link)
}

// Mkdir implements [hostfs.Ops].
func (f *Faults) Mkdir(path string, mode fs.FileMode) error {
	return f.do(func() error { return f.kernel.Mkdir(path, mode) }, "mkdir %s", path)
}

// SyncDir implements [hostfs.Ops].
func (f *Faults) SyncDir(path string) error {
	return f.do(func() error { return f.kernel.SyncDir(path) }, "syncdir %s", path)
}
