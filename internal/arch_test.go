package internal

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
)

const module = "github.com/meshcni/istio-cni"

// ring is a level of the import order.
type ring string

const (
	ringMain    ring = "main"
	ringRole    ring = "role"
	ringAgent   ring = "agent"
	ringKube    ring = "kube"
	ringNode    ring = "node"
	ringApplet  ring = "applet"
	ringCore    ring = "core"
	ringSupport ring = "test support"
	ringTop     ring = "internal"
	ringNone    ring = "no ring"
)

// rings places each directory, subdirectories included.
var rings = map[string]ring{
	".":               ringMain,
	"internal/early":  ringMain,
	"internal/applet": ringApplet,
	"internal/core":   ringCore,
	"internal/node":   ringNode,
	"internal/kube":   ringKube,
	"internal/agent":  ringAgent,
	"internal/role":   ringRole,
}

// supportDirs has the test support besides the directories whose name ends
// in "test".
var supportDirs = []string{"hack"}

// below lists the rings that a ring may import. Test support is outside the
// order: it may import everything, and only tests and other test support may
// import it. A role may import its own subpackages, see mayImport.
var below = map[ring][]ring{
	ringMain:    {ringMain, ringApplet, ringRole, ringAgent, ringKube, ringNode, ringCore},
	ringRole:    {ringApplet, ringAgent, ringKube, ringNode, ringCore},
	ringAgent:   {ringAgent, ringKube, ringNode, ringCore},
	ringKube:    {ringKube, ringCore},
	ringNode:    {ringNode, ringCore},
	ringApplet:  {ringApplet, ringCore},
	ringCore:    {ringCore},
	ringSupport: {ringSupport, ringMain, ringApplet, ringRole, ringAgent, ringKube, ringNode, ringCore},
}

// owners lists the directories, subdirectories included, that may import a
// module with effects. The longest prefix of the import path decides. Tests may import any module.
var owners = map[string][]string{
	"github.com/containernetworking/cni":   {"internal/role/plugin"},
	"github.com/coreos/go-iptables":        {"internal/node/iptables"},
	"github.com/fsnotify/fsnotify":         {"internal/node/hostfs"},
	"github.com/pelletier/go-toml":         {"internal/node/runtimeconf"},
	"github.com/urfave/cli":                {"internal/role"},
	"github.com/vishvananda/netlink":       {"internal/node/probeset", "internal/node/route", "internal/node/selfcheck"},
	"github.com/vishvananda/netns":         {"internal/node/netns"},
	"golang.org/x/sys":                     {"internal/node"},
	"golang.org/x/term":                    {"internal/applet/terminal"},
	"github.com/go-logr/logr":              {"internal/kube"},
	"golang.org/x/time/rate":               {"internal/agent", "internal/kube"},
	"k8s.io":                               {"internal/agent/selector", "internal/kube", "internal/role/fleet"},
	"k8s.io/apimachinery/pkg/types":        {"internal/agent", "internal/kube"},
	"k8s.io/apimachinery/pkg/util/version": {"internal/agent/installation"},
	"k8s.io/apimachinery/pkg/util/wait":    {"internal/agent", "internal/kube"},
	"k8s.io/client-go/tools/clientcmd":     {"internal/agent/installation", "internal/kube"},
	"k8s.io/client-go/util/workqueue":      {"internal/agent"},
	"k8s.io/utils/clock":                   {"internal/agent", "internal/role/plugin"},
	"k8s.io/utils/lru":                     {"internal/agent/eventrecorder"},
	"sigs.k8s.io":                          {"internal/agent/selector", "internal/agent/taint", "internal/applet/output", "internal/role/fleet"},

	"k8s.io/apimachinery/pkg/util/duration": {"internal/applet/output"},
}

// impure lists the parts of the standard library that core must not import.
// It includes the packages below each part, except those in pure.
var (
	impure = []string{"log", "net", "os", "plugin", "syscall"}
	pure   = []string{"net/netip", "net/url"}
)

// TestImports_DownOnly checks the tree against the tables.
func TestImports_DownOnly(t *testing.T) {
	files := readTree(t, os.DirFS(".."))
	if _, ok := files["internal/arch_test.go"]; !ok {
		t.Fatalf("this file is not among the %d files read: the walk misses the tree", len(files))
	}
	for _, b := range breaches(files) {
		t.Error(b)
	}
}

// TestTables_StaleRows checks the tables against the tree: a directory has Go files, and an owner of a dependency imports it.
func TestTables_StaleRows(t *testing.T) {
	used := map[string]bool{".": true}
	for name, text := range readTree(t, os.DirFS("..")) {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			used[dir] = true
		}
		if strings.HasSuffix(name, "_test.go") || ringOf(path.Dir(name)) == ringSupport {
			continue
		}
		imports, _ := importsOf(name, text)
		for _, imported := range imports {
			owner := ownerOf(imported)
			for _, dir := range owners[owner] {
				used[owner+" in "+dir] = used[owner+" in "+dir] || within(name, dir)
			}
		}
	}
	rows := slices.Concat(slices.Collect(maps.Keys(rings)), supportDirs)
	for owner, dirs := range owners {
		for _, dir := range dirs {
			rows = append(rows, owner+" in "+dir)
		}
	}
	for _, row := range rows {
		if !used[row] {
			t.Errorf("nothing is left of %s: take it out of the tables", row)
		}
	}
}

