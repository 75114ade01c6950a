package fleet_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/archive/archivetest"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/role/fleet"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// answer is the stand-in's reaction to arguments that contain For, joined by spaces.
type answer struct {
	For, Out, Err string
	Code          int
	// Hang makes it wait until it is killed, Repeat is the number of additional copies of Out.
	Hang   bool
	Repeat int
}

// standIn writes a program that answers like kubectl, and adds faults that the real one, which e2e/fleet runs, cannot be made to
// have. Each running process has a file beside it.
func standIn(t *testing.T, answers []answer) (program string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		name = filepath.Join(dir, name)
		syscall.ForkLock.RLock() // else a command of another test holds the file open, and it cannot run: "text file busy"
		defer syscall.ForkLock.RUnlock()
		check.OK(t, os.WriteFile(name, []byte(text), mode))
		return name
	}
	check.OK(t, os.Mkdir(filepath.Join(dir, "running"), 0o700))
	var b strings.Builder
	fmt.Fprintf(&b, `#!/bin/sh
cd %s || exit
: >running/$$
trap 'rm running/$$' EXIT
set -- "$*" running/*
[ $# -le 12 ] || echo $# >too-many # the arguments, 10 commands in agents, and a list of nodes
case $1 in
`, dir)
	for i, a := range answers {
		out, stderr := write(fmt.Sprint("out-", i), a.Out, 0o600), write(fmt.Sprint("err-", i), a.Err, 0o600)
		fmt.Fprintf(&b, "*'%s'*)\n", a.For)
		fmt.Fprintf(&b, "  for i in $(seq 0 %d); do cat %s || exit 1; done\n  cat %s >&2\n", a.Repeat, out, stderr)
		if a.Hang {
			b.WriteString("  exec sleep 1000\n")
		}
		fmt.Fprintf(&b, "  exit %d;;\n", a.Code)
	}
	b.WriteString(`*) echo "error: the stand-in has no answer for $1" >&2; exit 1;;
esac
`)
	return write("kubectl", b.String(), 0o700)
}

// fleetOf returns answers for running agents of nodes n1, n2 and so on, after the given answers.
func fleetOf(nodes int, answers ...answer) []answer {
	var items, names []string
	for i := range nodes {
		items = append(items, agentPod(fmt.Sprintf("agent-%d", i+1), fmt.Sprintf("n%d", i+1), "Running"))
		names = append(names, fmt.Sprintf("node/n%d\n", i+1))
	}
	return append(answers,
		daemonSets("istio-system"),
		answer{For: "get -o json pods -n istio-system -l k8s-app in (istio-cni-node, istio-cni-observer)", Out: list(items...)},
		answer{For: "get nodes", Out: strings.Join(names, "")},
	)
}

// daemonSets returns DaemonSets with the agents' label, one in each namespace.
func daemonSets(namespaces ...string) answer {
	var items []string
	for _, namespace := range namespaces {
		items = append(items, fmt.Sprintf(`{"metadata":{"namespace":%q,"name":"istio-cni-node","uid":"uid-of-%[1]s"}}`, namespace))
	}
	return answer{For: "get -o json daemonsets.apps --all-namespaces -l k8s-app in (istio-cni-node, istio-cni-observer)", Out: list(items...)}
}

func list(items ...string) string { return `{"items":[` + strings.Join(items, ",") + `]}` }

