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
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
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
	"internal/applet": ringApplet,
	"internal/core":   ringCore,
	"internal/node":   ringNode,
	"internal/kube":   ringKube,
	"internal/agent":  ringAgent,
	"internal/role":   ringRole,
}

// supportDirs are test support besides the directories whose name ends in
// "test".
var supportDirs = []string{"hack"}

// below lists what a ring may import of this module. Test support stands
// outside of the order: it may import everything, and only tests and other
// test support may import it. A role may import its own subpackages, which is
// said in mayImport.
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

// owners says who may import a module with effects: the directory and what is
// below it. The longest prefix of the import path decides. Tests are free.
var owners = map[string][]string{
	"github.com/containernetworking/cni": {"internal/role/plugin"},
	"github.com/coreos/go-iptables":      {"internal/node/iptables"},
	"github.com/fsnotify/fsnotify":       {"internal/node/hostfs"},
	"github.com/urfave/cli":              {"internal/role"},
	"github.com/vishvananda/netlink":     {"internal/node/route", "internal/node/selfcheck"},
	"github.com/vishvananda/netns":       {"internal/node/netns"},
	"golang.org/x/sys":                   {"internal/node"},
	"github.com/go-logr/logr":            {"internal/kube"},
	"golang.org/x/time/rate":             {"internal/agent", "internal/kube"},
	"k8s.io":                             {"internal/agent/selector", "internal/kube"},
	"k8s.io/apimachinery/pkg/types":      {"internal/agent", "internal/kube"},
	"k8s.io/apimachinery/pkg/util/wait":  {"internal/agent", "internal/kube"},
	"k8s.io/client-go/tools/clientcmd":   {"internal/agent/installation", "internal/kube"},
	"k8s.io/client-go/util/workqueue":    {"internal/agent"},
	"k8s.io/utils/clock":                 {"internal/agent"},
	"k8s.io/utils/lru":                   {"internal/agent/eventrecorder"},
	"sigs.k8s.io":                        {"internal/agent/selector", "internal/agent/taint"},
}

// impure lists the parts of the standard library that core does without.
// Packages below a listed one count too, except for pure ones.
var (
	impure = []string{"log", "net", "os", "plugin", "syscall"}
	pure   = []string{"net/netip", "net/url"}
)

// TestImportsGoDownOnly holds the tree to the tables.
func TestImportsGoDownOnly(t *testing.T) {
	files := readTree(t, os.DirFS(".."))
	if _, ok := files["internal/arch_test.go"]; !ok {
		t.Fatalf("this file is not among the %d files read: the walk does not see the tree", len(files))
	}
	for _, b := range breaches(files) {
		t.Error(b)
	}
}

// TestTheTablesHaveNoStaleRows holds the tables to the tree.
func TestTheTablesHaveNoStaleRows(t *testing.T) {
	for _, row := range stale(readTree(t, os.DirFS("..")), append(slices.Collect(maps.Keys(rings)), supportDirs...), owners) {
		t.Error(row)
	}
}

// stale returns one line for each row that no file needs: a directory without Go files, and an owner of a dependency that does
// not import it.
func stale(files map[string]string, dirs []string, owners map[string][]string) []string {
	var found []string
	names := slices.Collect(maps.Keys(files))
	for _, dir := range dirs {
		if !slices.ContainsFunc(names, func(name string) bool { return dir == "." || within(name, dir) }) {
			found = append(found, dir+" has no Go files: take it out of internal/arch_test.go")
		}
	}
	importing := importers(files, owners)
	for owner, dirs := range owners {
		for _, dir := range dirs {
			if !slices.ContainsFunc(importing[owner], func(importer string) bool { return within(importer, dir) }) {
				found = append(found, dir+" does not import "+owner+": take it out of its owners in internal/arch_test.go")
			}
		}
	}
	slices.Sort(found)
	return found
}

