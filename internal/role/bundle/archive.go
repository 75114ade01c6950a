package bundle

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
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redact"
)

// maxAll bounds the bundle in bytes before compression, of which reserve is for missing.txt.
const (
	maxAll  = 32 << 20
	reserve = 1 << 20
)

// archive is a bundle that is being written.
type archive struct {
	compressed *gzip.Writer
	out        *tar.Writer
	// dir is the directory of all files in the bundle.
	dir   string
	began time.Time
	clean *redact.Redactor
	// left is the remaining space for files, in bytes.
	left    int
	names   map[string]bool
	missing []string
}

func newArchive(w io.Writer, node string, began time.Time, secrets []string) *archive {
	compressed := gzip.NewWriter(w)
	return &archive{
		compressed: compressed, out: tar.NewWriter(compressed), began: began, clean: redact.New(secrets...), left: maxAll - reserve,
		dir: "istio-cni-bundle-" + fileName(node) + "-" + began.UTC().Format("20060102T150405Z"), names: map[string]bool{},
	}
}

// fileName returns a single file's name, whatever characters and length the text has.
func fileName(text string) string {
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

// miss notes what is not in the bundle, and why.
func (a *archive) miss(name string, why error) {
	const most = 500
	a.missing = append(a.missing, printable.Text(name, most)+": "+string(a.clean.Text([]byte(printable.Text(why.Error(), most)))))
}

var errRoom = errors.New("no room is left: a bundle has 32 MiB at most")

// collect adds a file that get returns. Otherwise it notes get's error, or that get did not return until ctx ended.
func (a *archive) collect(ctx context.Context, name string, get func(context.Context) ([]byte, error)) {
	text, err := within(ctx, get)
	a.add(name, text, err)
}

// add adds the permitted parts of a file, or the reason why it has none.
func (a *archive) add(name string, text []byte, err error) {
	if err != nil {
		a.miss(name, err)
		return
	}
	clean, err := a.shown(name, text)
	if err != nil {
		a.miss(name, fmt.Errorf("left out, %d bytes: %w", len(text), err))
		return
	}
	a.write(name, printable.Lines(clean))
}

// shown returns the permitted parts of a file: other programs write the configurations, this program the rest.
func (a *archive) shown(name string, text []byte) ([]byte, error) {
	switch {
	case strings.HasPrefix(name, confs):
		return a.clean.Foreign(text)
	case path.Ext(name) == ".json":
		return a.clean.JSON(text)
	}
	return a.clean.Text(text), nil
}

// within returns the result of get, or the context's error if get does not return before ctx ends: a file's disk can
// hang.
func within[T any](ctx context.Context, get func(context.Context) (T, error)) (value T, err error) {
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

// write adds a file unchanged.
func (a *archive) write(name string, text []byte) {
	if len(text) > a.left {
		a.miss(name, errRoom)
		return
	}
	a.left -= len(text)
	free := name
	for n := 2; a.names[free]; n++ {
		free = strings.TrimSuffix(name, path.Ext(name)) + "-" + strconv.Itoa(n) + path.Ext(name)
	}
	a.names[free] = true
	a.put(free, text)
}

func (a *archive) put(name string, text []byte) {
	header := &tar.Header{Name: a.dir + "/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: a.began.UTC().Truncate(time.Second)}
	if a.out.WriteHeader(header) == nil { // close reports the error
		_, _ = a.out.Write(text)
	}
}

// close adds missing.txt and ends the file.
func (a *archive) close() error {
	if text := strings.Join(a.missing, "\n"); text != "" {
		a.put("missing.txt", []byte(text[:min(len(text), reserve-1)]+"\n"))
	}
	return cmp.Or(a.out.Close(), a.compressed.Close()) // the second error repeats the first
}