func agentPod(name, node, phase string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"istio-system","name":%q,"ownerReferences":[{"uid":"uid-of-istio-system","controller":true}]},`+
		`"spec":{"nodeName":%q},"status":{"phase":%q}}`, name, node, phase)
}

// of returns an agent's answer to a command.
func of(agent int, command, out string) answer {
	return answer{For: fmt.Sprintf("exec -n istio-system pod/agent-%d -c install-cni -- istio-cni %s", agent, command), Out: out}
}

// pod returns a pod in an agent's answer.
func pod(name string, state audit.State) string {
	return fmt.Sprintf(`{"namespace":"shop","pod":%q,"state":%q,"sentence":"is so","future":{"x":1}}`, name, state)
}

// items returns an agent's list.
func items(kind string, all ...string) string {
	return fmt.Sprintf(`{"apiVersion":"cni.meshcni.io/v1","kind":%q,"time":"2026-11-22T12:00:00Z","omitted":2,"items":[%s]}`, kind, strings.Join(all, ","))
}

type result struct {
	code           int
	stdout, stderr string
}

func run(t *testing.T, answers []answer, args ...string) result {
	t.Helper()
	return call(standIn(t, answers), nil, args...)
}

// call runs the plugin, with a terminal if progress is not nil.
func call(kubectl string, progress io.Writer, args ...string) result {
	var stdout bytes.Buffer
	r := callInto(&stdout, kubectl, progress, args...)
	r.stdout = stdout.String()
	return r
}

func callInto(stdout io.Writer, kubectl string, progress io.Writer, args ...string) (r result) {
	var stderr bytes.Buffer
	columns := 0
	if progress != nil {
		columns = 80
	}
	r.code = fleet.Run(applet.Call{
		Args: args, Stdout: stdout, Stderr: &stderr, Terminal: func() int { return columns },
		Getenv: func(name string) (string, bool) { return kubectl, name == "KUBECTL" },
	}, progress)
	r.stderr = stderr.String()
	return r
}

func (r result) want(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || !strings.Contains(r.stdout, stdout) || !strings.Contains(r.stderr, stderr) {
		t.Errorf("exit code %d, want %d; stdout, want %q:\n%s\nstderr, want %q:\n%s", r.code, code, stdout, r.stdout, stderr, r.stderr)
	}
}

func TestPods_AllNodes(t *testing.T) {
	t.Parallel()
	answers := fleetOf(3,
		of(1, "pods -o json", items("PodList", pod("a", audit.Captured))),
		answer{For: of(2, "pods -o json", "").For, Out: "[" + pod("b", audit.Bypassed) + "," + pod("c", audit.Captured) + "]", Code: 3, Err: "command terminated with exit code 3\n"},
		of(3, "pods -o json", items("PodList")),
	)
	kubectl := standIn(t, answers)
	r := call(kubectl, nil, "pods")
	r.want(t, 3, `NODE  POD     STATE     SINCE  CHECKED  BACKEND  WHY
