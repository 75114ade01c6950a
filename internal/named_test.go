package internal

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestNamedTestsExist: a page that names a test as its evidence names one that there is.
func TestNamedTestsExist(t *testing.T) {
	declared, named := regexp.MustCompile(`(?m)^func (Test\w+)\(`), regexp.MustCompile("`(Test[A-Z]\\w*)")
	tests, pages := map[string]bool{}, map[string]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "bin" || d.Name() == ".git"):
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, ".md"):
			return nil
		}
		text, err := os.ReadFile(path)
		if strings.HasSuffix(path, ".md") {
			pages[path] = string(text)
		}
		for _, name := range declared.FindAllStringSubmatch(string(text), -1) {
			tests[name[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for path, text := range pages {
		for _, name := range named.FindAllStringSubmatch(text, -1) {
			count++
			if !tests[name[1]] {
				t.Errorf("%s names %s, which is no test of this repository", path, name[1])
			}
		}
	}
	if count < 200 {
		t.Errorf("only %d names of tests in the pages: the search does not find them", count)
	}
}
