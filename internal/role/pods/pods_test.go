package pods_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/role/pods"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = pods.Run(applet.Call{Args: args, Stdout: &out, Stderr: &errs, Getenv: func(string) (string, bool) { return "", false }})
	return code, out.String(), errs.String()
}

const some = `[{"namespace":"shop","pod":"a","state":"captured","sentence":"is fine"},{"namespace":"shop","pod":"b","state":"drifted"},
{"namespace":"other","pod":"c","state":"bypassed"},{"namespace":"shop","pod":"d","state":"outside"}]`

// TestPods_Selection: a pod with a name is listed in any state, and a missing one is an error.
func TestPods_Selection(t *testing.T) {
	t.Parallel()
	socket := agenttest.Answer(t, http.StatusOK, some)
	for args, want := range map[string]struct {
		code         int
		pods, stderr string
	}{
		"":                         {3, "a b c", ""},
		"--bypassing":              {3, "b c", ""},
		"-n shop":                  {3, "a b", ""},
		"--state captured":         {0, "a", ""},
		"--state captured,drifted": {3, "a b", ""},
		"-n nowhere":               {1, "", "error: namespace \"nowhere\" has no pod"},
		"--all":                    {3, "a b c d", ""},
		"--state outside":          {0, "d", ""},
		"d":                        {0, "d", ""},
		"pod/c shop/a":             {3, "a c", ""},
		"a -A":                     {0, "a", ""},
		"a nobody":                 {1, "a", "error: no pod \"nobody\" with a network of its own on this node\n"},
		"-n other a":               {1, "", "error: no pod \"other/a\" with a network"},
	} {
		code, out, errs := run(append(strings.Fields(args), socket, "-o", "json")...)
		documenttest.Valid(t, "PodList", out)
		var all document.PodList
		check.OK(t, json.Unmarshal([]byte(out), &all))
		check.Equal(t, all.Omitted, 4-len(all.Items), args)
		var names []string
		for _, s := range all.Items {
			names = append(names, s.Pod)
		}
		if got := strings.Join(names, " "); got != want.pods || code != want.code || !strings.HasPrefix(errs, want.stderr) || want.stderr == "" && errs != "" {
			t.Errorf("%q: exit code %d, pods %q, stderr %q, want %+v", args, code, got, errs, want)
		}
	}
}

// TestPods_NoneListed: a missing namespace is an error, a node without pods of the mesh is not.
func TestPods_NoneListed(t *testing.T) {
	t.Parallel()
	const outside = `[{"namespace":"shop","pod":"d","state":"outside"}]`
	for name, test := range map[string]struct {
		body, args string
		code       int
		stderr     string
	}{
		"a namespace without a pod":  {some, "-n nowhere", 1, "error: namespace \"nowhere\" has no pod with a network of its own on this node\n"},
		"on a node without any":      {`[]`, "-n shop", 1, "error: namespace \"shop\" has no pod with a network of its own on this node\n"},
		"a namespace without others": {outside, "-n shop", 0, "no pod of the mesh on this node, in namespace \"shop\"\n"},
		"a node without pods":        {`[]`, "-o table", 0, "no pod of the mesh on this node\n"},
		"a node without others":      {outside, "", 0, "no pod of the mesh on this node\n"},
		"no such state":              {some, "--state=no-listener", 0, "no pod in such a state on this node\n"},
	} {
		code, out, errs := run(append(strings.Fields(test.args), agenttest.Answer(t, http.StatusOK, test.body))...)
		if code != test.code || out != "" || errs != test.stderr {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q", name, code, out, errs)
		}
	}
}