n2    shop/b  bypassed  -      -        -        is so
n1    shop/a  captured  -      -        -        is so
n2    shop/c  captured  -      -        -        is so
1 of 3 mesh pods is not redirected as wanted
`, "")
	check.Equal(t, r.stderr, "", "stderr")
	// Fields of a newer agent remain. The second agent is older than the documents.
	call(kubectl, nil, "pods", "-ojson").want(t, 3, `Z",
  "omitted": 4,
  "nodes": [
    {
      "name": "n1",
      "agent": "istio-system/agent-1"
    },
`, "")
	call(kubectl, nil, "pods", "-A", "--output=yaml", "--node", "n1").want(t, 0, `items:
- future:
    x: 1
  namespace: shop
  node: n1
  pod: a
`, "")
	call(kubectl, nil, "pods", "--node=n3").want(t, 0, "", "no pod of the mesh on the nodes that answered\n")
	call(kubectl, nil, "pods", "--node=n4").want(t, 1, "", "node n4: no answer: it has no node agent\n")
}

// TestRun_Flags: kubectl's flags reach kubectl, the command's flags reach the agents.
func TestRun_Flags(t *testing.T) {
	t.Parallel()
	run(t, []answer{
		{For: "--context=east --as=me --insecure-skip-tls-verify get -o json daemonsets.apps -n istio-system -l a=b", Out: daemonSets("istio-system").Out},
		{For: "--context=east --as=me --insecure-skip-tls-verify get -o json pods -n istio-system -l a=b", Out: list(agentPod("x", "n1", "Running"))},
		{For: "--context=east --as=me --insecure-skip-tls-verify exec -n istio-system pod/x -c agent -- istio-cni pods -o json --namespace=shop --state=drifted", Out: "[" + pod("a", audit.Drifted) + "]", Code: 3},
	}, "pods", "--context", "east", "--as=me", "--insecure-skip-tls-verify", "--agent-selector=a=b", "--agent-namespace", "istio-system", "--agent-container=agent",
		"--ignore-nodes-without-agent", "--state", "drifted", "-n", "shop", "-o", "table").want(t, 3, "shop/a", "")
}

// other is the beginning of the error of an agent with another version.
var other = "its agent is of another version than kubectl-istio_cni (" + applet.Version() + "), upgrade the older one: "

func TestPods_NodesThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	const commands = "istio-cni redirects the traffic.\nversion v0.0.9, go1.26 linux/amd64\nCNI versions: 1.0.0\n\nCommands:\n"
	items := []string{
		agentPod("agent-1", "n1", "Running"), agentPod("agent-2", "n2", "Running"), agentPod("agent-3", "n3", "Running"),
		agentPod("agent-4", "n4", "Running"), agentPod("agent-5", "n5", "Running"), agentPod("agent-6", "n6", "Running"),
		agentPod("agent-7", "n7", "Running"), agentPod("agent-8", "n8", "Pending"), agentPod("agent-9", "", "Pending"),
		strings.Replace(agentPod("agent-old", "n1", "Running"), `"name"`, `"deletionTimestamp":"2026-11-22T12:00:00Z","name"`, 1),
		agentPod("agent-evicted", "n1", "Failed"), agentPod("agent-10", "n10", "Running"), agentPod("agent-11", "n11", "Running"),
		agentPod("agent-12", "n12", "Running"), agentPod("agent-13", "n13", "Running"),
	}
	exec := func(agent int) string { return of(agent, "pods", "").For }
	r := run(t, []answer{
		daemonSets("istio-system"),
		{For: "get -o json pods", Out: list(items...)},
		{For: "get nodes", Out: "node/n1\nnode/alone\n"},
		of(1, "pods -o json", "["+pod("a", audit.Captured)+"]"),
		{For: exec(2), Hang: true},
		{For: exec(3), Code: 2, Err: "istio-cni: unknown command \"pods\"\n\n" + commands + "command terminated with exit code 2\n"},
		{For: exec(4), Code: 126, Err: `error: exec: "istio-cni": executable file not found in $PATH: unknown` + "\n"},
		{For: exec(5), Code: 1, Err: "Warning: noise\nError from server (Forbidden): pods \"agent-5\" is forbidden\n"},
		{For: exec(6), Out: "Welcome\n[]"},
		{For: exec(7), Out: `[{"name":"a","status":"captured"}]`},
		{For: exec(12), Out: `{"apiVersion":"cni.meshcni.io/v2\n","kind":"PodList","items":[]}`},
		of(12, "version", "istio-cni version v9.0.0, go9\n"),
		{For: exec(13), Out: `{"apiVersion":"cni.meshcni.io/v1","kind":"PodList"}`},
		{For: exec(10), Out: strings.Repeat("[", 1<<20), Repeat: 8},
		{For: exec(11), Code: 1, Err: strings.Repeat(strings.Repeat("n", 100)+"\n", 10_000) + "error: the last line\n"},
	}, "pods", "--timeout=8s")
	r.want(t, 1, "n1    shop/a  captured", `node n10: no answer: more than 8 MiB of output
node n11: no answer: `)
	check.Contains(t, r.stderr,
		"node n2: no answer: no answer within 8s\n",
		"node n3: no answer: "+other+"it has no command pods\n",
		"node n4: no answer: its agent has no program istio-cni, it is no agent of this project or an old one; see --agent-selector: exec: \"istio-cni\": executable",
		"node n5: no answer: Warning: noise; Error from server (Forbidden): pods \"agent-5\" is forbidden\n",
		"node n6: no answer: "+other+"reading its answer: invalid character 'W'",
		"node n7: no answer: "+other+`reading its answer: fields are missing: {"name":"a","status":"captured"}`,
		"node n12: no answer: "+other+`reading its answer: its apiVersion is "cni.meshcni.io/v2\n"; the agent is istio-cni version v9.0.0, go9`+"\n",
		"node n13: no answer: "+other+"reading its answer: it has no array of items\n",
		"node n8: no answer: the agent's pod is Pending\n",
		"node of pod istio-system/agent-9: no answer: the agent's pod is Pending\n",
		"error: nodes without a node agent, whose pods are not seen: alone; --ignore-nodes-without-agent accepts that\n")
	if n := strings.Count(r.stderr, "\n"); n != 13 || strings.Contains(r.stderr, "n1:") || len(r.stderr) > 10_000 {
		t.Errorf("%d lines, %d bytes:\n%s", n, len(r.stderr), r.stderr)
	}
}

// hostile is a text that must not reach a terminal unescaped.
const hostile = "a\x1b[2J\u009b2J\x7f\u202e\rb"

func TestRun_NothingUnprintable(t *testing.T) {
	t.Parallel()
	quoted, err := json.Marshal(hostile)
	check.OK(t, err)
	items := strings.ReplaceAll(list(agentPod("agent-1", "NODE", "Running"), agentPod("agent-2", "../NODE", "Running")), `NODE"`, string(quoted[1:]))
	row := `[{"namespace":"shop","pod":NAME,"state":NAME,"name":NAME,"result":"fail","text":NAME,"remedy":NAME,"reason":NAME,"problems":[{"detail":NAME}]}]`
	answers := []answer{
		daemonSets("istio-system"),
		{For: "get -o json pods", Out: items},
		{For: "get -o json pod ", Out: `{"metadata":{"namespace":"shop","name":` + string(quoted) + `},"spec":{"nodeName":` + string(quoted) + `}}`},
		{For: "get nodes", Out: "node/" + hostile + "2\n"},
		{For: "agent-2 -c install-cni -- istio-cni bundle", Out: nodeFile(t, map[string]string{"../../x/" + hostile: "y"})},
		{For: "agent-2", Code: 1, Err: hostile},
		{For: "istio-cni why", Out: hostile + "\n", Err: hostile},
		{For: "istio-cni bundle", Code: 1, Err: hostile},
		{For: "port-forward", Out: "Forwarding from " + hostile + " -> 1\n", Err: hostile},
		{For: "istio-cni ", Out: strings.ReplaceAll(row, "NAME", string(quoted))},
	}
	for _, args := range []string{"pods", "pods -o json", "decisions", "decisions -o yaml", "doctor", "doctor -o json", "why shop/x", "dashboard", "bundle", "bundle shop/x"} {
		r := run(t, answers, strings.Fields(args)...)
		outputs := []string{r.stderr}
		if !strings.HasPrefix(args, "bundle") {
			outputs = append(outputs, r.stdout)
		} else {
			_, names := archivetest.Unpack(t, strings.NewReader(r.stdout))
			outputs = append(outputs, names...)
		}
		for _, text := range outputs {
			if strings.ContainsFunc(text, func(r rune) bool { return !printable.Is(r) && r != '\n' }) {
				t.Errorf("%s: %q", args, text)
			}
		}
		check.Contains(t, r.stdout+r.stderr, `a\u001b[2J`)
	}
}

