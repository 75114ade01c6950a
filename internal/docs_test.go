package internal

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// textsPage explains errors. A text counts as explained if a row of a table "text" or a code block has it.
const textsPage = "../docs/errors.md"

// metricsPage has the tables of metrics and alerts.
const metricsPage = "../docs/reference.md"

// all selects every argument of a call.
const all = -1

// textArguments are the calls with a text for a person, and the index of the text. "fmt.Errorf" is that function, ".Warn" a
// method of that name on any value, "bad" a function or a local variable.
var textArguments = map[string]int{
	"fmt.Errorf":     0,
	"errors.New":     0,
	"fmt.Sprintf":    0,
	"types.NewError": 1,
	"failure":        1,

	".Warn":         0,
	".WarnContext":  1,
	".Error":        0,
	".ErrorContext": 1,
	".Log":          2,
	".LogAttrs":     2,
	".line":         all,

	".NotReady":   1,
	"report.Warn": all,
	".warn":       all,
	".once":       all,
	".say":        all,
	".event":      all,
	".trouble":    all,

	"http.Error": 1,
	".onError":   all,
	".logState":  all,
	".note":      all,
	".problem":   0,
	"warn":       1,
	"fail":       1,
	"report":     1,
	"usage":      all,
	"mistake":    all,
	"add":        all,
	".stop":      all,
	"append":     all,

	".fail":    all,
	".unknown": all,
	".keep":    all,
	"bad":      all,
	"printf":   all,
}

// keys are those of composite literals whose value is a text for a person.
var keys = []string{"Problem"}

// sentences are functions that return a text for a person, or a part of one.
var sentences = []string{"Hint", "Fits", "advice", "elsewhere", "why", "Sentence"}

// ruleLanguage is where Sprintf makes iptables' and nft's words, and errors
// are made by other calls.
var ruleLanguage = []string{"internal/core/redirect/rules", "internal/core/ruleset", "internal/node/nftables", "internal/node/route"}

// exempt are texts that need no remedy of their own: those in the files that begin so, or the ones of them with the text. Each
// needs a reason, and is removed with the last of its texts.
var exempt = []exemption{
	{"internal/node/nftables/xtables/", "", "about rules that this program wrote itself; the manual has what stands before them"},
	{"internal/node/nftables/native/", "", "the same"},
	{"internal/agent/logserver/record.go", "", "a plugin is answered by a status of HTTP alone, and the log has the number"},
	{"internal/core/redirect/parse.go", "is not a known field", "only a mistake in this program"},
	{"internal/core/audit/exceptions.go", "", "what an exception lets pass, of the same page"},
	{"internal/role/why/print.go", "", "parts of the page, which explains itself; bypass.md shows it"},
	{"internal/core/settings/settings.go", "(%d bytes, not shown)", "a value in the list of settings"},
	{"internal/role/tainter/settings.go", "%s in mode legacy, %s in mode untaint", "a line of --help"},
}

type exemption struct{ file, text, why string }

// message is a text in the source, with %s where something comes in.
type message struct {
	where string // file:line
	text  string
}

// TestTextsAreInTheManuals holds docs/errors.md to its promise that the text of
// each error is there:
//
//   - an error that is a cause, a warning or error of the log, an event, a
//     reason for not being ready: the page has the longest of its fixed parts,
//     or all of them in their order if none has 20 characters;
//   - an error that wraps another one names the action or the object
//     ("reading …: ", "file "…": "). If it has more than that, in more than four
//     words or behind the wrapped error, the same as above;
//   - the manual may break a text off with "…" behind 20 characters.
func TestTextsAreInTheManuals(t *testing.T) {
	manual := explanations(read(t, textsPage))
	found, err := messages(readTree(t, os.DirFS("..")))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 300 {
		t.Fatalf("only %d texts in the tree: the search does not find them", len(found))
	}
	used := make([]bool, len(exempt))
	for _, m := range unexplained(found, manual) {
		if i := slices.IndexFunc(exempt, func(e exemption) bool { return e.covers(m) }); i >= 0 {
			used[i] = true
			continue
		}
		t.Errorf("%s: %q is not in docs/errors.md: put it into the first cell of a row, with cause and remedy", m.where, m.text)
	}
	for i, e := range exempt {
		if !used[i] {
			t.Errorf("the exemption of %s %q is not needed", e.file, e.text)
		}
	}
	t.Logf("%d texts", len(found))
}

