package archive_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/archive"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// unpack returns the files by their names.
func unpack(t *testing.T, from io.Reader) map[string]string {
	t.Helper()
	plain, err := gzip.NewReader(from)
	check.OK(t, err)
	files := map[string]string{}
	for in := tar.NewReader(plain); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		check.OK(t, err)
		text, err := io.ReadAll(in)
		check.OK(t, err)
		if _, twice := files[header.Name]; twice {
			t.Errorf("%s is there twice", header.Name)
		}
		files[header.Name] = string(text)
	}
}

const dir = "istio-cni-bundle-n_-19700101T000000Z/"

// TestAdd_Bounds: all added files together have at most 32 MiB.
func TestAdd_Bounds(t *testing.T) {
	var out bytes.Buffer
	a := archive.New(&out, time.Unix(0, 0), nil, "n/")
	for i := range 6 {
		a.Add(fmt.Sprint(i), bytes.Repeat([]byte("a line "), 10<<20/7), nil)
	}
	a.Add("small", []byte("x"), nil)
	check.OK(t, a.Close())
	files := unpack(t, &out)
	sum := 0
	for _, text := range files {
		sum += len(text)
	}
	if sum > archive.MaxAll || files[dir+"2"] == "" || files[dir+"small"] == "" || files[dir+"3"] != "" ||
		!strings.Contains(files[dir+"missing.txt"], "3: no room is left") {
		t.Errorf("%d bytes of %d files: %s", sum, len(files), files[dir+"missing.txt"])
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
	files := unpack(t, &out)
	if _, last := files[dir+"same-20.txt"]; len(files) != 41 || !last {
		t.Errorf("%d files", len(files))
	}
	for i := range 20 {
		check.Equal(t, files[dir+fmt.Sprintf("%d.txt", i)], strings.Repeat(string(rune('a'+i)), 10_000))
	}
}

type failing struct{}

var errFull = errors.New("full")

func (failing) Write([]byte) (int, error) { return 0, errFull }

// TestWrite_FullDisk: a writer of many files learns that the output cannot be written.
func TestWrite_FullDisk(t *testing.T) {
	a := archive.New(failing{}, time.Unix(0, 0), nil)
	var err error
	for i := 0; err == nil && i < 1000; i++ {
		random := make([]byte, 100_000)
		for at := range random {
			random[at] = byte((at*at + i) * 7919 >> 3)
		}
		err = a.Write("x", random)
	}
	if !errors.Is(err, errFull) || !errors.Is(a.Close(), errFull) {
		t.Error(err)
	}
}
