package hostfs_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// evict drops the pages of a file from the page cache.
func evict(t *testing.T, path string) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	check.OK(t, err)
	defer file.Close() //nolint:errcheck // nothing is written
	check.OK(t, file.Sync())
	check.OK(t, unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// TestIdentical_PageFaults: after Identical, a program that was cached page by page has the page faults of a file that was
// read as a whole. Their number depends on the kernel and its file system.
func TestIdentical_PageFaults(t *testing.T) {
	dir := t.TempDir()
	source, program, whole := filepath.Join(dir, "source"), filepath.Join(dir, "program"), filepath.Join(dir, "whole")
	content := bytes.Repeat([]byte("istio-cni"), 1<<20)
	put(t, source, string(content))
	for _, path := range []string{program, whole} {
		check.OK(t, hostfs.Disk{}.Copy(source, path, 0o755))
		evict(t, path)
	}
	file, err := os.Open(whole)
	check.OK(t, err)
	_, err = io.Copy(sha256.New(), file) // in chunks: one read of the whole file makes no large blocks
	check.OK(t, errors.Join(err, file.Close()))
	single := hostfstest.PageFaults(t, program, unix.MADV_RANDOM)
	same, err := new(hostfs.Comparisons).Identical(source, program, 0o755)
	if !same || err != nil {
		t.Fatalf("the copy is the same: %t, %v", same, err)
	}
	got, want := hostfstest.PageFaults(t, program, unix.MADV_NORMAL), hostfstest.PageFaults(t, whole, unix.MADV_NORMAL)
	t.Logf("faults: %d one by one, %d after the comparison, %d of a file read as a whole", single, got, want)
	if got > want+want/2+8 {
		t.Errorf("%d page faults after the comparison, want about %d", got, want)
	}
}