// foreign are texts of the page that come from other programs and libraries, or that the source makes of smaller pieces.
var foreign = []string{
	"EOF",
	"i/o timeout",
	"context deadline exceeded",
	"open …: no such file or directory",
	"failed to find plugin \"istio-cni\" in path …", // libcni
	"address already in use",
	"too many levels of symbolic links",
	"RULE_APPEND failed (Invalid argument)",                         // iptables
	"required env variables … missing",                              // libcni
	"invalid configuration: …",                                      // client-go
	"got invalid watch event type: …",                               // client-go
	"object to decode was longer than maximum allowed size",         // client-go
	"ClientWatchDecoding",                                           // client-go
	"ARGS: unknown args …",                                          // libcni
	"incompatible CNI versions; config is \"…\", plugin supports …", // libcni
	"config version does not allow CHECK",                           // libcni
	"config version does not allow STATUS",                          // libcni
	"http: Accept error: …; retrying in …",                          // net/http
	"… packets were seen",
}

// TestRowsAreInTheSource finds rows of docs/errors.md whose text the source does not have any more, and texts with two rows: what
// stands between placeholders ("…", quotes, numbers, punctuation) has to be in a string of the source, in these words.
func TestRowsAreInTheSource(t *testing.T) {
	source, err := literals(readTree(t, os.DirFS("..")))
	if err != nil {
		t.Fatal(err)
	}
	source += read(t, "agent/page/page.js")
	seen, used := map[string]bool{}, map[string]bool{}
	texts := rowTexts(read(t, textsPage))
	if len(texts) < 300 {
		t.Fatalf("only %d texts in %s: the search does not find them", len(texts), textsPage)
	}
	for _, text := range texts {
		if seen[text] {
			t.Errorf("%q has two rows", text)
		}
		seen[text] = true
		if slices.Contains(foreign, text) {
			used[text] = true
		} else if missing := unsourced(text, source); missing != "" {
			t.Errorf("%q: the source does not have %q: remove the row, or correct it", text, missing)
		}
	}
	for _, text := range foreign {
		if !used[text] {
			t.Errorf("%q is in no row: remove it from foreign", text)
		}
	}
}

// literals returns the strings of the programs, one a line, with line ends for placeholders and unknown parts.
func literals(files map[string]string) (string, error) {
	var all []string
	set := token.NewFileSet()
	for name, text := range files {
		if strings.HasSuffix(name, "_test.go") || ringOf(path.Dir(name)) == ringSupport {
			continue
		}
		file, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
		if err != nil {
			return "", err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if e, ok := n.(ast.Expr); ok {
				if s := (&reader{}).read(e); s != "%s" {
					all = append(all, strings.ReplaceAll(verb.ReplaceAllString(s, "\n"), "%%", "%"))
				}
			}
			return true
		})
	}
	return strings.Join(all, "\n"), nil
}

// placeholder is what separates the fixed words of a row's text.
var placeholder = regexp.MustCompile(`…|\S*\d\S*|["“”:;,()\[\]+]|\s-\s`)

// unsourced returns the first words of a text that the source does not have, "" if it has all.
func unsourced(text, source string) string {
	for _, words := range placeholder.Split(text, -1) {
		if words = strings.TrimSpace(words); len(words) > 1 && !strings.Contains(source, words) {
			return words
		}
	}
	return ""
}

func read(t *testing.T, names ...string) string {
	t.Helper()
	var pages []string
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, string(text))
	}
	return strings.Join(pages, "\n")
}

func (e exemption) covers(m message) bool {
	return strings.HasPrefix(m.where, e.file) && strings.Contains(m.text, e.text)
}

