package hack

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestChangelog_Form holds docs/changelog.md to the form that hack/release.sh reads: Unreleased first, then versions with their days, and
// in each the sections of Keep a Changelog, in their order.
func TestChangelog_Form(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/changelog.md")
	check.OK(t, err)
	headings := strings.Join(regexp.MustCompile(`(?m)^##+ .*\n`).FindAllString(string(text), -1), "")
	const sections = `(### Added\n)?(### Changed\n)?(### Deprecated\n)?(### Removed\n)?(### Fixed\n)?(### Security\n)?`
	const version = `## \[\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?\] - \d{4}-\d\d-\d\d\n`
	if !regexp.MustCompile(`^## \[Unreleased\]\n` + sections + `(` + version + sections + `)*$`).MatchString(headings) {
		t.Errorf("headings:\n%s", headings)
	}
}

// TestVersion_OneNumber: README, chart, changelog, the quickstart's image and its page name the same version. hack/lib.sh builds programs
// and hack/image.sh images of the chart's.
func TestVersion_OneNumber(t *testing.T) {
	t.Parallel()
	const number = `(\d+\.\d+\.\d+[\w.-]*)`
	found := map[string][]string{}
	for _, place := range []struct{ name, pattern string }{
		{"manifests/istio-cni/Chart.yaml", `(?m)^version: ` + number + `$`},
		{"manifests/istio-cni/Chart.yaml", `(?m)^appVersion: ` + number + `$`},
		{"docs/changelog.md", `(?m)^## \[` + number + `\] - `},
		{"README.md", `(?m)^Version ` + number + `,`},
		{"manifests/examples/quickstart.yaml", `/install-cni:` + number},
		{"docs/quickstart.md", `/install-cni:` + number},
		{"docs/quickstart.md", `version v` + number},
	} {
		text, err := os.ReadFile("../" + place.name)
		check.OK(t, err)
		m := regexp.MustCompile(place.pattern).FindStringSubmatch(string(text))
		if m == nil {
			t.Errorf("%s has no %s", place.name, place.pattern)
			continue
		}
		found[m[1]] = append(found[m[1]], place.name)
	}
	check.Equal(t, len(found), 1, "versions by file", found)
}
