// Package hostfstest interrupts work on the node's files at each of its operations, to show that the files which it
// leaves behind are valid.
//
// Operations count from zero: KillAt(0) fails the first operation. A test covers all of them with fresh files each time, until
// the log is no longer than the number. An operation without a fault changes the real file system. The tests of package
// installation do this for all operations of a hostfs.Disk.
package hostfstest

import (
	"errors"
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
	at   int   // number of operations before the fault
	err  error // error of the next operation
	dead bool  // whether all later operations fail too

	mu       sync.Mutex
	log      []string
	unsynced map[string]bool // written files that are not synced, by path; nil without a power cut
}

// KillAt lets n operations through and fails all later ones with ErrKilled, like a killed process that cleans up nothing.
// If the first failing operation is a write, half of it is done.
func KillAt(n int) *Faults { return &Faults{at: n, err: ErrKilled, dead: true} }

// PowerCutAt is KillAt for the node: unsynced content is lost, so that the file is empty. Renames and other changes of
// directories are kept, which is the worse case.
func PowerCutAt(n int) *Faults {
	return &Faults{at: n, err: ErrKilled, dead: true, unsynced: map[string]bool{}}
}

// FailAt fails operation n with err and lets all others through. A failing write is half done.
func FailAt(n int, err error) *Faults { return &Faults{at: n, err: err} }

// Record returns the operations of work, such as "rename /a/b.tmp.7 /a/b".
func Record(work func(disk hostfs.Disk)) []string {
	f := &Faults{at: -1}
	work(hostfs.Disk{Before: f.Before})
	return f.Log()
}

// Memory returns an empty directory on a tmpfs, which never waits for a disk.
func Memory(tb testing.TB) string {
	tb.Helper()
	var stat syscall.Statfs_t
	const tmpfsMagic = 0x01021994
	if err := syscall.Statfs("/dev/shm", &stat); err != nil || stat.Type != tmpfsMagic {
		tb.Fatal("/dev/shm is not a tmpfs, which this test needs")
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

// Before records an operation and returns its error, nil to let it through.
func (f *Faults) Before(c hostfs.Call) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.log)
	f.log = append(f.log, c.String())
	fails := f.err != nil && (n == f.at || n > f.at && f.dead)
	switch cut := f.unsynced != nil; {
	case !fails && cut:
		f.follow(c)
	case fails && cut:
		f.cutPower()
	case fails && c.Name == "write":
		_ = (hostfs.Disk{}).Append(c.Path, c.Data[:len(c.Data)/2])
	}
	if fails {
		return f.err
	}
	return nil
}

// follow tracks the files that are not synced.
func (f *Faults) follow(c hostfs.Call) {
	switch c.Name {
	case "create":
		f.unsynced[c.Path] = true
	case "sync", "remove":
		delete(f.unsynced, c.Path)
	case "rename":
		f.unsynced[c.Path], f.unsynced[c.To] = f.unsynced[c.To], f.unsynced[c.Path]
	}
}

func (f *Faults) cutPower() {
	for path, lost := range f.unsynced {
		if lost {
			_ = os.Truncate(path, 0) // a test would see content where it expects none
		}
	}
	clear(f.unsynced)
}