func TestRun_BadArguments(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"dance":                      `unknown command "dance"; see`,
		"pod":                        `unknown command "pod": did you mean "pods"?`,
		"-n shop wyh x":              `unknown command "wyh": did you mean "why"?`,
		"pods -o xml":                `flag -o: value "xml": want one of table, json, yaml`,
		"pods --namespce=x --state=": `unknown flag --namespce: did you mean "--namespace"?`,
		"pods --dance --state sad":   "error: unknown flag --dance\nerror: flag --state: value \"sad\": item \"sad\": want one of ",
		"pods -w -o json":            "--watch prints a table only",
		"pods shop/deploy/a x":       "name shop/deploy/a alone",
		"pods a/b/c":                 `pod "a/b/c": want NAMESPACE/NAME`,
		"decisions x":                `stray argument "x"`,
		"why":                        "name one pod: ",
		"why a/b c":                  `stray argument "c"`,
		"why a/b -n c":               `pod "a/b" and --namespace c contradict each other`,
		"why a/b --pid 1":            "flag --pid: value \"1\": only istio-cni on a node has this flag",
		"dashboard -n shop":          "--namespace without the name of a pod",
		"bundle -n shop":             "--namespace without the name of a pod",
		"completion tcsh":            "want one shell of bash, zsh, fish",
	} {
		run(t, nil, strings.Fields(args)...).want(t, 2, "", want)
	}
	for args, want := range map[string]string{
		"dance": "", "--dance": "", "pods --state sad": "pods ", "-n x why": "why ", "version x": "version ", "completion tcsh": "completion ",
	} {
		if r := run(t, nil, strings.Fields(args)...); !strings.HasSuffix(r.stderr, "; see kubectl istio-cni "+want+"--help\n") {
			t.Errorf("%s: %s", args, r.stderr)
		}
	}
	refuses := answer{For: "istio-cni pods", Code: 2, Err: "error: unknown flag --dance\nsee istio-cni pods --help\ncommand terminated with exit code 2\n"}
	r := run(t, fleetOf(20, refuses), "pods", "--selector=a=b=c")
	r.want(t, 2, "", "error: unknown flag --dance; see kubectl istio-cni pods --help\n")
	check.Equal(t, strings.Count(r.stderr, "dance"), 1, r.stderr)
	run(t, nil).want(t, 0, "kubectl istio-cni COMMAND", "")
	run(t, nil, "--help").want(t, 0, "EXIT CODES", "")
	// A variable counts on the node only.
	run(t, nil, "doctor", "--help").want(t, 0, "\n   --cni-agent-run-dir DIR\n", "")
	for _, args := range []string{"pods --help", "-n shop pods -h", "help pods", "pods x --dance --help"} {
		run(t, nil, strings.Fields(args)...).want(t, 0, "USAGE:\n   kubectl istio-cni pods [POD...] [flags]\n", "")
	}
	run(t, nil, "version").want(t, 0, "istio-cni version ", "")
}