func importsOf(name, text string) (imports []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
	if err != nil {
		return nil, err
	}
	for _, spec := range file.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value) // parsed already
		imports = append(imports, imported)
	}
	return imports, nil
}

// readTree reads the Go files of a module, keyed by path. Modules inside of it
// and directories that the go command ignores are left out.
func readTree(t *testing.T, tree fs.FS) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return skipDir(tree, name)
		}
		if path.Ext(name) != ".go" {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		files[name] = string(text)
		return err
	})
	check.OK(t, err)
	return files
}

func skipDir(tree fs.FS, name string) error {
	base := path.Base(name)
	_, err := fs.Stat(tree, path.Join(name, "go.mod"))
	if name != "." && (base == "testdata" || base == "vendor" || base[0] == '.' || base[0] == '_' || err == nil) {
		return fs.SkipDir
	}
	return nil
}

// breaches returns one line for each import that breaks a rule, ordered by
// file. It parses the text and ignores build constraints.
func breaches(files map[string]string) []string {
	var found []string
	for name, text := range files {
		imports, err := importsOf(name, text)
		if err != nil {
			found = append(found, fmt.Sprintf("%s: cannot be parsed: %v", name, err))
			continue
		}
		if ringOf(path.Dir(name)) == ringNone {
			found = append(found, fmt.Sprintf("%s: %s is in no ring: give it one in internal/arch_test.go", name, path.Dir(name)))
			continue
		}
		for _, imported := range imports {
			if why := breach(name, imported); why != "" {
				found = append(found, fmt.Sprintf("%s: imports %q: %s", name, imported, why))
			}
		}
	}
	slices.Sort(found)
	return found
}

// breach returns the reason why a file may not import a package, or "".
func breach(file, imported string) string {
	isTest := strings.HasSuffix(file, "_test.go")
	dir := path.Dir(file)
	switch {
	case within(imported, module):
		return mayImport(dir, strings.TrimPrefix(strings.TrimPrefix(imported, module), "/"), isTest)
	case isTest || ringOf(dir) == ringSupport:
		return ""
	case isStandard(imported):
		return mayUseStandard(dir, imported)
	default:
		return mayUseModule(dir, imported)
	}
}

// mayImport checks an import inside the module; to is "" for its root.
func mayImport(dir, to string, isTest bool) string {
	from, target := ringOf(dir), ringOf(path.Clean(to))
	switch {
	case target == ringSupport:
		if isTest || from == ringSupport {
			return ""
		}
		return "test support is for tests"
	case from == ringRole && target == ringRole:
		if roleOf(dir) == roleOf(to) {
			return ""
		}
		return "a role never imports a role; move what they share down"
	case slices.Contains(below[from], target):
		return ""
	default:
		return fmt.Sprintf("%s never imports %s", from, target)
	}
}

func mayUseStandard(dir, imported string) string {
	if imported == "testing" || strings.HasPrefix(imported, "testing/") {
		return "testing is for tests and test support"
	}
	if ringOf(dir) != ringCore || slices.Contains(pure, imported) {
		return ""
	}
	if slices.ContainsFunc(impure, func(p string) bool { return within(imported, p) }) {
		return "core is pure: no files, processes, network, log"
	}
	return ""
}

func mayUseModule(dir, imported string) string {
	if ringOf(dir) == ringCore {
		return "core uses the standard library only"
	}
	owner := ownerOf(imported)
	if owner == "" {
		return "it has no owner: give it one in internal/arch_test.go"
	}
	if slices.ContainsFunc(owners[owner], func(d string) bool { return within(dir, d) }) {
		return ""
	}
	return strings.Join(owners[owner], " and ") + " owns it"
}

// ownerOf is the row for an import: the one with the longest prefix, or nothing.
func ownerOf(imported string) string {
	owner := ""
	for prefix := range owners {
		if within(imported, prefix) && len(prefix) > len(owner) {
			owner = prefix
		}
	}
	return owner
}

// ringOf places a directory of the module.
func ringOf(dir string) ring {
	if slices.ContainsFunc(supportDirs, func(d string) bool { return within(dir, d) }) ||
		slices.ContainsFunc(strings.Split(dir, "/"), func(s string) bool { return strings.HasSuffix(s, "test") }) {
		return ringSupport
	}
	if dir == "internal" {
		return ringTop
	}
	for d := dir; ; d = path.Dir(d) {
		if r, ok := rings[d]; ok && (d != "." || dir == ".") {
			return r
		}
		if d == "." {
			return ringNone
		}
	}
}

// roleOf returns the directory of the role that a directory belongs to.
func roleOf(dir string) string {
	parts := strings.Split(dir, "/")
	return strings.Join(parts[:min(3, len(parts))], "/")
}

