// Package archivetest reads bundles in tests.
package archivetest

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
)

var directory = regexp.MustCompile(`^istio-cni-bundle(-[\w.-]+)?-\d{8}T\d{6}Z$`)

// Unpack returns the files of a bundle by their names without the bundle's directory, and the names in order. It fails the test unless
// each is a plain file with a name of its own, and text that a terminal can show.
func Unpack(t *testing.T, from io.Reader) (files map[string]string, names []string) {
	t.Helper()
	plain, err := gzip.NewReader(from)
	check.OK(t, err)
	files = map[string]string{}
	for in := tar.NewReader(plain); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files, names
		}
		check.OK(t, err)
		text, err := io.ReadAll(in)
		dir, name, _ := strings.Cut(header.Name, "/")
		if _, twice := files[name]; err != nil || twice || !directory.MatchString(dir) || header.Typeflag != tar.TypeReg || header.Mode != 0o600 ||
			!filepath.IsLocal(header.Name) || path.Clean(header.Name) != header.Name || strings.ContainsAny(name, "\x1b\\ \n") {
			t.Errorf("entry %+v: %v", header, err)
		}
		if strings.ContainsFunc(string(text), func(r rune) bool { return !printable.Is(r) && r != '\n' && r != '\t' }) {
			t.Errorf("%s is not printable", name)
		}
		files[name], names = string(text), append(names, name)
	}
}
