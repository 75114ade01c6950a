package archive_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/archive"
	"github.com/meshcni/istio-cni/internal/core/archive/archivetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAdd_Bounds: all added files together have at most 32 MiB.
func TestAdd_Bounds(t *testing.T) {
	var out bytes.Buffer
	a := archive.New(&out, time.Unix(0, 0), nil, "n/")
	for i := range 6 {
		a.Add(fmt.Sprint(i), bytes.Repeat([]byte("a line "), 10<<20/7), nil)
	}
	a.Add("small", []byte("x"), nil)
	check.OK(t, a.Close())
	files, _ := archivetest.Unpack(t, &out)
	sum := 0
	for _, text := range files {
		sum += len(text)
	}
	if sum > archive.MaxAll || files["2"] == "" || files["small"] == "" || files["3"] != "" ||
		!strings.Contains(files["missing.txt"], "3: no room is left") {
		t.Errorf("%d bytes of %d files: %s", sum, len(files), files["missing.txt"])
	}
}

// TestWrite_AtOnce: files of several writers keep their content, and one name several files.
func TestWrite_AtOnce(t *testing.T) {
	var out bytes.Buffer
	a := archive.New(&out, time.Unix(0, 0), nil, "n/")
	var work sync.WaitGroup
	for i := range 20 {
		work.Go(func() {
			check.OK(t, a.Write(fmt.Sprintf("%d.txt", i), bytes.Repeat([]byte{'a' + byte(i)}, 10_000)))
			check.OK(t, a.Write("same.txt", nil))
			a.Miss(fmt.Sprint("of ", i), errors.New("it is not there")) //nolint:err113 // for the test
		})
	}
	work.Wait()
	check.Equal(t, a.Missing(), 20)
	check.OK(t, a.Close())
	files, _ := archivetest.Unpack(t, &out)
	if _, last := files["same-20.txt"]; len(files) != 41 || !last {
		t.Errorf("%d files", len(files))
	}
	for i := range 20 {
		check.Equal(t, files[fmt.Sprintf("%d.txt", i)], strings.Repeat(string(rune('a'+i)), 10_000))
	}
}

// TestWrite_FullDisk: a writer of many files learns that the output cannot be written.
func TestWrite_FullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	check.OK(t, err)
	a := archive.New(full, time.Unix(0, 0), nil)
	random := make([]byte, 1<<20)
	_, _ = rand.Read(random)
	check.Is(t, a.Write("x", random), syscall.ENOSPC)
	check.Is(t, a.Close(), syscall.ENOSPC)
}
