package hack

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestChangelog holds docs/changelog.md to the form that hack/release.sh reads: Unreleased first, then the versions from the
// newest on, with their days, and in each the sections of Keep a Changelog, in their order and not empty.
func TestChangelog(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/changelog.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range changelogProblems(string(text)) {
		t.Error(problem)
	}
}

var (
	release  = regexp.MustCompile(`^\[(?:Unreleased|\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?)\](?: - (\d{4}-\d\d-\d\d))?$`)
	sections = []string{"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
)

func changelogProblems(text string) (problems []string) {
	last := "9999-99-99"
	for i, version := range strings.Split(text, "\n## ")[1:] {
		heading, body, _ := strings.Cut(version, "\n")
		match := release.FindStringSubmatch(heading)
		switch unreleased := heading == "[Unreleased]"; {
		case match == nil || unreleased != (i == 0):
			problems = append(problems, "## "+heading+`: want "[Unreleased]" first, then "[X.Y.Z] - YYYY-MM-DD"`)
		case !unreleased:
			if _, err := time.Parse(time.DateOnly, match[1]); err != nil || match[1] > last {
				problems = append(problems, "## "+heading+": want a day, none later than that of the version above")
			} else {
				last = match[1]
			}
		}
		at := -1
		for _, section := range strings.Split(body, "\n### ")[1:] {
			name, lines, _ := strings.Cut(section, "\n")
			n := slices.Index(sections, name)
			if n <= at || strings.TrimSpace(lines) == "" {
				problems = append(problems, "## "+heading+": ### "+name+" is empty, unknown or out of order: "+strings.Join(sections, ", "))
			}
			at = n
		}
	}
	return problems
}

func TestChangelogProblems(t *testing.T) {
	t.Parallel()
	const good = "\n## [Unreleased]\n\n### Added\n\n- a\n\n### Fixed\n\n- b\n\n## [0.2.0] - 2026-11-24\n\n### Security\n\n- c\n\n## [0.1.0] - 2026-11-22\n"
	if problems := changelogProblems(good); len(problems) != 0 {
		t.Errorf("%q", problems)
	}
	for _, c := range [][2]string{
		{"[Unreleased]", "Unreleased"},
		{"[0.2.0] - 2026-11-24", "[0.2.0]"},
		{"[0.2.0] - 2026-11-24", "v0.2.0 - 2026-11-24"},
		{"2026-11-24", "2026-11-31"},
		{"2026-11-24", "2026-11-21"},
		{"### Security", "### Misc"},
		{"### Fixed", "### Added"},
		{"- c", ""},
	} {
		if problems := changelogProblems(strings.Replace(good, c[0], c[1], 1)); len(problems) != 1 {
			t.Errorf("%q instead of %q: %q", c[1], c[0], problems)
		}
	}
}
