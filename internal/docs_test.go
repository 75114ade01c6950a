package internal

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// manuals are what somebody with an error before him looks into. A text counts
// as explained if it stands in one of their code spans or blocks.
var manuals = []string{"../docs/operations.md", "../docs/install.md", "../docs/permissions.md"}

// all stands for every argument of a call.
const all = -1

// mouths are the calls that say something to a person, and which argument is
// what they say. "fmt.Errorf" is that function, ".Warn" a method of that name on
// whatever, "say" a function or a local variable.
var mouths = map[string]int{
	"fmt.Errorf":     0,
	"errors.New":     0,
	"fmt.Sprintf":    0,
	"types.NewError": 1,

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
	".complain":   all,
	".trouble":    all,

	".fail":    all,
	".unknown": all,
	".keep":    all,
	"bad":      all,
	"say":      all,
}

// keys are those of composite literals whose value is said to a person.
var keys = []string{"what", "Problem"}

// ruleLanguage is where Sprintf makes iptables' and nft's words, and errors
// are made by other calls.
var ruleLanguage = []string{"internal/core/redirect/rules", "internal/core/ruleset", "internal/node/nftables", "internal/node/route"}

// exempt are texts that need no remedy. Each one needs a reason, and goes when
// nothing says its texts any more.
var exempt = []exemption{}

type exemption struct{ file, text, why string }

// message is a text in the source, with %s where something comes in.
type message struct {
	where string // file:line
	text  string
}

// TestTextsAreInTheManuals holds docs/operations.md to what it promises: that
// the text of each error is there. The rule, which that page tells its reader
// too:
//
//   - an error that is a cause, a warning or error of the log, an event, a
//     reason for not being ready: the longest of its fixed parts stands there;
//   - an error that wraps another one says what was being done or about what
//     ("reading …: ", "file "…": "), and is read through to its end. If it says
//     more than that, the same as above;
//   - the manual may break a text off with "…" behind 20 characters.
func TestTextsAreInTheManuals(t *testing.T) {
	var pages []string
	for _, name := range manuals {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, string(text))
	}
	said, err := messages(readTree(t, os.DirFS("..")))
	if err != nil {
		t.Fatal(err)
	}
	if len(said) < 300 {
		t.Fatalf("%d texts are said in all of the tree: the search does not see them", len(said))
	}
	used := make([]bool, len(exempt))
	missing := 0
	for _, m := range unexplained(said, quoted(strings.Join(pages, "\n"))) {
		if i := slices.IndexFunc(exempt, func(e exemption) bool { return e.covers(m) }); i >= 0 {
			used[i] = true
			continue
		}
		missing++
		t.Errorf("%s: %q is in none of the manuals: put it into docs/operations.md, with what to do", m.where, m.text)
	}
	for i, e := range exempt {
		if !used[i] {
			t.Errorf("exemption of %s %q is not needed", e.file, e.text)
		}
	}
	t.Logf("%d texts, %d missing", len(said), missing)
}

func (e exemption) covers(m message) bool {
	return strings.HasPrefix(m.where, e.file) && strings.Contains(m.text, e.text)
}

// messages finds what the programs say, in the order of files and lines.
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
	for _, name := range slices.Sorted(mapKeys(parsed)) {
		r := reader{file: name, set: set, texts: texts[path.Dir(name)]}
		ast.Inspect(parsed[name], r.look)
		found = append(found, r.found...)
	}
	return found, nil
}

func mapKeys[V any](m map[string]V) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
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

func (r *reader) look(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		if name, _ := called(n); name == "panic" {
			return false
		}
		r.call(n)
	case *ast.KeyValueExpr:
		if key, ok := n.Key.(*ast.Ident); ok && slices.Contains(keys, key.Name) {
			r.hear(n.Value)
		}
	case *ast.ValueSpec:
		// A kind or a reason: a constant that has a type of its own.
		if n.Type != nil {
			for _, value := range n.Values {
				r.hear(value)
			}
		}
	}
	return true
}