// messages finds the texts of the programs, in the order of files and lines.
func messages(files map[string]string) ([]message, error) {
	set := token.NewFileSet()
	parsed := map[string]*ast.File{}
	texts := map[string]map[string]string{} // constants and variables by directory
	for name, text := range files {
		if strings.HasSuffix(name, "_test.go") || ringOf(path.Dir(name)) == ringSupport {
			continue
		}
		file, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed[name] = file
		if texts[path.Dir(name)] == nil {
			texts[path.Dir(name)] = map[string]string{}
		}
		named(file, texts[path.Dir(name)])
	}
	var found []message
	for _, name := range slices.Sorted(maps.Keys(parsed)) {
		r := reader{file: name, set: set, texts: texts[path.Dir(name)]}
		ast.Inspect(parsed[name], r.visit)
		found = append(found, r.found...)
	}
	return found, nil
}

// named collects the strings that have names, those within functions included.
func named(file *ast.File, texts map[string]string) {
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		for i, value := range spec.Values {
			if lit, ok := value.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				texts[spec.Names[i].Name] = unquote(lit)
			}
		}
		return true
	})
}

func unquote(lit *ast.BasicLit) string {
	s, err := strconv.Unquote(lit.Value)
	if err != nil {
		return lit.Value
	}
	return s
}

// reader collects the messages of one file.
type reader struct {
	file  string
	set   *token.FileSet
	texts map[string]string
	found []message
}

func (r *reader) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		if name, _ := called(n); name == "panic" {
			return false
		}
		r.call(n)
	case *ast.FuncDecl:
		if slices.Contains(sentences, n.Name.Name) && n.Body != nil {
			ast.Inspect(n.Body, r.returned)
		}
	case *ast.AssignStmt:
		for _, value := range n.Rhs {
			if event.MatchString(r.read(value)) {
				r.add(value)
			}
		}
	case *ast.KeyValueExpr:
		if key, ok := n.Key.(*ast.Ident); ok && slices.Contains(keys, key.Name) {
			r.add(n.Value)
		}
	case *ast.ValueSpec:
		// A kind or a reason: a constant that has a type of its own.
		if n.Type != nil {
			for _, value := range n.Values {
				r.add(value)
			}
		}
	}
	return true
}

// returned adds what a function returns, and the values of a map from reasons to sentences.
func (r *reader) returned(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.ReturnStmt:
		for _, value := range n.Results {
			r.add(value)
		}
	case *ast.CompositeLit:
		for _, e := range n.Elts {
			if pair, ok := e.(*ast.KeyValueExpr); ok {
				r.add(pair.Value)
			}
		}
	}
	return true
}

func (r *reader) call(n *ast.CallExpr) {
	full, short := called(n)
	at, ok := textArguments[full]
	if !ok {
		at, ok = textArguments[short]
	}
	if !ok || full == "fmt.Sprintf" && slices.ContainsFunc(ruleLanguage, func(p string) bool { return strings.HasPrefix(r.file, p) }) {
		return
	}
	for i, arg := range n.Args {
		if i == at || at == all {
			r.add(arg)
		}
	}
}

// called names a called function: with the last word of its package or value, and with a dot instead of that.
func called(n *ast.CallExpr) (full, short string) {
	words := strings.Split(types.ExprString(n.Fun), ".")
	last := words[len(words)-1]
	if len(words) == 1 {
		return last, last
	}
	return strings.Join(words[len(words)-2:], "."), "." + last
}

// event is a reason of a Kubernetes Event: one word, and to be explained.
var event = regexp.MustCompile(`^[A-Z]+[a-z]+[A-Z]\w+$`)

func (r *reader) add(e ast.Expr) {
	text := r.read(e)
	if words := strings.Fields(verb.ReplaceAllString(text, "")); len(words) < 2 && !event.MatchString(text) {
		return // a key of an attribute, a mere "%w: %w"
	}
	position := r.set.Position(e.Pos())
	r.found = append(r.found, message{where: fmt.Sprintf("%s:%d", position.Filename, position.Line), text: text})
}

// read returns a text with %s for each unknown part.
func (r *reader) read(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			return unquote(e)
		}
	case *ast.Ident:
		if text, ok := r.texts[e.Name]; ok {
			return text
		}
	case *ast.ParenExpr:
		return r.read(e.X)
	case *ast.BinaryExpr:
		return r.read(e.X) + r.read(e.Y)
	case *ast.CallExpr:
		if full, _ := called(e); full == "fmt.Sprintf" && len(e.Args) > 0 {
			return r.read(e.Args[0])
		}
	}
	return "%s"
}

