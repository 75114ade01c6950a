package hack

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestChangelog_Form holds docs/changelog.md to the form that hack/release.sh reads: Unreleased first, then versions with their days, and
// in each the sections of Keep a Changelog, in their order.
func TestChangelog_Form(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/changelog.md")
	if err != nil {
		t.Fatal(err)
	}
	headings := strings.Join(regexp.MustCompile(`(?m)^##+ .*\n`).FindAllString(string(text), -1), "")
	const sections = `(### Added\n)?(### Changed\n)?(### Deprecated\n)?(### Removed\n)?(### Fixed\n)?(### Security\n)?`
	const version = `## \[\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?\] - \d{4}-\d\d-\d\d\n`
	if !regexp.MustCompile(`^## \[Unreleased\]\n` + sections + `(` + version + sections + `)*$`).MatchString(headings) {
		t.Errorf("headings:\n%s", headings)
	}
}