func (r *reader) call(n *ast.CallExpr) {
	full, short := called(n)
	at, ok := mouths[full]
	if !ok {
		at, ok = mouths[short]
	}
	if !ok || full == "fmt.Sprintf" && slices.ContainsFunc(ruleLanguage, func(p string) bool { return strings.HasPrefix(r.file, p) }) {
		return
	}
	for i, arg := range n.Args {
		if i == at || at == all {
			r.hear(arg)
		}
	}
}

// called names what is called: with the last word of what it is called on, and
// with a dot instead of that.
func called(n *ast.CallExpr) (full, short string) {
	switch f := n.Fun.(type) {
	case *ast.Ident:
		return f.Name, f.Name
	case *ast.SelectorExpr:
		on := ""
		switch x := f.X.(type) {
		case *ast.Ident:
			on = x.Name
		case *ast.SelectorExpr:
			on = x.Sel.Name
		}
		return on + "." + f.Sel.Name, "." + f.Sel.Name
	}
	return "", ""
}

// event is a reason of a Kubernetes Event: one word, and to be explained.
var event = regexp.MustCompile(`^[A-Z]+[a-z]+[A-Z]\w+$`)

func (r *reader) hear(e ast.Expr) {
	text := r.read(e)
	if words := strings.Fields(verb.ReplaceAllString(text, "")); len(words) < 2 && !event.MatchString(text) {
		return // a key of an attribute, a mere "%w: %w"
	}
	position := r.set.Position(e.Pos())
	r.found = append(r.found, message{where: fmt.Sprintf("%s:%d", position.Filename, position.Line), text: text})
}

// read returns a text with %s for what is not known here.
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

// quoted returns what a page has in code spans and blocks, one a line.
func quoted(page string) string {
	var lines []string
	for _, block := range fence.FindAllString(page, -1) {
		lines = append(lines, blank.ReplaceAllString(strings.Trim(block, "`"), " "))
	}
	for _, s := range span.FindAllString(fence.ReplaceAllString(page, ""), -1) {
		lines = append(lines, blank.ReplaceAllString(strings.Trim(s, "`"), " "))
	}
	return strings.Join(lines, "\n")
}

// unexplained returns the messages that a manual does not have.
func unexplained(said []message, manual string) []message {
	var missing []message
	for _, m := range said {
		if text := news(m.text); text != "" && !explained(text, manual) {
			missing = append(missing, m)
		}
	}
	return missing
}

// news is what a message says beyond what it wraps: all of it if it wraps
// nothing; what is behind the wrapped error, if there is anything; what is
// ahead of it if that is more than what was being done, or about what.
func news(text string) string {
	const wrapped = "%w"
	if !strings.Contains(text, wrapped) {
		return text
	}
	if behind := text[strings.LastIndex(text, wrapped)+len(wrapped):]; len(longest(behind)) >= short {
		return behind
	}
	ahead := text[:strings.Index(text, wrapped)]
	words := strings.Fields(verb.ReplaceAllString(ahead, ""))
	if len(words) <= 4 || strings.HasSuffix(words[0], "ing") {
		return ""
	}
	return ahead
}

// short is the length from which on a fixed part alone tells a message.
const short = 12

// mostKept is how much of a part a manual has to have before it breaks off.
const mostKept = 20

func explained(text, manual string) bool {
	part := longest(text)
	if len(part) < short {
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
	best := ""
	for _, p := range parts(text) {
		if len(p) > len(best) {
			best = p
		}
	}
	return best
}

// inOrder is an expression for all parts of a message with little in between.
func inOrder(text string) string {
	all := parts(text)
	for i, p := range all {
		all[i] = regexp.QuoteMeta(p)
	}
	return strings.Join(all, ".{0,60}")
}

var _ = cmp.Diff