var (
	verb  = regexp.MustCompile(`%[-+# 0]*[0-9.]*(\[\d+\])?[a-zA-Z]`)
	fence = regexp.MustCompile("(?s)```.*?```")
	span  = regexp.MustCompile("`[^`]+`")
	blank = regexp.MustCompile(`\s+`)
)

// explanations returns the code blocks of a page and the code spans of its rows of texts, one a line.
func explanations(page string) string {
	var lines []string
	for _, block := range fence.FindAllString(page, -1) {
		lines = append(lines, blank.ReplaceAllString(strings.Trim(block, "`"), " "))
	}
	return strings.Join(append(lines, rowTexts(page)...), "\n")
}

// rowTexts returns the code spans in the first cells of the tables whose first column is "text".
func rowTexts(page string) []string {
	var all []string
	texts := false
	for line := range strings.Lines(fence.ReplaceAllString(page, "")) {
		if !strings.HasPrefix(line, "|") {
			texts = false
			continue
		}
		cell, _, _ := strings.Cut(strings.ReplaceAll(line[1:], `\|`, "\x00"), "|")
		if strings.TrimSpace(cell) == "text" {
			texts = true
		}
		for _, s := range span.FindAllString(cell, -1) {
			if texts {
				all = append(all, strings.ReplaceAll(strings.Trim(s, "`"), "\x00", "|"))
			}
		}
	}
	return all
}

// unexplained returns the messages that a manual does not have.
func unexplained(found []message, manual string) []message {
	var missing []message
	for _, m := range found {
		if text := news(m.text); text != "" && !explained(text, manual) {
			missing = append(missing, m)
		}
	}
	return missing
}

// news is the text of a message besides the wrapped error: all of it without one; the text behind the wrapped error, if any;
// else the text ahead of it, if that is more than the name of the action or of the object.
func news(text string) string {
	const wrapped = "%w"
	if !strings.Contains(text, wrapped) {
		return text
	}
	if behind := text[strings.LastIndex(text, wrapped)+len(wrapped):]; len(longest(behind)) >= more {
		return behind
	}
	ahead := text[:strings.Index(text, wrapped)]
	words := strings.Fields(verb.ReplaceAllString(ahead, ""))
	if len(words) <= 4 || strings.HasSuffix(words[0], "ing") {
		return ""
	}
	return ahead
}

const (
	// long is the length from which on one fixed part tells a message by itself.
	// Of others all parts are looked for, in their order.
	long = 20
	// mostKept is how much of a part a manual has to have before it breaks off.
	mostKept = 20
	// more is the length from which on there is news behind a wrapped error.
	more = 12
)

func explained(text, manual string) bool {
	part := longest(text)
	if len(part) < long {
		return regexp.MustCompile(inOrder(text)).MatchString(manual)
	}
	if strings.Contains(manual, part) {
		return true
	}
	for n := len(part) - 1; n >= mostKept; n-- {
		if kept := strings.TrimSpace(part[:n]); strings.Contains(manual, kept+"…") || strings.Contains(manual, kept+" …") {
			return true
		}
	}
	return false
}

// parts are the fixed parts of a message.
func parts(text string) []string {
	var kept []string
	for _, p := range verb.Split(text, -1) {
		if p = strings.Trim(blank.ReplaceAllString(p, " "), " .:;,()[]"); p != "" {
			kept = append(kept, p)
		}
	}
	return kept
}

func longest(text string) string {
	return slices.MaxFunc(append(parts(text), ""), func(a, b string) int { return len(a) - len(b) })
}

// inOrder is an expression for all parts of a message with little in between.
func inOrder(text string) string {
	return strings.ReplaceAll(regexp.QuoteMeta(strings.Join(parts(text), "\n")), "\n", ".{0,60}")
}