func TestRun_NoAgentOrKubectl(t *testing.T) {
	t.Parallel()
	run(t, fleetOf(0), "pods").want(t, 1, "", `error: no node agent was found by the label selector "k8s-app in (istio-cni-node, istio-cni-observer)" of a DaemonSet and its pods in all namespaces`)
	run(t, []answer{daemonSets()}, "pods").want(t, 1, "", "error: no node agent was found")
	run(t, []answer{daemonSets("istio-system"), {For: "get -o json pods", Code: 1, Err: "error: context \"x\" does not exist\n"}}, "pods").
		want(t, 1, "", "error: kubectl get pods: context \"x\" does not exist\n")
	log := "E1127 05:14:32.587337    9558 memcache.go:265] \"Unhandled Error\" err=\"dial tcp: refused\"\n"
	run(t, []answer{{For: "get -o json daemonsets.apps", Code: 1, Err: log + log + "The connection was refused\n"}}, "pods").
		want(t, 1, "", "error: kubectl get daemonsets.apps: The connection was refused\n")
	run(t, []answer{{For: "get -o json daemonsets.apps", Code: 1, Err: log}}, "pods").want(t, 1, "", "refused")
	run(t, []answer{daemonSets("istio-system"), {For: "get -o json pods", Out: "garbage"}}, "pods").want(t, 1, "", "error: kubectl get pods: reading its output: invalid character")
	run(t, []answer{{For: "get -o json daemonsets.apps", Hang: true}}, "pods", "--timeout=1s").want(t, 1, "", "error: kubectl get daemonsets.apps: no answer within 1s\n")
	call("no-such-program", nil, "pods").want(t, 1, "", "not found in $PATH (install kubectl, or name it by the variable KUBECTL)\n")
}