func TestPods_BadInput(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		status     int
		body, args string
		code       int
		stderr     string
	}{
		"a state":         {200, some, "--state=sad", 2, `--state`},
		"a form":          {200, some, "-o xml", 2, `want one of table, json, yaml`},
		"an operand":      {200, some, "shop/web/a", 2, `pod "shop/web/a": want NAMESPACE/NAME`},
		"a workload":      {200, some, "deploy/web -n shop", 2, "a node agent knows pods only, kubectl istio-cni finds"},
		"a selector":      {400, "selector \"=\": x", "-l =", 2, "error: selector \"=\": x; see istio-cni pods --help\n"},
		"two namespaces":  {200, some, "-nshop -Aw=0", 2, "contradict"},
		"half a name":     {200, some, "a other/ -n other", 2, `pod "other/"`},
		"a watch as JSON": {200, some, "-w -o json", 2, "--watch prints a table only"},
		"no audit":        {404, "404 page not found", "", 1, "(the node agent is of a version without the audit)"},
		"not JSON":        {200, "<html>", "", 1, "asking the node agent for the state of its pods: invalid character '<'"},
		"other types":     {200, `{"pods":[]}`, "", 1, "asking the node agent for the state of its pods: json: cannot unmarshal object"},
		"other fields":    {200, `[{"name":"a","status":"captured"}]`, "", 1, "the node agent is of another version"},
		"a cut answer":    {200, `[{"pod":"a"`, "", 1, "unexpected end of JSON input"},
		"a hostile error": {500, "\x1b[2J", "", 1, "500"},
	} {
		code, out, errs := run(append(strings.Fields(test.args), agenttest.Answer(t, test.status, test.body))...)
		if code != test.code || out != "" || !strings.Contains(errs, test.stderr) || strings.Contains(errs, "\x1b") {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q", name, code, out, errs)
		}
	}
	if code, _, errs := run("--socket=/nowhere/pods.sock"); code != 1 || !strings.Contains(errs, "is the node agent running") {
		t.Errorf("no agent: exit code %d, stderr %q", code, errs)
	}
}

// TestTable_Hostile: a pod's text reaches the terminal only escaped, and the last line counts the listed pods.
func TestTable_Hostile(t *testing.T) {
	t.Parallel()
	socket := agenttest.Answer(t, http.StatusOK, `[{"namespace":"shop","pod":"a\n","state":"drifted","problems":[{"detail":"a\u001b[2J\u202e\nb"}]}]`)
	for args, count := range map[string]string{"-o table": "1 of 1 mesh pods", "--bypassing": "1 of 1 listed mesh pods"} {
		code, out, errs := run(append(strings.Fields(args), socket)...)
		if code != 3 || strings.Count(out, "\n") != 3 || errs != "" || !strings.HasSuffix(out, "\n"+count+" is not redirected as wanted\n") ||
			strings.ContainsFunc(out, func(r rune) bool { return !printable.Is(r) && r != '\n' }) {
			t.Errorf("%s: exit code %d, %q, %q", args, code, out, errs)
		}
	}
}

// TestPods_LeftOut: pods that a check left out are counted and named, if the flags select them, and make the exit code 1.
func TestPods_LeftOut(t *testing.T) {
	t.Parallel()
	var many []string
	for i := range 3000 {
		many = append(many, fmt.Sprintf(`{"namespace":"shop","pod":"p%04d","state":"captured","leftOut":%t}`, i, i >= 100))
	}
	socket := agenttest.Answer(t, http.StatusOK, "["+strings.Join(many, ",")+`,{"namespace":"other","pod":"x","state":"captured"}]`)
	code, out, errs := run("--check", "-o", "json", socket)
	const text = "error: --check left out 2900 of 3001 pods, which are listed with older results: shop/p0100, shop/p0101, "
	if code != 1 || !strings.HasPrefix(errs, text) || len(errs) > 400 || !strings.Contains(errs, ", and 2890 more; ") || strings.Count(out, `"leftOut": true`) != 2900 {
		t.Errorf("exit code %d, stderr %q, stdout of %d bytes", code, errs, len(out))
	}
	if code, _, errs = run("--check", "-n", "other", socket); code != 0 || errs != "" {
		t.Errorf("another namespace: exit code %d, stderr %q", code, errs)
	}
}

// TestPods_Watch: a watch ends with Ctrl-C, after the table.
func TestPods_Watch(t *testing.T) {
	stdout := check.Output{First: func() { _ = syscall.Kill(os.Getpid(), syscall.SIGINT) }}
	var stderr bytes.Buffer
	code := pods.Run(applet.Call{
		Args: []string{"-w", "a", agenttest.Answer(t, http.StatusOK, some)}, Stdout: &stdout, Stderr: &stderr,
		Getenv: func(string) (string, bool) { return "", false },
	})
	if out := stdout.String(); code != 0 || !strings.HasSuffix(out, "\n0 of 1 mesh pods are not redirected as wanted\n") || stderr.String() != "" {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, stderr.String())
	}
}