// TestUnexplained has each kind of text, explained and not.
func TestUnexplained(t *testing.T) {
	const page = "Text: `no such file in the attic`, as prose.\n\n| text | remedy |\n|---|---|\n" +
		"| `the \"…\" of the node is full: …`, `… is still warm` | `no such file in the attic`, as remedy |\n" +
		"| `no \"type\"`, `taken back … times` | |\n\n" +
		"```console\nwarning: the cellar is flooded\n```\n"
	tests := []struct {
		name string
		code string
		want []string // texts that are not explained
	}{
		{"a cause", `errors.New("the cellar is flooded"); errors.New("the cellar is dry")`, []string{"the cellar is dry"}},
		{"prose explains nothing", `errors.New("no such file in the attic")`, []string{"no such file in the attic"}},
		{"the longest part counts", `fmt.Errorf("the %q of the node is full: %d", x, n)`, nil},
		{"broken off too early", `errors.New("is still warm, and more of the same")`, []string{"is still warm, and more of the same"}},
		{"broken off", `errors.New("of the node is full: make room in it")`, nil},
		{"short ones as a whole", `errors.New("no \"type\""); errors.New("no \"name\"")`, []string{`no "name"`}},
		{"short parts in order", `fmt.Errorf("taken %s times", x); fmt.Errorf("times %s taken", x)`, []string{"times %s taken"}},
		{"what was being done", `fmt.Errorf("reading the list of the attic: %w", err); fmt.Errorf("file %q: %w", x, err)`, nil},
		{"more than that", `fmt.Errorf("the roof lets in the rain: %w", err)`, []string{"the roof lets in the rain: %w"}},
		{"behind what is wrapped", `fmt.Errorf("%w: close the windows first", err)`, []string{"%w: close the windows first"}},
		{"the log", `log.Warn("it rains", "a", "b"); log.InfoContext(ctx, "it pours"); l.ErrorContext(ctx, "it hails")`, []string{"it rains", "it hails"}},
		{"readiness", `h.NotReady(part, "waiting for spring: "+err.Error())`, []string{"waiting for spring: %s"}},
		{"events", `n.warn("RoofIsGone", "the roof is gone: "+text)`, []string{"RoofIsGone", "the roof is gone: %s"}},
		{"a constant", `const gone = "the roof is gone"; n.warn("a", gone)`, []string{"the roof is gone"}},
		{"a kind", `const Gone Reason = "the roof is gone"; const other = "not a text for a person"`, []string{"the roof is gone"}},
		{"what goes into a text", `s := fmt.Sprintf("%d of the tiles", n)`, []string{"%d of the tiles"}},
		{"a CNI error", `types.NewError(7, "the house cannot be used", err.Error())`, []string{"the house cannot be used"}},
		{"an error of the plugin", `failure(7, "the house cannot be used", err)`, []string{"the house cannot be used"}},
		{"an event by a variable", `reason := "RoofIsGone"; other := "not a text for a person"`, []string{"RoofIsGone"}},
		{"what a function returns", `}; func Hint() string { return "close the windows first" `, []string{"close the windows first"}},
		{
			"a map of sentences", `}; func Sentence(r Reason) string { return map[Reason]string{Gone: "the roof is gone"}[r] `,
			[]string{"the roof is gone"},
		},
		{"a panic", `panic(fmt.Sprintf("the house of %s burns", x))`, nil},
	}
	for _, test := range tests {
		found, err := messages(map[string]string{
			"internal/node/x/x.go":      "package x\nfunc f() {\n" + test.code + "\n}",
			"internal/node/x/x_test.go": "package x\nvar _ = errors.New(\"only a test says so\")",
			"internal/node/xtest/x.go":  "package xtest\nvar _ = errors.New(\"only test support says so\")",
		})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range unexplained(found, explanations(page)) {
			got = append(got, m.text)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: unexplained texts (-want +got):\n%s", test.name, diff)
		}
	}
}

var (
	ownMetric = regexp.MustCompile(`\bistio_cni_[a-z_]+`)
	declared  = regexp.MustCompile(`"(istio_cni_[a-z_]+)"`)
)

