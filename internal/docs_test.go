package internal

import (
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// errorsPage has one table for each kind of code. hack/settings writes them.
const errorsPage = "../docs/errors.md"

// metricsPage has the tables of metrics and alerts.
const metricsPage = "../docs/reference.md"

var (
	typedCode = regexp.MustCompile(`\w+\s+(?:\w+\.)?(EventReason|PartName|State|Reason)\s*=\s*"([\w-]+)"`)
	// untypedCode matches an event's reason or a part of readiness that is a literal, and so is missing from the page.
	untypedCode = regexp.MustCompile(`(?:\w\(|ctx, |kube\.Event\w+, )"[A-Z]+[a-z]+[A-Z]\w+"|\b(?:Ready|NotReady|Expect|Beat)\("`)

	commandName = regexp.MustCompile("NAME:\n   (?:istio-cni )?([a-z -]+?) - ")
	exitCode    = regexp.MustCompile(`\bexit[A-Z]\w*\s*=\s*(\d+)`)
	cniCode     = regexp.MustCompile(`(\{?)\b(types\.Err[A-Z]\w+|code[A-Z]\w+)\b`)
)

// TestErrorsPage_EveryCode: the page has each code of the source. The test finds the codes independently of hack/settings.
func TestErrorsPage_EveryCode(t *testing.T) {
	page := read(t, errorsPage)
	found := 0
	want := func(row string) {
		t.Helper()
		if found++; !strings.Contains(page, "\n| "+row+" | ") {
			t.Errorf("%s has no row %q", errorsPage, row)
		}
	}
	tables := []string{"internal/core/audit", "internal/core/sidecar", "internal/core/readiness"}
	roles, commands, cni := map[string]string{}, map[string]string{}, map[string]bool{}
	for name, text := range readTree(t, os.DirFS("..")) {
		if strings.HasSuffix(name, "_test.go") || ringOf(path.Dir(name)) == ringSupport {
			continue
		}
		for _, m := range typedCode.FindAllStringSubmatch(text, -1) {
			if slices.Contains([]string{"EventReason", "PartName"}, m[1]) || slices.Contains(tables, path.Dir(name)) {
				want("`" + m[2] + "`")
			}
		}
		for _, literal := range untypedCode.FindAllString(text, -1) {
			t.Errorf("%s: %s: make it a constant of type kube.EventReason or health.PartName", name, literal)
		}
		roles[path.Dir(name)] += text
		if m := commandName.FindStringSubmatch(text); m != nil {
			commands[path.Dir(name)] = m[1]
		}
	}
	for dir, command := range commands {
		for _, m := range append(exitCode.FindAllStringSubmatch(roles[dir], -1), []string{"", "0"}, []string{"", "1"}) {
			want("`" + command + "` | " + m[1])
		}
	}
	for _, m := range cniCode.FindAllStringSubmatch(roles["internal/role/plugin"], -1) {
		cni[m[2]] = cni[m[2]] || m[1] != ""
	}
	for name, listed := range cni {
		if !listed {
			t.Errorf("%s is not in the table of the plugin's codes", name)
		}
	}
	if found < 90 || len(commands) < 12 || len(cni) < 10 {
		t.Errorf("%d codes, %d commands, %d CNI codes: the search misses some", found, len(commands), len(cni))
	}
}

var (
	quotedRow = regexp.MustCompile("(?m)^\\| (`[^|]+`) \\| [^|]+ \\|$")
	quoted    = regexp.MustCompile("`([^`]+)`")
	concat    = regexp.MustCompile(`"\s*\+\s*"`)
)

// othersTexts are texts of errorsPage that container runtimes, the kernel or libraries write.
var othersTexts = []string{"failed to find plugin", "RULE_APPEND failed (Invalid argument)", "address already in use", "http: Accept error"}

// TestErrorsPage_Texts: the source has each text that the tables "text | what to do" quote.
func TestErrorsPage_Texts(t *testing.T) {
	var source strings.Builder
	for name, text := range readTree(t, os.DirFS("..")) {
		if !strings.HasSuffix(name, "_test.go") && ringOf(path.Dir(name)) != ringSupport {
			source.WriteString(concat.ReplaceAllString(text, ""))
		}
	}
	found := 0
	for _, table := range strings.Split(read(t, errorsPage), "| text | what to do |\n|---|---|\n")[1:] {
		table, _, _ = strings.Cut(table, "\n\n")
		for _, row := range quotedRow.FindAllStringSubmatch(table, -1) {
			for _, text := range quoted.FindAllStringSubmatch(row[1], -1) {
				for part := range strings.FieldsFuncSeq(text[1], func(r rune) bool { return strings.ContainsRune(`…"0123456789`, r) }) {
					if part = strings.Trim(part, " :,"); len(part) < 10 || slices.Contains(othersTexts, part) {
						continue
					}
					if found++; !strings.Contains(source.String(), part) {
						t.Errorf("%s quotes %q, which no source file has", errorsPage, part)
					}
				}
			}
		}
	}
	if found < 30 {
		t.Errorf("%d texts: the search misses some", found)
	}
}

func read(t *testing.T, names ...string) string {
	t.Helper()
	var pages []string
	for _, name := range names {
		text, err := os.ReadFile(name)
		check.OK(t, err)
		pages = append(pages, string(text))
	}
	return strings.Join(pages, "\n")
}

var (
	ownMetric = regexp.MustCompile(`\bistio_cni_[a-z_]+`)
	declared  = regexp.MustCompile(`"(istio_cni_[a-z_]+)"`)
)

// TestManual_Metrics compares the metrics of the program with the metrics in
// the tables and the alerts.
func TestManual_Metrics(t *testing.T) {
	files, err := filepath.Glob("agent/metrics/*.go")
	check.OK(t, err)
	files = slices.DeleteFunc(files, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
	made := map[string]bool{}
	for _, found := range declared.FindAllStringSubmatch(read(t, files...), -1) {
		made[found[1]] = true
	}
	if len(made) < 20 {
		t.Fatalf("%d metrics in %v: the search misses them", len(made), files)
	}
	page := read(t, metricsPage)
	for _, name := range slices.Sorted(maps.Keys(made)) {
		if !regexp.MustCompile(`\| .` + name + `[{` + "`" + `]`).MatchString(page) {
			t.Errorf("%s is in no table of %s", name, metricsPage)
		}
	}
	for _, name := range ownMetric.FindAllString(page, -1) {
		if !made[name] && !made[strings.TrimSuffix(name, "_bucket")] {
			t.Errorf("%s names the metric %s, which does not exist", metricsPage, name)
		}
	}
}

// TestRunbook_Short: the person on call reads the runbook under pressure.
func TestRunbook_Short(t *testing.T) {
	const most = 200
	if n := strings.Count(read(t, "../docs/runbook.md"), "\n"); n > most {
		t.Errorf("docs/runbook.md has %d lines, %d at most", n, most)
	}
}

// generated is what hack/settings writes on a page.
var generated = regexp.MustCompile(`(?s)<!-- written by .*?<!-- end -->`)

// TestManual_Short: people read what is short. Generated tables do not count, and pages that are mostly generated are no pages.
func TestManual_Short(t *testing.T) {
	const mostPages, mostWords, mostOfReadme = 12, 20_000, 450
	names, err := filepath.Glob("../docs/*.md")
	check.OK(t, err)
	pages, words := 0, 0
	for _, name := range names {
		text := read(t, name)
		own := generated.ReplaceAllString(text, "")
		words += len(strings.Fields(own))
		if own == text {
			pages++
		}
	}
	readme := len(strings.Fields(read(t, "../README.md")))
	if pages > mostPages || words+readme > mostWords || readme > mostOfReadme {
		t.Errorf("README.md has %d words, at most %d; docs has %d pages, at most %d; both have %d words, at most %d",
			readme, mostOfReadme, pages, mostPages, words+readme, mostWords)
	}
}

// TestManual_Rows: a row of a table is one line, otherwise its rest is shown as another row.
func TestManual_Rows(t *testing.T) {
	names, err := filepath.Glob("../docs/*.md")
	check.OK(t, err)
	for _, name := range names {
		for line := range strings.Lines(read(t, name)) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "| ") && !strings.HasSuffix(line, " |") {
				t.Errorf("%s: the row does not end: %s", name, line)
			}
		}
	}
}

// TestIndex_EveryPage: docs/index.md leads to each page.
func TestIndex_EveryPage(t *testing.T) {
	pages, err := filepath.Glob("../docs/*.md")
	check.OK(t, err)
	index := read(t, "../docs/index.md")
	for _, page := range pages {
		if name := filepath.Base(page); name != "index.md" && !regexp.MustCompile(`\]\(`+regexp.QuoteMeta(name)+`[)#]`).MatchString(index) {
			t.Errorf("docs/index.md has no link to %s", name)
		}
	}
}
