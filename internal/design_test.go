package internal

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// TestDesignNamesThePackages: the picture of the rings has each package.
func TestDesignNamesThePackages(t *testing.T) {
	_, rings, _ := strings.Cut(read(t, "../docs/design.md"), "\n## Rings\n")
	rings, _, _ = strings.Cut(rings, "\n## ")
	count := 0
	err := filepath.WalkDir(".", func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if d.Name() == "testdata" {
			return fs.SkipDir
		}
		found, err := fs.Glob(os.DirFS(dir), "*.go")
		if err != nil || len(found) == 0 || dir == "." || ringOf(path.Join("internal", filepath.ToSlash(dir))) == ringSupport {
			return err
		}
		count++
		if !strings.Contains(rings, " "+d.Name()+"/") && !strings.Contains(rings, "/"+d.Name()+"/") && !strings.Contains(rings, "/"+d.Name()+" ") {
			t.Errorf("the rings in docs/design.md do not have %s", dir)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if count < 50 {
		t.Errorf("%d packages: the search does not find them", count)
	}
}