// TestMetricsAreInTheManual compares the metrics that there are with those of
// the tables and of the alerts.
func TestMetricsAreInTheManual(t *testing.T) {
	files, err := filepath.Glob("agent/metrics/*.go")
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
	made := map[string]bool{}
	for _, found := range declared.FindAllStringSubmatch(read(t, files...), -1) {
		made[found[1]] = true
	}
	if len(made) < 20 {
		t.Fatalf("%d metrics in %v: the search does not see them", len(made), files)
	}
	page := read(t, metricsPage)
	for _, name := range slices.Sorted(maps.Keys(made)) {
		if !regexp.MustCompile(`\| .` + name + `[{` + "`" + `]`).MatchString(page) {
			t.Errorf("%s is in no table of %s", name, metricsPage)
		}
	}
	for _, name := range ownMetric.FindAllString(page, -1) {
		if !made[name] && !made[strings.TrimSuffix(name, "_bucket")] {
			t.Errorf("%s speaks of %s, which there is not", metricsPage, name)
		}
	}
}

// TestUnsourced has rows whose text the source has, and has not.
func TestUnsourced(t *testing.T) {
	const page = "| text | remedy |\n|---|---|\n| `the roof of \"…\" is gone: …`, `lost 3 of 7 tiles` | `no cause` |\n| event `RoofIsGone` | |\n\n| check | |\n|---|---|\n| `no text` | |\n"
	source, err := literals(map[string]string{
		"internal/node/x/x.go":      "package x\nvar _ = fmt.Errorf(\"the roof \" + \"of %q is gone: %w\", a, b)\nconst gone = \"RoofIsGone\"",
		"internal/node/x/x_test.go": "package x\nvar _ = errors.New(\"tiles\")",
		"internal/node/xtest/x.go":  "package xtest\nvar _ = errors.New(\"tiles\")",
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, text := range rowTexts(page) {
		if missing := unsourced(text, source); missing != "" {
			got = append(got, missing)
		}
	}
	if diff := cmp.Diff([]string{"lost"}, got); diff != "" {
		t.Errorf("words that the source does not have (-want +got):\n%s", diff)
	}
}

var (
	testName = regexp.MustCompile("`(?:([a-z0-9_/]+)\\.)?((?:Test|Fuzz)[A-Z0-9]\\w*)")
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z0-9]\w*)\(\w+ \*testing\.[TF]\)`)
)

// TestTestsInTheDocsExist: each test that a page names is in the tree; one with a package, such as mesh.TestANewNode or
// hack/chart.TestImage, in a directory whose path ends so.
func TestTestsInTheDocsExist(t *testing.T) {
	dirs := testDirs(t)
	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, page := range append(pages, "../README.md", "../.github/CONTRIBUTING.md") {
		for _, found := range testName.FindAllStringSubmatch(read(t, page), -1) {
			named++
			if !slices.ContainsFunc(dirs[found[2]], func(dir string) bool { return found[1] == "" || strings.HasSuffix("/"+dir, "/"+found[1]) }) {
				t.Errorf("%s: there is no %s; tests of that name are in %q", page, strings.Trim(found[0], "`"), dirs[found[2]])
			}
		}
	}
	if named < 100 {
		t.Errorf("%d names of tests in the pages: the search does not find them", named)
	}
}

// testDirs returns the directories of each test, of all modules.
func testDirs(t *testing.T) map[string][]string {
	t.Helper()
	dirs := map[string][]string{}
	tree := os.DirFS("..")
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (name == "bin" || name == ".git") {
			return fs.SkipDir
		}
		if err != nil || path.Ext(name) != ".go" {
			return err
		}
		text, err := fs.ReadFile(tree, name)
		for _, found := range testFunc.FindAllSubmatch(text, -1) {
			dirs[string(found[1])] = append(dirs[string(found[1])], path.Dir(name))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// TestTheRunbookIsShort: who is on call reads it under pressure.
func TestTheRunbookIsShort(t *testing.T) {
	const most = 200
	if n := strings.Count(read(t, "../docs/runbook.md"), "\n"); n > most {
		t.Errorf("docs/runbook.md has %d lines, %d at most", n, most)
	}
}

// TestEveryPageIsInTheIndex: docs/index.md leads to each page.
func TestEveryPageIsInTheIndex(t *testing.T) {
	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	index := read(t, "../docs/index.md")
	for _, page := range pages {
		if name := filepath.Base(page); name != "index.md" && !regexp.MustCompile(`\]\(`+regexp.QuoteMeta(name)+`[)#]`).MatchString(index) {
			t.Errorf("docs/index.md has no link to %s", name)
		}
	}
}
