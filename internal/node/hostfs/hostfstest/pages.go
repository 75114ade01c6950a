package hostfstest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// PageFaults reads a byte of each page of a file through a mapping with the advice of madvise(2), and returns the number of page
// faults. Large blocks in the page cache, if the kernel and its file system have them, reduce the number.
func PageFaults(tb testing.TB, path string, advice int) (faults int64) {
	tb.Helper()
	file, err := os.Open(path) //nolint:gosec // the path is the test's
	check.OK(tb, err)
	defer func() { _ = file.Close() }() // only read
	info, err := file.Stat()
	check.OK(tb, err)
	pages, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	check.OK(tb, err)
	runtime.LockOSThread()         //nolint:forbidigo // the kernel counts the faults of a thread
	defer runtime.UnlockOSThread() //nolint:forbidigo // as above
	var before, after unix.Rusage
	var sum byte
	err = errors.Join(unix.Madvise(pages, advice), unix.Getrusage(unix.RUSAGE_THREAD, &before))
	for i := 0; i < len(pages); i += os.Getpagesize() {
		sum += pages[i]
	}
	runtime.KeepAlive(&sum)
	if err = errors.Join(err, unix.Getrusage(unix.RUSAGE_THREAD, &after), unix.Munmap(pages)); err != nil {
		tb.Fatal(err)
	}
	return after.Minflt - before.Minflt + after.Majflt - before.Majflt
}

// BytesRead returns the number of bytes that this process has read, proc_pid_io(5).
func BytesRead(tb testing.TB) (n int) {
	tb.Helper()
	text, err := os.ReadFile("/proc/self/io")
	check.OK(tb, err)
	_, err = fmt.Sscanf(string(text), "rchar: %d", &n)
	check.OK(tb, err)
	return n
}
