package internal

import (
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/hack/pages"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// runners has the names that a block of commands may have. The runner is a file, which reads its blocks by the text in reads.
var runners = map[string]struct{ file, reads string }{
	"host":          {"hack/pages/host_test.go", `pages.Of(all, "host")`},
	"cluster":       {"e2e/docs/docs_test.go", `pages.Of(all, "cluster")`},
	"e2e/imageonly": {"e2e/imageonly/main_test.go", `lab.Commands("e2e/imageonly")`},
	"e2e/istiod":    {"e2e/istiod/main_test.go", `lab.Commands("e2e/istiod")`},
	"e2e/upgrade":   {"e2e/upgrade/main_test.go", `lab.Commands("e2e/upgrade")`},
	"kind":          {"internal/pages_test.go", `pages.Of(all, "kind")`},
	"bare":          {"hack/bare.sh", "README.md"},
	"ci":            {"internal/pages_test.go", `pages.Of(all, "ci")`},
	"release":       {"internal/pages_test.go", `pages.Of(all, "release")`},
}

// TestPages_CommandsHaveARunner: a test runs each block of commands.
func TestPages_CommandsHaveARunner(t *testing.T) {
	all := readPages(t)
	used := map[string]bool{}
	for _, page := range all {
		for _, b := range page.Blocks {
			used[b.Runner] = true
			check.Equal(t, unrun(b), "", b.Page, b.Line)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(runners)) {
		if !used[name] {
			continue
		}
		text, err := os.ReadFile("../" + runners[name].file)
		if err != nil || !strings.Contains(string(text), runners[name].reads) {
			t.Errorf("%s does not have %q, which reads the blocks of %q: %v", runners[name].file, runners[name].reads, name, err)
		}
	}
}

func readPages(t *testing.T) []pages.Page {
	t.Helper()
	all, err := pages.Read("..")
	check.OK(t, err)
	if len(all) < 10 {
		t.Fatalf("%d pages: the search misses them", len(all))
	}
	return all
}

// unrun returns why no test runs a block of commands, or "".
func unrun(b pages.Block) string {
	names := strings.Join(slices.Sorted(maps.Keys(runners)), ", ")
	switch _, known := runners[b.Runner]; {
	case !b.HasCommands() && b.Runner != "":
		return "a block without commands needs no runner"
	case !b.HasCommands():
		return ""
	case b.Language != "sh" && b.Language != "console":
		return fmt.Sprintf("it looks like commands: its language must be sh or console, not %q", b.Language)
	case b.Runner == "":
		return "the line before a block of commands is <!-- test: NAME -->, with NAME one of " + names
	case b.Runner == "bare" && b.Page != "README.md":
		return "hack/bare.sh reads the README alone"
	case !known:
		return fmt.Sprintf("there is no runner %q, only %s", b.Runner, names)
	}
	if _, err := b.Commands(); err != nil {
		return err.Error()
	}
	return ""
}

// TestPages_UnrunIsFound covers each kind of block.
func TestPages_UnrunIsFound(t *testing.T) {
	for text, want := range map[string]string{
		"<!-- test: host -->\n```sh\nmake x\n```":           "",
		"<!-- test: host -->\n```console\n# istio-cni\n```": "",
		"```yaml\na: b\n```":                                "",
		"- one\n\n    make it so\n":                         "",
		"<!-- test: host -->\n```\n$ istio-cni\n```":        "it looks like commands",
		"```text\nFOO=1 make test\n```":                     "it looks like commands",
		"Text:\n\n    a diagram\n\n    helm install x\n":    "it looks like commands",
		"- one\n\n  ```sh\n  make it\n  ```":                "the line before a block",
		"<!-- test: host -->\n\n```sh\nanything\n```":       "the line before a block",
		"```sh\nanything":                                   "the line before a block",
		"<!-- test: nobody -->\n```sh\nanything\n```":       `there is no runner "nobody"`,
		"<!-- test: bare -->\n```sh\nmake demo\n```":        "reads the README alone",
		"<!-- test: host -->\n```yaml\na: b\n```":           "a block without commands",
		"<!-- test: host -->\n```console\nanything\n```":    "begins with a prompt",
	} {
		got := ""
		for _, b := range pages.Parse("x.md", text).Blocks {
			got += unrun(b)
		}
		if !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestPages_Links: each link leads to an existing file or an anchor of a page. External links are only parsed.
func TestPages_Links(t *testing.T) {
	all := readPages(t)
	checked := 0
	for _, page := range all {
		for _, link := range page.Links {
			checked++
			check.Equal(t, dangling(os.DirFS(".."), all, page.Name, link.Target), "", page.Name, link.Line, link.Target)
		}
	}
	if checked < 50 {
		t.Errorf("%d links: the search misses them", checked)
	}
}

// references are a published link to a page of this repository, a page with an anchor in the text of a program, a chart or an alert, which
// may follow a constant prefix, and the name of a page in prose. Each leads from a page to a file, or to an anchor of a page.
var references = []struct {
	from    string
	target  *regexp.Regexp
	in, not *regexp.Regexp // names of files
	least   int
}{
	{
		"README.md", regexp.MustCompile(`https://github\.com/meshcni/istio-cni/(?:blob|tree)/main/([\w./-]*\w(?:#[\w-]+)?)`),
		regexp.MustCompile(`\.(md|go|ya?ml|txt|tpl|html)$`), regexp.MustCompile(`^$`), 20,
	},
	{
		"docs/index.md", regexp.MustCompile(`\b([a-z]+\.md#[\w-]+)`),
		regexp.MustCompile(`^(internal|manifests)/.*\.(go|yaml|tpl|js|html|txt)$`), regexp.MustCompile(`_test\.go$`), 10,
	},
	{
		"README.md", regexp.MustCompile(`\b((?:docs|\.github|internal|e2e)/[\w-]+\.md)\b`),
		regexp.MustCompile(`(\.(md|go|sh|ya?ml|mod|txt|tpl)|(^|/)[^.]+)$`), regexp.MustCompile(`^docs/changelog\.md$|^internal/pages_test\.go$`), 20,
	},
}

// TestPages_References: what text, source and manifests say about a page is true.
func TestPages_References(t *testing.T) {
	all, tree := readPages(t), os.DirFS("..")
	found := make([]int, len(references))
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (name == ".git" || name == "bin" || name == "dist") {
			return fs.SkipDir
		}
		for i, r := range references {
			if err != nil || !d.Type().IsRegular() || !r.in.MatchString(name) || r.not.MatchString(name) {
				continue
			}
			for _, link := range r.target.FindAllStringSubmatch(read(t, "../"+name), -1) {
				found[i]++
				check.Equal(t, dangling(tree, all, r.from, link[1]), "", name, link[1])
			}
		}
		return err
	})
	check.OK(t, err)
	for i, r := range references {
		if found[i] < r.least {
			t.Errorf("%d matches of %s: the search misses them", found[i], r.target)
		}
	}
}

// dangling returns the fault of a link's target on a page, or "".
func dangling(tree fs.FS, all []pages.Page, from, target string) string {
	to, err := url.Parse(target)
	switch {
	case err != nil:
		return err.Error()
	case to.Scheme == "mailto" && to.Opaque != "":
		return ""
	case to.Scheme != "" && to.Scheme != "https" || to.Scheme == "" && to.Host != "":
		return "a link is a relative path, or https"
	case to.Scheme == "https":
		if !strings.Contains(to.Host, ".") {
			return "there is no such host"
		}
		return ""
	case path.IsAbs(to.Path):
		return "it is an absolute path"
	}
	name := from
	if to.Path != "" {
		name = path.Join(path.Dir(from), to.Path)
		if _, err := fs.Stat(tree, name); err != nil {
			return "there is no file " + name
		}
	}
	if to.Fragment == "" {
		return ""
	}
	i := slices.IndexFunc(all, func(p pages.Page) bool { return p.Name == name })
	if i < 0 {
		return "an anchor of a file that is no page"
	}
	if !slices.Contains(all[i].Anchors, to.Fragment) {
		return "there is no such heading on " + name
	}
	return ""
}

func TestPages_DanglingIsFound(t *testing.T) {
	all := []pages.Page{
		pages.Parse("README.md", "# The `one`: a (b), c_d -- é!\n\n## Two\n\n## Two\n\n```sh\n# no heading\n```\n\n<a id=\"three\"></a>\n"),
		pages.Parse("docs/x.md", "## A [link](y) & **bold**\n"),
	}
	check.Diff(t, "anchors", []string{"the-one-a-b-c_d----é", "two", "two-1", "three"}, all[0].Anchors)
	for target, want := range map[string]string{
		"../README.md": "", "../README.md#two-1": "", "#a-link--bold": "", "../internal": "", "https://kubernetes.io/docs#x": "", "mailto:a@b.c": "",
		"../README.md#two-2": "no such heading", "#no-heading": "no such heading", "README.md": "no file docs/README.md", "../../outside": "no file",
		"../LICENSE#top": "no page", "/docs": "absolute", "http://kubernetes.io": "relative path, or https", "https://kubernetes": "no such host", "https://%zz": "invalid",
	} {
		if got := dangling(os.DirFS(".."), all, "docs/x.md", target); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", target, got, want)
		}
	}
	page := pages.Parse("x.md", "A [b\nc](one.md), `[no](link)`, [d][e].\n\n[e]: two.md\n<img src=\"three.png\"> ![f](four.png \"g\") <https://five.io>\n\n```\n[no](link)\n```\n")
	links := map[string]int{}
	for _, l := range page.Links {
		links[l.Target] = l.Line
	}
	check.Diff(t, "links", map[string]int{"one.md": 2, "two.md": 4, "three.png": 5, "four.png": 5, "https://five.io": 5}, links)
}

// registry matches the host of an image registry, but no variable.
var registry = regexp.MustCompile(`\b(?:[\w-]+\.)*(?:docker\.io|gcr\.io|ghcr\.io|quay\.io|pkg\.dev|ecr\.aws|azurecr\.io|mcr\.microsoft\.com|registry(?:\.[\w-]+)+)\b`)

// TestPages_RegistriesAreVariables: pages, workflows and templates name no registry, so that a fork changes only a variable.
func TestPages_RegistriesAreVariables(t *testing.T) {
	for _, pattern := range []string{"README.md", "docs/*.md", ".github/*", ".github/*/*"} {
		names, err := fs.Glob(os.DirFS(".."), pattern)
		check.OK(t, err)
		for _, name := range names {
			if info, err := os.Stat("../" + name); err != nil || info.IsDir() {
				continue
			}
			for _, host := range registry.FindAllString(read(t, "../"+name), -1) {
				t.Errorf("%s names the registry %s: use $HUB", name, host)
			}
		}
	}
}

var (
	makeTarget = regexp.MustCompile(`(?m)(?:^|[;&|]\s*|\s)make ([a-z][a-z0-9-]*)`)
	declares   = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	calls      = regexp.MustCompile(`(?m)^[^#\n]*\bmake ([a-z][a-z0-9-]*)`)
	script     = regexp.MustCompile(`\bhack/[\w-]+\.sh`)
	body       = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):.*\n(?:\t@hack/setup\.sh\n)?\t@(hack/[\w-]+\.sh[^\n]*)$`)
)

// TestCI_MakeTargets: the blocks of the runner ci call existing targets, and CI calls each target in .ci/run, a workflow, or a
// script that they call.
func TestCI_MakeTargets(t *testing.T) {
	all := readPages(t)
	targets := makeTargets(t)
	called := ciTargets(t)
	for _, blocks := range pages.Of(all, "ci") {
		for _, b := range blocks {
			found := makeTarget.FindAllStringSubmatch(withoutComments(b.Text), -1)
			if len(found) == 0 {
				t.Errorf("%s:%d: not a make target: the runner ci runs only make targets", b.Page, b.Line)
			}
			for _, m := range found {
				switch {
				case !slices.Contains(targets, m[1]):
					t.Errorf("%s:%d: make %s is not in the Makefile", b.Page, b.Line, m[1])
				case !called[m[1]]:
					t.Errorf("%s:%d: neither .ci/run nor a workflow calls make %s", b.Page, b.Line, m[1])
				}
			}
		}
	}
}

// TestCI_ReleaseCommands: .ci/run calls "hack/release.sh --check", which contains each command of the runner release, or calls the
// function that the command runs.
func TestCI_ReleaseCommands(t *testing.T) {
	if !strings.Contains(withoutComments(read(t, "../.ci/run")), "hack/release.sh --check") {
		t.Error(".ci/run does not call hack/release.sh --check")
	}
	_, check, _ := strings.Cut(read(t, "../hack/release.sh"), "\ncheck() {")
	check, _, _ = strings.Cut(check, "\n}\n")
	all := readPages(t)
	for _, blocks := range pages.Of(all, "release") {
		for _, b := range blocks {
			for line := range strings.Lines(withoutComments(b.Text)) {
				within := strings.TrimSpace(line)
				if strings.HasPrefix(within, "make release VERSION=") {
					within = `build "$1"`
				}
				if !strings.Contains(check, within) {
					t.Errorf("%s:%d: hack/release.sh --check does not run %s", b.Page, b.Line, strings.TrimSpace(line))
				}
			}
		}
	}
}

// TestQuickstart_TenCommands: docs/quickstart.md has ten commands at most besides the one that removes the cluster. e2e/docs runs those of
// the runner cluster; those of the runner kind need a container engine, and are calls of make and kind.
func TestQuickstart_TenCommands(t *testing.T) {
	const page, remove, most = "docs/quickstart.md", "kind delete cluster", 10
	made := regexp.MustCompile(`^(make image kubectl-plugin|PATH=.+|kind create cluster|` + remove + `)$`)
	commands := 0
	all := readPages(t)
	for _, b := range slices.Concat(pages.Of(all, "kind")[page], pages.Of(all, "cluster")[page]) {
		found, err := b.Commands()
		check.OK(t, err)
		for _, c := range found {
			for part := range strings.SplitSeq(strings.TrimSpace(c.Text), " && ") {
				if b.Runner == "kind" && !made.MatchString(part) {
					t.Errorf("%s:%d: no test runs %s", page, c.Line, part)
				}
				if part != remove && !strings.HasPrefix(part, "PATH=") {
					commands++
				}
			}
		}
	}
	if commands < most/2 || commands > most {
		t.Errorf("%s has %d commands, at most %d", page, commands, most)
	}
}

// TestPages_MakeTargetsExist: the targets and scripts in sentences exist. hack/pages has the same test for the program's commands.
func TestPages_MakeTargetsExist(t *testing.T) {
	checked := 0
	for _, page := range readPages(t) {
		if page.Name == "docs/changelog.md" {
			continue // it names removed targets
		}
		for _, span := range page.Spans {
			if m := spokenTarget.FindStringSubmatch(span.Text); m != nil {
				checked++
				if !slices.Contains(makeTargets(t), m[1]) {
					t.Errorf("%s:%d: %s: there is no such target", page.Name, span.Line, span.Text)
				}
			}
			for _, name := range script.FindAllString(span.Text, -1) {
				checked++
				if info, err := os.Stat("../" + name); (err != nil || info.Mode()&0o111 == 0) && name != "hack/lib.sh" {
					t.Errorf("%s:%d: %s: there is no such script", page.Name, span.Line, span.Text)
				}
			}
		}
	}
	if checked < 30 {
		t.Errorf("%d targets and scripts: the search misses them", checked)
	}
}

var spokenTarget = regexp.MustCompile(`^(?:\w+=\S* )*make ([a-z][a-z0-9-]*)`)

func makeTargets(t *testing.T) (targets []string) {
	t.Helper()
	for _, m := range declares.FindAllStringSubmatch(read(t, "../Makefile"), -1) {
		targets = append(targets, m[1])
	}
	return targets
}

var comment = regexp.MustCompile(`(?m)(^|\s)#.*$`)

func withoutComments(text string) string { return comment.ReplaceAllString(text, "") }

// ciTargets returns the make targets that CI calls. A call of the script in a target's body is also a call of the target.
func ciTargets(t *testing.T) map[string]bool {
	t.Helper()
	workflows, err := fs.Glob(os.DirFS(".."), ".github/workflows/*.y*ml")
	check.OK(t, err)
	text := withoutComments(read(t, "../.ci/run"))
	for _, name := range workflows {
		text += withoutComments(read(t, "../"+name))
	}
	for _, name := range script.FindAllString(text, -1) {
		text += "\n" + read(t, "../"+name)
	}
	found := map[string]bool{}
	for _, m := range calls.FindAllStringSubmatch(text, -1) {
		found[m[1]] = true
	}
	// hack/bare.sh takes its commands from the README.
	if strings.Contains(text, "hack/bare.sh") {
		found["demo"], found["test"] = true, true
	}
	for _, m := range body.FindAllStringSubmatch(read(t, "../Makefile"), -1) {
		if strings.Contains(text, m[2]) {
			found[m[1]] = true
		}
	}
	return found
}