// importers are, by row of owners, the files that it is for: no tests, and no test support.
func importers(files map[string]string, owners map[string][]string) map[string][]string {
	found := map[string][]string{}
	for name, text := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
		if err != nil || strings.HasSuffix(name, "_test.go") || ringOf(path.Dir(name)) == ringSupport {
			continue
		}
		for _, spec := range file.Imports {
			imported, _ := strconv.Unquote(spec.Path.Value)
			owner := ownerOf(imported, owners)
			found[owner] = append(found[owner], name)
		}
	}
	return found
}

func TestStale(t *testing.T) {
	const lib = "example.com/lib"
	files := map[string]string{
		"main.go":                   source(nil),
		"internal/node/x/x.go":      source([]string{lib + "/part"}),
		"internal/role/x/x_test.go": source([]string{lib}),
		"internal/agent/xtest/x.go": source([]string{lib}),
		"internal/core/x/x.go":      source([]string{"example.com/library"}),
	}
	got := stale(files, []string{".", "internal/node", "internal/nod", "internal/gone", "hack"}, map[string][]string{
		lib:            {"internal/node/x", "internal/role", "internal/agent", "internal/core"},
		lib + "/other": {"internal/node"},
	})
	want := []string{
		"hack has no Go files: take it out of internal/arch_test.go",
		"internal/agent does not import example.com/lib: take it out of its owners in internal/arch_test.go",
		"internal/core does not import example.com/lib: take it out of its owners in internal/arch_test.go",
		"internal/gone has no Go files: take it out of internal/arch_test.go",
		"internal/nod has no Go files: take it out of internal/arch_test.go",
		"internal/node does not import example.com/lib/other: take it out of its owners in internal/arch_test.go",
		"internal/role does not import example.com/lib: take it out of its owners in internal/arch_test.go",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stale rows (-want +got):\n%s", diff)
	}
}

// readTree reads the Go files of a module, keyed by path. Modules inside of it
// and what the go command ignores are left out.
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
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func skipDir(tree fs.FS, name string) error {
	if name == "." {
		return nil
	}
	base := path.Base(name)
	if base == "testdata" || base == "vendor" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
		return fs.SkipDir
	}
	if _, err := fs.Stat(tree, path.Join(name, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

// breaches returns one line for each import that breaks a rule, ordered by
// file. It looks at the text alone, whatever the build constraints.
func breaches(files map[string]string) []string {
	var found []string
	for name, text := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
		if err != nil {
			found = append(found, fmt.Sprintf("%s: cannot be parsed: %v", name, err))
			continue
		}
		if ringOf(path.Dir(name)) == ringNone {
			found = append(found, fmt.Sprintf("%s: %s is in no ring: give it one in internal/arch_test.go", name, path.Dir(name)))
			continue
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				found = append(found, fmt.Sprintf("%s: cannot read import %s: %v", name, spec.Path.Value, err))
				continue
			}
			if why := breach(name, imported); why != "" {
				found = append(found, fmt.Sprintf("%s: imports %q: %s", name, imported, why))
			}
		}
	}
	slices.Sort(found)
	return found
}

// breach says why a file may not import a package, or nothing.
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

// mayImport judges an import inside the module; to is "" for its root.
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
	for _, p := range impure {
		if within(imported, p) {
			return "core is pure: no files, processes, network, log"
		}
	}
	return ""
}

func mayUseModule(dir, imported string) string {
	if ringOf(dir) == ringCore {
		return "core uses the standard library only"
	}
	owner := ownerOf(imported, owners)
	if owner == "" {
		return "it has no owner: give it one in internal/arch_test.go"
	}
	for _, d := range owners[owner] {
		if within(dir, d) {
			return ""
		}
	}
	return strings.Join(owners[owner], " and ") + " owns it"
}

