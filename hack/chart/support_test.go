package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

const (
	top      = "../.."
	chartDir = top + "/manifests/istio-cni"
)

// tools are the programs that the tests run, built once.
var tools struct {
	sync.Mutex
	dir   string
	built map[string]string
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "chart")
	if err != nil {
		panic(err)
	}
	tools.dir, tools.built = dir, map[string]string{}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// tool builds a program of another module of this repository and returns its path.
func tool(t *testing.T, name, dir string, args ...string) string {
	t.Helper()
	tools.Lock()
	defer tools.Unlock()
	if path, ok := tools.built[name]; ok {
		return path
	}
	path := filepath.Join(tools.dir, name)
	args = slices.Concat([]string{"build", "-buildvcs=false", "-o", path}, args, []string{"."})
	build := exec.CommandContext(context.WithoutCancel(t.Context()), "go", args...)
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", name, err, text)
	}
	tools.built[name] = path
	return path
}

// product returns the path of istio-cni: ISTIO_CNI, or a build of this tree.
func product(t *testing.T) string {
	t.Helper()
	if ready := os.Getenv("ISTIO_CNI"); ready != "" {
		return ready
	}
	return tool(t, "istio-cni", top, "-tags", "urfave_cli_no_docs")
}

// output runs a program with only PATH and env as environment, and returns its output and exit code.
func output(t *testing.T, env []string, stdin []byte, name string, args ...string) (text string, code int) {
	t.Helper()
	command := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...)
	command.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	command.Stdin = bytes.NewReader(stdin)
	out, err := command.CombinedOutput()
	if err != nil && command.ProcessState == nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	return string(out), command.ProcessState.ExitCode()
}

var loaded = sync.OnceValues(func() (*chart.Chart, error) { return loader.LoadDir(chartDir) })

func theChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loaded()
	noError(t, err)
	return c
}

func values(t *testing.T, texts ...string) map[string]any {
	t.Helper()
	all, err := parseValues(texts...)
	noError(t, err)
	return all
}

// rendered caches renderings by their values: many tests share one, and none changes it.
var rendered sync.Map

type outcome struct {
	rendering
	err error
}

// tryRender renders the chart with values in YAML; later texts override earlier ones.
func tryRender(t *testing.T, texts ...string) (rendering, error) {
	t.Helper()
	key := strings.Join(texts, "\n---\n")
	if known, ok := rendered.Load(key); ok {
		return known.(outcome).rendering, known.(outcome).err
	}
	r, err := render(theChart(t), defaultRelease(), values(t, texts...))
	rendered.Store(key, outcome{r, err})
	return r, err
}

func mustRender(t *testing.T, texts ...string) rendering {
	t.Helper()
	r, err := tryRender(t, texts...)
	if err != nil {
		t.Fatalf("values %q: %v", texts, err)
	}
	return r
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// equal compares two values; the subject names them.
func equal[T comparable](t *testing.T, have, want T, subject ...any) {
	t.Helper()
	if have != want {
		t.Errorf("%sgot %v, want %v", fmt.Sprintln(subject...), have, want)
	}
}

// contains checks that a text has some parts.
func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in\n%.10000s", part, text)
		}
	}
}

// mustRefuse checks that values are rejected with an error that contains words.
func mustRefuse(t *testing.T, words string, texts ...string) {
	t.Helper()
	_, err := tryRender(t, texts...)
	switch {
	case err == nil:
		t.Errorf("values %q were rendered, want an error with %q", texts, words)
	case !strings.Contains(err.Error(), words):
		t.Errorf("values %q: error %q, want one with %q", texts, err, words)
	}
}

// ids returns kind/namespace/name of all objects.
func (r rendering) ids() []string {
	var out []string
	for _, o := range r.Objects {
		out = append(out, o.id())
	}
	return out
}

func (o object) id() string { return o.Kind + "/" + o.Namespace + "/" + o.Name }

func (r rendering) has(id string) bool { return slices.Contains(r.ids(), id) }

// get decodes one object into its type.
func get[T any](t *testing.T, r rendering, id string) T {
	t.Helper()
	var out T
	at := slices.Index(r.ids(), id)
	if at < 0 {
		t.Fatalf("no %s among %q", id, r.ids())
	}
	if err := yaml.UnmarshalStrict([]byte(r.Objects[at].Text), &out); err != nil {
		t.Fatalf("%s: %v\n%s", id, err, r.Objects[at].Text)
	}
	return out
}

// name returns a name of an agent's objects, or that of an observer's if there is one.
func (r rendering) name(ofAgent string) string {
	if r.has("DaemonSet/istio-system/istio-cni-observer") {
		return "istio-cni-observer"
	}
	return ofAgent
}

func (r rendering) hasAgent() bool {
	return r.has("DaemonSet/istio-system/" + r.name("istio-cni-node"))
}

func agent(t *testing.T, r rendering) appsv1.DaemonSet {
	t.Helper()
	return get[appsv1.DaemonSet](t, r, "DaemonSet/istio-system/"+r.name("istio-cni-node"))
}

func agentConfig(t *testing.T, r rendering) map[string]string {
	t.Helper()
	return get[corev1.ConfigMap](t, r, "ConfigMap/istio-system/"+r.name("istio-cni")+"-config").Data
}

func tainter(t *testing.T, r rendering) appsv1.Deployment {
	t.Helper()
	return get[appsv1.Deployment](t, r, "Deployment/istio-system/istio-cni-taint")
}

// rules returns the rules of a Role or ClusterRole, one text per permission: VERB GROUP/RESOURCE or VERB
// GROUP/RESOURCE:NAME.
func rules(t *testing.T, r rendering, id string) []string {
	t.Helper()
	return verbs(get[rbacv1.Role](t, r, id).Rules)
}

func verbs(rules []rbacv1.PolicyRule) []string {
	var out []string
	for _, rule := range rules {
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					for _, name := range names {
						out = append(out, strings.TrimSuffix(verb+" "+group+"/"+resource+":"+name, ":"))
					}
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// ignoredValues matches the annotation with the values that have no effect.
var ignoredValues = regexp.MustCompile(`\n  annotations:\n    cni\.meshcni\.io/ignored-values: .*`)

// said is that annotation's value, "" without an agent; unsaid is the rendering without it.
func said(t *testing.T, r rendering) string {
	t.Helper()
	if !r.hasAgent() {
		return ""
	}
	return agent(t, r).Annotations["cni.meshcni.io/ignored-values"]
}

func unsaid(r rendering) string { return string(ignoredValues.ReplaceAll(r.text(), nil)) }