// TestOnePod_Hangs: a node that does not answer ends the command, a trace after its time.
func TestOnePod_Hangs(t *testing.T) {
	t.Parallel()
	kubectl := standIn(t, []answer{
		daemonSets("istio-system"),
		{For: "get -o json pod ", Out: `{"metadata":{"namespace":"shop","name":"a"},"spec":{"nodeName":"n1"}}`},
		{For: "--field-selector", Out: list(agentPod("agent-1", "n1", "Running"))},
		{For: of(1, "why shop/a", "").For, Hang: true},
		{For: of(1, "trace shop/a", "").For, Out: "tracing\n", Hang: true},
	})
	call(kubectl, nil, "why", "shop/a", "--timeout=1s").want(t, 1, "", "error: node n1: no answer within 1s\n")
	call(kubectl, nil, "trace", "shop/a", "--timeout=1s", "--for=1s").want(t, 1, "tracing\n", "error: node n1: no answer within 2s\n")
}

func TestRun_OnePod(t *testing.T) {
	t.Parallel()
	getPod := func(args, node string) answer {
		return answer{For: "get -o json pod " + args, Out: fmt.Sprintf(`{"metadata":{"namespace":"shop","name":"web"},"spec":{"nodeName":%q}}`, node)}
	}
	web, sets := getPod("-n shop -- web", "n1"), daemonSets("istio-system")
	agents := func(items string) answer {
		return answer{For: "--field-selector=spec.nodeName=n1", Out: list(items)}
	}
	n1 := agents(agentPod("agent-1", "n1", "Running"))
	deployment := answer{For: "get -o json deployments.apps -n shop -- web", Out: `{"metadata":{"namespace":"shop","name":"web","uid":"its"},
		"spec":{"selector":{"matchLabels":{"b":"2","app":"web"},"matchExpressions":[{"key":"t","operator":"NotIn","values":["x","y"]},{"key":"u","operator":"DoesNotExist"}]}}}`}
	podOfWeb := func(n int, phase, owner string) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"shop","name":"web-%d","ownerReferences":[{"uid":%q,"controller":true}]},"spec":{"nodeName":"n1"},"status":{"phase":%q}}`, n, owner, phase)
	}
	const selected = "get -o json pods -n shop -l app=web,b=2,t notin (x,y),!u"
	replicas := answer{For: selected, Out: list(podOfWeb(0, "Pending", "r"), podOfWeb(2, "Running", "r"), podOfWeb(1, "Running", "r"))}
	own := answer{For: selected, Out: list(podOfWeb(2, "Running", "another"), podOfWeb(3, "Running", "its"))}
	const explanation = "{\n  \"apiVersion\": \"cni.meshcni.io/v1\",\n  \"kind\": \"Explanation\"\n}\n"
	ended := func(code int, out, stderr string) answer {
		a := of(1, "why shop/web", out)
		a.Code, a.Err = code, fmt.Sprintf("%scommand terminated with exit code %d\n", stderr, code)
		return a
	}
	for name, test := range map[string]struct {
		args    string
		answers []answer // before those of a pod in order
		want    result
	}{
		"as wanted":         {"why shop/web", []answer{of(1, "why shop/web", "the page\n")}, result{0, "the page\n", ""}},
		"past the mesh":     {"why -n shop web --to x:1", []answer{ended(3, "the page\n", "")}, result{3, "the page\n", ""}},
		"unknown":           {"why -nshop web", []answer{ended(4, "", "a remark\n")}, result{4, "", "a remark\n"}},
		"failed":            {"why shop/web", []answer{ended(1, "", "error: no such pod on this node\n")}, result{1, "", "error: no such pod on this node\n"}},
		"a bad packet":      {"why shop/web --to=x", []answer{ended(2, "", "error: x; see istio-cni why --help\n")}, result{2, "", "error: x; see kubectl istio-cni why --help\n"}},
		"of the context":    {"why web", []answer{getPod("-- web", "n1"), of(1, "why shop/web", "the page\n")}, result{0, "the page\n", ""}},
		"no such pod":       {"why shop/web", []answer{{For: "get -o json pod ", Code: 1, Err: "Error from server (NotFound): pods \"web\" not found\n"}}, result{1, "", "error: kubectl get pod: Error from server (NotFound): pods \"web\" not found\n"}},
		"on no node":        {"why shop/web", []answer{getPod("", "")}, result{1, "", "error: pod shop/web is on no node yet\n"}},
		"no agent there":    {"trace shop/web", []answer{agents("")}, result{1, "", "error: node n1 of pod shop/web: it has no node agent\n"}},
		"another --node":    {"why shop/web --node=n0", []answer{of(1, "why shop/web", "the page\n")}, result{0, "the page\n", ""}},
		"the agent Pending": {"trace shop/web", []answer{agents(agentPod("agent-1", "n1", "Pending"))}, result{1, "", "error: node n1 of pod shop/web: the agent's pod is Pending\n"}},
		"an agent without it": {
			"why shop/web",
			[]answer{ended(2, "", "istio-cni: unknown command \"why\"\n\nabout\nversion v0.0.9\n")},
			result{1, "", "error: node n1: " + other + "it has no command why\n"},
		},
		"of a Deployment":  {"why deploy/web -n shop", []answer{deployment, replicas, of(1, "why shop/web-1", "the page\n")}, result{0, "the page\n", "note: shop/web-1 is 1 of 3 pods of deploy/web\n"}},
		"of a DaemonSet":   {"why shop/ds/web", []answer{{For: "get -o json daemonsets.apps -n shop -- web", Out: deployment.Out}, own, of(1, "why shop/web-3", "the page\n")}, result{0, "the page\n", "note: shop/web-3 is 1 of 1 pods of shop/ds/web\n"}},
		"of none":          {"trace sts/web", []answer{{For: "get -o json statefulsets.apps -- web", Out: deployment.Out}, {For: "get -o json pods", Out: list()}}, result{1, "", "error: sts/web has no pods\n"}},
		"without selector": {"why job/web", []answer{{For: "get -o json jobs.batch -- web", Out: `{"metadata":{"namespace":"shop","name":"web"}}`}}, result{1, "", "error: job/web: its selector is empty\n"}},
		"no such workload": {"why deployment/web", []answer{{For: "get -o json deployments.apps -- web", Code: 1, Err: "Error from server (NotFound): x\n"}}, result{1, "", "error: kubectl get deployments.apps: Error from server (NotFound): x\n"}},
		"pod/NAME":         {"why pod/web -n shop --uid=5", []answer{of(1, "why shop/web --uid=5", "the page\n")}, result{0, "the page\n", ""}},
		"a document":       {"why shop/web -o json", []answer{of(1, "why shop/web --output=json", explanation)}, result{0, explanation, ""}},
		"a page": {
			"dashboard shop/web --port 4711",
			[]answer{{For: "port-forward -n istio-system pod/agent-1 4711:9876", Out: "Forwarding from 127.0.0.1:4711 -> 9876\n", Code: 1, Err: "error: lost connection to pod\n"}},
			result{1, "http://localhost:4711/#shop/web of node n1 while kubectl forwards the port (Ctrl-C ends it)\nForwarding from 127.0.0.1:4711 -> 9876\n", "error: lost connection to pod\n"},
		},
		"a port in use": {
			"dashboard", fleetOf(1, answer{For: "port-forward -n istio-system pod/agent-1 9876:9876", Code: 1, Err: "Unable to listen on port 9876\n"}),
			result{1, "http://localhost:9876/ of node n1 while kubectl forwards the port (Ctrl-C ends it)\n", "Unable to listen on port 9876\n"},
		},
		"no running agent": {"dashboard", []answer{{For: "get -o json pods", Out: list(agentPod("a", "n1", "Pending"))}}, result{1, "", "error: no node agent is running\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check.Equal(t, run(t, append(test.answers, sets, web, n1), strings.Fields(test.args)...), test.want)
		})
	}
}

func TestTerminal_Progress(t *testing.T) {
	t.Parallel()
	doctor := `[{"name":"runtime","result":"fail","text":"no","remedy":"do"},{"name":"clock","result":"ok","text":"fine"}]`
	kubectl := standIn(t, fleetOf(2, of(1, "doctor", doctor), of(2, "doctor", `[{"name":"clock","result":"ok","text":"fine"}]`)))
	var progress bytes.Buffer
	call(kubectl, &progress, "doctor").want(t, 1, "other\n-----\n✗ runtime: no [n1]\n  do\n✓ clock: fine [n1, n2]\n\n2 checks: 1 failed, 0 need a look\n", "")
	if text := progress.String(); !strings.HasPrefix(text, "\r0/2 nodes\r1/2 nodes\r   ") || !strings.HasSuffix(text, " \r") {
		t.Errorf("progress %q", text)
	}
	call(kubectl, &progress, "bundle").want(t, 2, "", "redirect the standard output to a file")
	plain := call(kubectl, nil, "doctor")
	plain.want(t, 1, "✗ runtime", "")
	check.Equal(t, plain.stderr, "", "in a pipe")
}

func TestDecisions_Table(t *testing.T) {
	t.Parallel()
	kubectl := standIn(t, fleetOf(2,
		of(1, "decisions --json --since=1h", items("DecisionList", `{"namespace":"shop","pod":"a","reason":"captured","captured":true,"durationSeconds":1}`)),
		of(2, "decisions --json --since=1h", `[{"time":"2999-11-22T13:00:00Z","namespace":"shop","pod":"b","reason":"mode-none","detail":"two words"}]`),
	))
	call(kubectl, nil, "decisions", "--since", "1h").want(t, 0, `NODE  AGE  POD     CAPTURED  REASON     SOURCE  DETAIL