// ownerOf is the row for an import: the one with the longest prefix, or nothing.
func ownerOf(imported string, owners map[string][]string) string {
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

// roleOf is the directory of the role that a directory is part of.
func roleOf(dir string) string {
	parts := strings.Split(dir, "/")
	return strings.Join(parts[:min(3, len(parts))], "/")
}

func isStandard(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".")
}

// within reports whether a path is the prefix or below it.
func within(name, prefix string) bool {
	return name == prefix || strings.HasPrefix(name, prefix+"/")
}

// TestBreaches shows each rule both broken and kept.
func TestBreaches(t *testing.T) {
	const own = module + "/internal/"
	tests := []struct {
		name    string
		file    string
		imports []string
		want    []string // what follows the file name; none when allowed
	}{
		{
			"core may use the pure part of the standard library",
			"internal/core/redirect/spec.go",
			[]string{"fmt", "net/netip", "net/url", "time", "encoding/json", own + "core/ruleset"},
			nil,
		},
		{
			"core never touches the machine",
			"internal/core/ruleset/x.go",
			[]string{"os", "os/exec", "log", "log/slog", "net", "net/http", "syscall"},
			[]string{
				`imports "log": core is pure: no files, processes, network, log`,
				`imports "log/slog": core is pure: no files, processes, network, log`,
				`imports "net": core is pure: no files, processes, network, log`,
				`imports "net/http": core is pure: no files, processes, network, log`,
				`imports "os": core is pure: no files, processes, network, log`,
				`imports "os/exec": core is pure: no files, processes, network, log`,
				`imports "syscall": core is pure: no files, processes, network, log`,
			},
		},
		{
			"core uses no other module, owned or not",
			"internal/core/sidecar/x.go",
			[]string{"k8s.io/api/core/v1", "example.com/x"},
			[]string{
				`imports "example.com/x": core uses the standard library only`,
				`imports "k8s.io/api/core/v1": core uses the standard library only`,
			},
		},
		{
			"core never looks up",
			"internal/core/sidecar/x.go",
			[]string{own + "node/netns", own + "kube", own + "agent/repair", own + "role/plugin", own + "applet"},
			[]string{
				`imports "` + own + `agent/repair": core never imports agent`,
				`imports "` + own + `applet": core never imports applet`,
				`imports "` + own + `kube": core never imports kube`,
				`imports "` + own + `node/netns": core never imports node`,
				`imports "` + own + `role/plugin": core never imports role`,
			},
		},
		{
			"tests in core may read files and use any module",
			"internal/core/ruleset/x_test.go",
			[]string{"os", "os/exec", "testing", "github.com/google/go-cmp/cmp", own + "core/ruleset/rulesettest"},
			nil,
		},
		{
			"tests in core keep to the rings",
			"internal/core/ruleset/x_test.go",
			[]string{own + "node/iptables"},
			[]string{`imports "` + own + `node/iptables": core never imports node`},
		},
		{
			"node builds on node and core",
			"internal/node/redirection/x.go",
			[]string{"os", "log/slog", own + "node/netns", own + "core/redirect", "golang.org/x/sys/unix"},
			nil,
		},
		{
			"node never looks sideways or up",
			"internal/node/redirection/x.go",
			[]string{own + "kube", own + "agent", own + "role/plugin", own + "applet", module},
			[]string{
				`imports "` + module + `": node never imports main`,
				`imports "` + own + `agent": node never imports agent`,
				`imports "` + own + `applet": node never imports applet`,
				`imports "` + own + `kube": node never imports kube`,
				`imports "` + own + `role/plugin": node never imports role`,
			},
		},
		{
			"kube converts for core",
			"internal/kube/pod.go",
			[]string{"k8s.io/client-go/rest", own + "core/sidecar"},
			nil,
		},
		{
			"kube never imports node",
			"internal/kube/x.go",
			[]string{own + "node/hostfs"},
			[]string{`imports "` + own + `node/hostfs": kube never imports node`},
		},
		{
			"the agent stands on kube, node and core",
			"internal/agent/install/x.go",
			[]string{own + "agent/repair", own + "kube", own + "node/hostfs", own + "core/cniconf"},
			nil,
		},
		{
			"the agent never imports a role",
			"internal/agent/install/x.go",
			[]string{own + "role/installer"},
			[]string{`imports "` + own + `role/installer": agent never imports role`},
		},
		{
			"a role may import everything below and its own parts",
			"internal/role/plugin/x.go",
			[]string{own + "role/plugin/relay", own + "applet", own + "agent/x", own + "kube", own + "node/netns", own + "core/sidecar"},
			nil,
		},
		{
			"a part of a role may import the role",
			"internal/role/plugin/relay/x.go",
			[]string{own + "role/plugin"},
			nil,
		},
		{
			"a role never imports a role",
			"internal/role/plugin/x.go",
			[]string{own + "role/redirector", own + "role/pluginx"},
			[]string{
				`imports "` + own + `role/pluginx": a role never imports a role; move what they share down`,
				`imports "` + own + `role/redirector": a role never imports a role; move what they share down`,
			},
		},
		{
			"a role's tests never import another role",
			"internal/role/plugin/x_test.go",
			[]string{own + "role/plugin", own + "role/installer"},
			[]string{`imports "` + own + `role/installer": a role never imports a role; move what they share down`},
		},
		{
			"a role never imports main",
			"internal/role/plugin/x.go",
			[]string{module},
			[]string{`imports "` + module + `": role never imports main`},
		},
		{
			"main wires every role",
			"main.go",
			[]string{"os", own + "applet", own + "role/plugin", own + "role/redirector", own + "node/netns"},
			nil,
		},
		{
			"main owns no dependency",
			"main.go",
			[]string{"github.com/urfave/cli/v2"},
			[]string{`imports "github.com/urfave/cli/v2": internal/role owns it`},
		},
		{
			"each dependency may be imported by its owner",
			"internal/node/iptables/x.go",
			[]string{"github.com/coreos/go-iptables/iptables"},
			nil,
		},
		{
			"any role may parse flags",
			"internal/role/redirector/flags.go",
			[]string{"github.com/urfave/cli/v2"},
			nil,
		},
		{
			"nobody else imports an owned dependency",
			"internal/node/redirection/x.go",
			[]string{
				"github.com/coreos/go-iptables/iptables", "github.com/vishvananda/netns",
				"github.com/vishvananda/netlink", "github.com/fsnotify/fsnotify", "k8s.io/api/core/v1", "sigs.k8s.io/yaml",
				"github.com/urfave/cli/v2", "github.com/containernetworking/cni/pkg/skel",
			},
			[]string{
				`imports "github.com/containernetworking/cni/pkg/skel": internal/role/plugin owns it`,
				`imports "github.com/coreos/go-iptables/iptables": internal/node/iptables owns it`,
				`imports "github.com/fsnotify/fsnotify": internal/node/hostfs owns it`,
				`imports "github.com/urfave/cli/v2": internal/role owns it`,
				`imports "github.com/vishvananda/netlink": internal/node/route and internal/node/selfcheck owns it`,
				`imports "github.com/vishvananda/netns": internal/node/netns owns it`,
				`imports "k8s.io/api/core/v1": internal/agent/selector and internal/kube owns it`,
				`imports "sigs.k8s.io/yaml": internal/agent/selector and internal/agent/taint owns it`,
			},
		},
		{
			"a name that only begins like an owner's is not the owner",
			"internal/node/iptablesx/x.go",
			[]string{"github.com/coreos/go-iptables/iptables"},
			[]string{`imports "github.com/coreos/go-iptables/iptables": internal/node/iptables owns it`},
		},
		{
			"a dependency without an owner is reported",
			"internal/node/route/x.go",
			[]string{"github.com/google/go-cmp/cmp"},
			[]string{`imports "github.com/google/go-cmp/cmp": it has no owner: give it one in internal/arch_test.go`},
		},
		{
			"code never imports test support or testing",
			"internal/role/plugin/x.go",
			[]string{"testing", "testing/fstest", own + "core/ruleset/rulesettest", own + "node/netns/netnstest", own + "node/netns/netnstest/x"},
			[]string{
				`imports "` + own + `core/ruleset/rulesettest": test support is for tests`,
				`imports "` + own + `node/netns/netnstest": test support is for tests`,
				`imports "` + own + `node/netns/netnstest/x": test support is for tests`,
				`imports "testing": testing is for tests and test support`,
				`imports "testing/fstest": testing is for tests and test support`,
			},
		},
		{
			"main never imports test support",
			"main.go",
			[]string{own + "node/netns/netnstest"},
			[]string{`imports "` + own + `node/netns/netnstest": test support is for tests`},
		},
		{
			"test support may import whatever it drives",
			"internal/kube/kubetest/x.go",
			[]string{"testing", "os/exec", "github.com/vishvananda/netlink", own + "node/netns/netnstest", own + "role/plugin", own + "core/redirect"},
			nil,
		},
		{
			"the demo may import whatever it shows",
			"hack/demo/main.go",
			[]string{"os/exec", "github.com/vishvananda/netns", own + "node/netns/netnstest", own + "role/plugin"},
			nil,
		},
		{
			"a package without a place is reported",
			"internal/util/x.go",
			nil,
			[]string{"internal/util is in no ring: give it one in internal/arch_test.go"},
		},
		{
			"a package outside of internal is reported",
			"pkg/api/x.go",
			nil,
			[]string{"pkg/api is in no ring: give it one in internal/arch_test.go"},
		},
		{
			"nobody imports the top of internal",
			"internal/role/plugin/x.go",
			[]string{module + "/internal"},
			[]string{`imports "` + module + `/internal": role never imports internal`},
		},
		{
			"a build constraint or another name hides no import",
			"internal/core/ruleset/x_windows.go",
			[]string{"os"},
			[]string{`imports "os": core is pure: no files, processes, network, log`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var want []string
			for _, w := range tt.want {
				want = append(want, tt.file+": "+w)
			}
			got := breaches(map[string]string{tt.file: source(tt.imports)})
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("breaches (-want +got):\n%s", diff)
			}
		})
	}
}

