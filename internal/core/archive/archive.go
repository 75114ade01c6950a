// Package archive writes the tar.gz file of a bug report.
//
// It promises that a file of another program or of Kubernetes is in it only as package redact permits, that each name is a plain path
// below one directory, that texts have no control characters, and that missing.txt lists what is missing, with the reason. The files of
// [Archive.Add] together are bounded. An Archive is safe for concurrent use, and holds no file after its method has returned.
//
// Start at New.
package archive

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redact"
)

const (
	// MaxAll bounds the files of one node in bytes before compression, of which reserve is for missing.txt.
	MaxAll  = 32 << 20
	reserve = 1 << 20

	// Confs is the directory of other programs' CNI configurations.
	Confs = "cni/"
	// Cluster is the directory of Kubernetes objects.
	Cluster = "cluster/"
)

// Archive is a file that is being written.
type Archive struct {
	*redact.Redactor

	mu         sync.Mutex
	compressed *gzip.Writer
	out        *tar.Writer
	// dir is the directory of all files.
	dir   string
	began time.Time
	// left is the remaining space for files, in bytes.
	left    int
	names   map[string]bool
	missing []string
	// err is the first error of the output.
	err error
}

// New begins an archive, whose directory has the time and the parts of the name. It replaces the secrets wherever they are.
func New(w io.Writer, began time.Time, secrets []string, name ...string) *Archive {
	compressed := gzip.NewWriter(w)
	dir := []string{"istio-cni-bundle"}
	for _, part := range append(name, began.UTC().Format("20060102T150405Z")) {
		dir = append(dir, FileName(part))
	}
	return &Archive{
		Redactor: redact.New(secrets...), compressed: compressed, out: tar.NewWriter(compressed), dir: strings.Join(dir, "-"), began: began,
		left: MaxAll - reserve, names: map[string]bool{},
	}
}

// FileName returns a single file's name, whatever characters and length the text has.
func FileName(text string) string {
	const most = 100
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' || r == '_' {
			return r
		}
		return '_'
	}, text)
	name = strings.TrimLeft(name[:min(len(name), most)], ".-")
	if name == "" {
		return "_"
	}
	return name
}

// Miss notes what is not in the archive, and why.
func (a *Archive) Miss(name string, why error) {
	const most = 500
	line := printable.Text(name, most) + ": " + string(a.Text([]byte(printable.Text(why.Error(), most))))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.missing = append(a.missing, line)
}

// Missing returns the number of missing parts.
func (a *Archive) Missing() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.missing)
}

var errRoom = errors.New("no room is left: a bundle has 32 MiB at most")

// Collect adds a file that get returns. Otherwise it notes get's error, or that get did not return until ctx ended.
func (a *Archive) Collect(ctx context.Context, name string, get func(context.Context) ([]byte, error)) {
	text, err := Within(ctx, get)
	a.Add(name, text, err)
}

// Add adds the permitted parts of a file, or the reason why it has none.
func (a *Archive) Add(name string, text []byte, err error) {
	if err != nil {
		a.Miss(name, err)
		return
	}
	clean, err := a.shown(name, text)
	if err != nil {
		a.Miss(name, fmt.Errorf("left out, %d bytes: %w", len(text), err))
		return
	}
	clean = printable.Lines(clean)
	a.mu.Lock()
	room := len(clean) <= a.left
	if room {
		a.left -= len(clean)
	}
	a.mu.Unlock()
	if !room {
		a.Miss(name, errRoom)
		return
	}
	_ = a.Write(name, clean) // Close reports the error
}

// shown returns the permitted parts of a file: other programs write the configurations and objects, this program the rest.
func (a *Archive) shown(name string, text []byte) ([]byte, error) {
	isJSON := path.Ext(name) == ".json"
	switch {
	case strings.HasPrefix(name, Confs):
		return a.Foreign(text)
	case isJSON && strings.HasPrefix(name, Cluster):
		return a.Object(text)
	case isJSON:
		return a.JSON(text)
	}
	return a.Text(text), nil
}

// Within returns the result of get, or the context's error if get does not return before ctx ends: a file's disk can
// hang.
func Within[T any](ctx context.Context, get func(context.Context) (T, error)) (value T, err error) {
	if err := ctx.Err(); err != nil {
		return value, err
	}
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		got, err := get(ctx)
		done <- result{got, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return value, ctx.Err()
	}
}

// Write adds a file unchanged, beyond the bound of [Archive.Add]. It returns the first error of the output.
func (a *Archive) Write(name string, text []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	free := name
	for n := 2; a.names[free]; n++ {
		free = strings.TrimSuffix(name, path.Ext(name)) + "-" + strconv.Itoa(n) + path.Ext(name)
	}
	a.names[free] = true
	if a.err == nil {
		a.err = a.out.WriteHeader(&tar.Header{
			Name: a.dir + "/" + free, Mode: 0o600, Size: int64(len(text)), ModTime: a.began.UTC().Truncate(time.Second),
		})
	}
	if a.err == nil {
		_, a.err = a.out.Write(text)
	}
	return a.err
}

// Close adds missing.txt and ends the file.
func (a *Archive) Close() error {
	if text := strings.Join(a.missing, "\n"); text != "" {
		_ = a.Write("missing.txt", []byte(text[:min(len(text), reserve-1)]+"\n"))
	}
	return cmp.Or(a.err, a.out.Close(), a.compressed.Close()) // a later error repeats the first
}
