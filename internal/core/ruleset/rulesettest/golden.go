package rulesettest

import (
	"flag"
	"os" //nolint:depguard // test support: golden files
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
)

var update = flag.Bool("update", false, "rewrite the files in testdata") //nolint:gochecknoglobals // a flag of the test program

// Golden compares a text with a file in the calling package's testdata, or rewrites the file.
func Golden(tb testing.TB, name, got string) {
	tb.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		check.OK(tb, os.MkdirAll(filepath.Dir(path), 0o750))
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil { //nolint:forbidigo // a file of the source tree
			tb.Fatal(err)
		}
	}
	want, err := os.ReadFile(path) //nolint:gosec // the test chooses the name
	check.OK(tb, err)
	check.Diff(tb, path+" (-update rewrites it)", string(want), got)
}