// source is a file that nothing builds and whose imports have other names.
func source(imports []string) string {
	var b strings.Builder
	b.WriteString("//go:build never\n\npackage x\n\nimport (\n")
	for i, name := range imports {
		fmt.Fprintf(&b, "\tname%d %q\n", i, name)
	}
	b.WriteString(")\n")
	return b.String()
}

func TestBreachesReportAFileThatIsNotGo(t *testing.T) {
	got := breaches(map[string]string{"internal/core/x/x.go": "nonsense"})
	if len(got) != 1 || !strings.HasPrefix(got[0], "internal/core/x/x.go: cannot be parsed: ") {
		t.Errorf("got %q, want one line about the file that cannot be parsed", got)
	}
}

func TestReadTreeSeesTheModuleAndNothingElse(t *testing.T) {
	tree := fstest.MapFS{}
	for _, name := range []string{
		"main.go", "internal/core/x/x.go", "internal/core/x/x_test.go", "internal/README.md",
		"internal/core/x/testdata/x.go", "vendor/x/x.go", ".git/x.go", "_old/x.go",
		"hack/tools/go.mod", "hack/tools/tools.go", "go.mod",
	} {
		tree[name] = &fstest.MapFile{Data: []byte(name)}
	}
	want := map[string]string{}
	for _, name := range []string{"main.go", "internal/core/x/x.go", "internal/core/x/x_test.go"} {
		want[name] = name
	}
	if diff := cmp.Diff(want, readTree(t, tree)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}