func isStandard(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".")
}

// within reports whether name is prefix or a path below it.
func within(name, prefix string) bool {
	return name == prefix || strings.HasPrefix(name, prefix+"/")
}

// TestImports_BreachesAreFound breaks and keeps each rule. The imports of one file are all allowed, or all refused for one reason.
func TestImports_BreachesAreFound(t *testing.T) {
	const inCore, inNode, inRole = "internal/core/sidecar/x.go", "internal/node/redirection/x.go", "internal/role/plugin/x.go"
	for _, tt := range []struct {
		file, imports string // "~" is this module
		why           string // "" when allowed; * is the ring of the import
	}{
		{inCore, "fmt net/netip net/url time ~/internal/core/ruleset", ""},
		{inCore, "log/slog net net/http os/exec syscall", "core is pure: no files, processes, network, log"},
		{inCore, "example.com/x k8s.io/api/core/v1", "core uses the standard library only"},
		{inCore, "~/internal/agent/repair ~/internal/applet ~/internal/kube ~/internal/node/netns ~/internal/role/plugin", "core never imports *"},
		{"internal/core/ruleset/x_test.go", "os/exec testing github.com/google/go-cmp/cmp ~/internal/core/ruleset/rulesettest", ""},
		{"internal/core/ruleset/x_test.go", "~/internal/node/iptables", "core never imports node"},
		{inNode, "os log/slog ~/internal/node/netns ~/internal/core/redirect golang.org/x/sys/unix", ""},
		{inNode, "~ ~/internal/agent ~/internal/applet ~/internal/kube ~/internal/role/plugin", "node never imports *"},
		{"internal/kube/x.go", "~/internal/node/hostfs", "kube never imports node"},
		{"internal/agent/install/x.go", "~/internal/agent/repair ~/internal/kube ~/internal/node/hostfs ~/internal/core/cniconf", ""},
		{"internal/agent/install/x.go", "~/internal/role/installer", "agent never imports role"},
		{inRole, "~/internal/role/plugin/relay ~/internal/applet ~/internal/agent/x ~/internal/kube ~/internal/node/x ~/internal/core/x", ""},
		{"internal/role/plugin/relay/x.go", "~/internal/role/plugin", ""},
		{inRole, "~/internal/role/pluginx ~/internal/role/redirector", "a role never imports a role; move what they share down"},
		{"internal/role/plugin/x_test.go", "~/internal/role/installer", "a role never imports a role; move what they share down"},
		{inRole, "~ ~/internal", "role never imports *"},
		{"main.go", "os ~/internal/applet ~/internal/role/plugin ~/internal/node/netns", ""},
		{"main.go", "github.com/urfave/cli/v2", "internal/role owns it"},
		{"internal/node/iptables/x.go", "github.com/coreos/go-iptables/iptables", ""},
		{"internal/node/iptablesx/x.go", "github.com/coreos/go-iptables", "internal/node/iptables owns it"},
		{inNode, "github.com/vishvananda/netns/x", "internal/node/netns owns it"},
		{inNode, "github.com/google/go-cmp/cmp", "it has no owner: give it one in internal/arch_test.go"},
		{inRole, "~/internal/core/ruleset/rulesettest ~/internal/node/netns/netnstest/x", "test support is for tests"},
		{inRole, "testing testing/fstest", "testing is for tests and test support"},
		{"internal/kube/kubetest/x.go", "testing github.com/vishvananda/netlink ~/internal/node/x/xtest ~/internal/role/plugin", ""},
		{"hack/demo/main.go", "github.com/vishvananda/netns ~/internal/node/netns/netnstest ~/internal/role/plugin", ""},
	} {
		imports := strings.Fields(strings.ReplaceAll(tt.imports, "~", module))
		var want []string
		for _, imported := range imports {
			if ring := ringOf(path.Clean(strings.TrimPrefix(strings.TrimPrefix(imported, module), "/"))); tt.why != "" {
				want = append(want, fmt.Sprintf("%s: imports %q: %s", tt.file, imported, strings.ReplaceAll(tt.why, "*", string(ring))))
			}
		}
		check.Diff(t, tt.file+": breaches", want, breaches(map[string]string{tt.file: source(imports)}))
	}
	got := breaches(map[string]string{"internal/util/x.go": source(nil), "pkg/api/x.go": source(nil), "internal/core/x/x.go": "nonsense"})
	if len(got) != 3 || !strings.HasPrefix(got[0], "internal/core/x/x.go: cannot be parsed: ") ||
		got[1] != "internal/util/x.go: internal/util is in no ring: give it one in internal/arch_test.go" ||
		got[2] != "pkg/api/x.go: pkg/api is in no ring: give it one in internal/arch_test.go" {
		t.Errorf("two files without a ring and a file that is not Go: %q", got)
	}
}

// source returns a file that no build includes, with renamed imports.
func source(imports []string) string {
	text := "//go:build never\n\npackage x\n\n"
	for i, name := range imports {
		text += fmt.Sprintf("import name%d %q\n", i, name)
	}
	return text
}