n2    0s   shop/b  false     mode-none  -       "two words"
n1    -    shop/a  true      captured   -       -
`, "")
	call(kubectl, nil, "decisions", "--json", "--since", "1h").want(t, 0, `"durationSeconds": 1`, "")
	limited := standIn(t, fleetOf(2,
		of(1, "decisions --json --limit=2", items("DecisionList", `{"time":"2026-11-22T13:00:03Z","pod":"d","reason":"x"},{"time":"2026-11-22T13:00:01Z","pod":"b","reason":"x"}`)),
		of(2, "decisions --json --limit=2", items("DecisionList", `{"time":"2026-11-22T13:00:02Z","pod":"c","reason":"x"},{"time":"2026-11-22T13:00:00Z","pod":"a","reason":"x"}`)),
	))
	r := call(limited, nil, "decisions", "--limit", "2", "-o", "json")
	r.want(t, 0, `"omitted": 6`, "")
	if pods := regexp.MustCompile(`"pod": "."`).FindAllString(r.stdout, -1); !slices.Equal(pods, []string{`"pod": "d"`, `"pod": "c"`}) {
		t.Errorf("the 2 latest decisions of all nodes: %q", pods)
	}
}

// TestOnePod_Colours: the page of an agent, which has no terminal, is painted here; JSON never is.
func TestOnePod_Colours(t *testing.T) {
	t.Parallel()
	const page = "POD shop/web: DRIFTED, the pod\n"
	kubectl := standIn(t, fleetOf(1, of(1, "why", page), answer{For: "get -o json pod ", Out: `{"metadata":{"namespace":"shop","name":"web"},"spec":{"nodeName":"n1"}}`},
		answer{For: "--field-selector", Out: list(agentPod("agent-1", "n1", "Running"))}))
	for form, want := range map[string]string{"table": "POD shop/web: \x1b[31mDRIFTED,\x1b[0m the pod\n", "json": page} {
		var stdout bytes.Buffer
		code := fleet.Run(applet.Call{
			Args: []string{"why", "shop/web", "-o", form}, Stdout: &stdout, Stderr: io.Discard, Colours: func() bool { return true },
			Getenv: func(name string) (string, bool) { return kubectl, name == "KUBECTL" },
		}, nil)
		check.Equal(t, stdout.String(), want, form, code)
	}
}
