package fleet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// podOf returns a pod of node n1 with the agents' label.
func podOf(namespace, name, owners string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q,"ownerReferences":[%s]},"spec":{"nodeName":"n1"},"status":{"phase":"Running"}}`,
		namespace, name, owners)
}

// TestAgents_PodsOfTenants: a label, a name that sorts first and a forged owner do not make an agent.
func TestAgents_PodsOfTenants(t *testing.T) {
	t.Parallel()
	own := agentPod("agent-1", "n1", "Running")
	others := []string{
		podOf("istio-system", "aaa", ""),
		podOf("istio-system", "aab", `{"uid":"uid-of-istio-system"}`),
		podOf("istio-system", "aac", `{"uid":"uid-of-tenant","controller":true}`),
	}
	everywhere := append(others, podOf("tenant", "aaa", `{"uid":"uid-of-istio-system","controller":true}`), own)
	captured, page := "["+pod("a", audit.Captured)+"]", "Forwarding from 127.0.0.1:9876 -> 9876\n"
	forged := func(command, out string) answer {
		return answer{For: "-c install-cni -- istio-cni " + command, Out: out}
	}
	kubectl := standIn(t, []answer{
		daemonSets("istio-system"),
		{For: "get -o json pods -n istio-system", Out: list(append(others, own)...)},
		{For: "get -o json pods ", Out: list(everywhere...)},
		{For: "get -o json pod -n shop", Out: `{"metadata":{"namespace":"shop","name":"a"},"spec":{"nodeName":"n1"}}`},
		{For: "get nodes", Out: "node/n1\n"},
		{For: of(1, "pods", "").For, Out: "[" + pod("a", audit.Bypassed) + "]", Code: 3},
		of(1, "why shop/a", "the page\n"), of(1, "trace shop/a", "a packet\n"),
		{For: "port-forward -n istio-system pod/agent-1 ", Out: page, Code: 1},
		forged("pods", captured), forged("why", "forged\n"), forged("trace", "forged\n"),
		{For: "port-forward", Out: page},
	})
	call(kubectl, nil, "pods").want(t, 3, "shop/a  bypassed", "")
	call(kubectl, nil, "why", "-n", "shop", "a").want(t, 0, "the page\n", "")
	call(kubectl, nil, "trace", "-n", "shop", "a").want(t, 0, "a packet\n", "")
	call(kubectl, nil, "dashboard").want(t, 1, "of node n1", "")
	call(kubectl, nil, "dashboard", "-n", "shop", "a").want(t, 1, "of node n1", "")
}

// TestAgents_Choice: the user chooses between namespaces, nobody between two agents of a node, and an observer answers in place of another
// plugin's agent beside it. What was not chosen shows nothing.
func TestAgents_Choice(t *testing.T) {
	t.Parallel()
	only := func(namespace string) answer {
		return answer{For: "get -o json daemonsets.apps -n " + namespace, Out: daemonSets(namespace).Out}
	}
	agentOf := func(namespace, uid string) string {
		return podOf(namespace, "of-"+uid, fmt.Sprintf(`{"uid":%q,"controller":true}`, uid))
	}
	observers := answer{For: "get -o json daemonsets.apps --all-namespaces", Out: list(
		`{"metadata":{"namespace":"istio-system","uid":"theirs","labels":{"k8s-app":"istio-cni-node"}}}`,
		`{"metadata":{"namespace":"istio-system","uid":"ours","labels":{"k8s-app":"istio-cni-observer"}}}`)}
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprintf("tenant-%03d", i))
	}
	one := []string{agentPod("agent-1", "n1", "Running")}
	two := []string{agentPod("agent-0", "n1", "Pending"), agentPod("agent-2", "n1", "Running"), one[0], agentPod("agent-3", "n1", "Running")}
	beside := []string{agentOf("istio-system", "theirs"), agentOf("istio-system", "ours")}
	mesh := []string{agentOf("mesh", "uid-of-mesh")}
	const every = "pods, decisions, doctor, bundle, dashboard, why shop/a, trace shop/a, dashboard shop/a, bundle shop/a"
	const both = "more than one node agent runs there: istio-system/agent-1 and istio-system/agent-2\n"
	for name, test := range map[string]struct {
		sets   answer
		agents []string
		args   string // of several calls
		want   result // parts of the output, "" for none
	}{
		"two namespaces": {
			daemonSets("istio-system", "tenant"), one, every,
			result{2, "", "error: DaemonSets with the label of the node agents are in the namespaces istio-system, tenant: name the agents' namespace by --agent-namespace"},
		},
		"one of them":          {only("istio-system"), one, "pods --agent-namespace=istio-system", result{0, "n1    shop/a", ""}},
		"1000 namespaces":      {daemonSets(many...), one, "pods", result{2, "", "tenant-009, and 990 more: name"}},
		"an unusual namespace": {daemonSets("mesh"), mesh, "pods", result{0, "n1    shop/a", "note: taking the node agents of namespace mesh; --agent-namespace=mesh confirms that\n"}},
		"confirmed":            {only("mesh"), mesh, "pods --agent-namespace mesh", result{0, "n1    shop/a", ""}},
		"two on a node":        {daemonSets("istio-system"), two, "pods, doctor, decisions", result{1, "", "node n1: no answer: " + both}},
		"two on a pod's node":  {daemonSets("istio-system"), two, "why shop/a, dashboard shop/a", result{1, "", "error: node n1 of pod shop/a: " + both}},
		"two, for a page":      {daemonSets("istio-system"), two, "dashboard", result{1, "", "error: no node agent is running\n"}},
		"an observer":          {observers, beside, "pods", result{0, "n1    shop/a  captured", ""}},
	} {
		kubectl := standIn(t, []answer{
			test.sets,
			{For: "get -o json pods ", Out: list(test.agents...)},
			{For: "get -o json pod ", Out: `{"metadata":{"namespace":"shop","name":"a"},"spec":{"nodeName":"n1"}}`},
			{For: "get nodes", Out: "node/n1\n"},
			{For: "pod/of-theirs", Code: 1, Err: "not asked\n"},
			{For: "exec ", Out: "[" + pod("a", audit.Captured) + "]"},
			{For: "port-forward", Out: "Forwarding from 127.0.0.1:9876 -> 9876\n"},
		})
		for args := range strings.SplitSeq(test.args, ", ") {
			r := call(kubectl, nil, strings.Fields(args)...)
			r.want(t, test.want.code, test.want.stdout, test.want.stderr)
			if (r.stdout == "") != (test.want.stdout == "") || (r.stderr == "") != (test.want.stderr == "") {
				t.Errorf("%s: %s: stdout %q, stderr %q", name, args, r.stdout, r.stderr)
			}
		}
	}
}

func TestPods_NodesWithoutAgent(t *testing.T) {
	t.Parallel()
	captured := of(1, "pods", "["+pod("a", audit.Captured)+"]")
	kubectl := standIn(t, append([]answer{{For: "get nodes", Out: "node/n1\nnode/n2\nnode/n3\n"}}, fleetOf(1, captured)...))
	const notice = "error: nodes without a node agent, whose pods are not seen: n2, n3; --ignore-nodes-without-agent accepts that\n"
	call(kubectl, nil, "pods").want(t, 1, "n1    shop/a  captured", notice)
	call(kubectl, nil, "pods", "-o", "json").want(t, 1, `    {
      "name": "n3",
      "error": "it has no node agent"
    }
  ],
  "items": [
    {
      "future"`, notice)
	check.Equal(t, call(kubectl, nil, "pods", "--ignore-nodes-without-agent").stderr, "", "stderr with the flag")
	forbidden := standIn(t, append([]answer{{For: "get nodes", Code: 1, Err: "Error from server (Forbidden): nodes is forbidden\n"}}, fleetOf(1, captured)...))
	call(forbidden, nil, "pods").want(t, 1, "n1    shop/a  captured",
		"error: the nodes without a node agent are not known: kubectl get nodes: Error from server (Forbidden): nodes is forbidden; --ignore-nodes-without-agent accepts that\n")
	call(forbidden, nil, "pods", "--ignore-nodes-without-agent").want(t, 0, "n1    shop/a  captured", "")
	failed := standIn(t, fleetOf(2, captured, answer{For: of(2, "pods", "").For, Code: 1, Err: "error: the audit is off\n"}))
	call(failed, nil, "pods", "-o", "yaml").want(t, 1, "- agent: istio-system/agent-2\n  error: the audit is off\n  name: n2\n", "node n2: no answer: the audit is off\n")
}

// TestLists_NoneNamed: no match on any node is an error, no match on one node is not.
func TestLists_NoneNamed(t *testing.T) {
	t.Parallel()
	none := func(agent int, command string) answer {
		return answer{For: of(agent, command, "").For, Out: items("PodList") + "\n", Code: 1, Err: "error: there is none on this node\ncommand terminated with exit code 1\n"}
	}
	kubectl := standIn(t, fleetOf(2,
		none(1, "pods -o json --namespace=nowhere"), none(2, "pods -o json --namespace=nowhere"), of(1, "pods -o json --namespace=shop", "["+pod("a", audit.Captured)+"]"),
		none(2, "pods -o json --namespace=shop"), none(1, "pods -o json --namespace=plain"), of(2, "pods -o json --namespace=plain", "[]\n"),
		of(1, "pods -o json --bypassing", "[]\n"), of(2, "pods -o json --bypassing", "[]\n"),
		none(1, "decisions --json --pod=nobody"), none(2, "decisions --json --pod=nobody"), of(1, "decisions --json", "[]\n"), of(2, "decisions --json", "[]\n"),
	))
	const nowhere, nobody = "error: namespace \"nowhere\" has no pod with a network of its own on the nodes that answered\n",
		"error: the agents that answered hold no such decision about a pod with \"nobody\" in its NAMESPACE/NAME\n"
	for args, want := range map[string]result{
		"pods -n nowhere":        {1, "", nowhere},
		"pods -n plain":          {0, "", "no pod of the mesh on the nodes that answered\n"},
		"pods --bypassing":       {0, "", "no pod in such a state on the nodes that answered\n"},
		"decisions --pod nobody": {1, "", nobody},
		"decisions":              {0, "", "the agents that answered hold no such decision\n"},
	} {
		check.Equal(t, call(kubectl, nil, strings.Fields(args)...), want, args)
	}
	call(kubectl, nil, "pods", "-n", "shop").want(t, 0, "n1    shop/a  captured", "")
	call(kubectl, nil, "decisions", "--pod", "nobody", "--json").want(t, 1, "\"items\": []\n}\n", nobody)
	call(kubectl, nil, "pods", "-n", "nowhere", "-o", "json").want(t, 1, "\"items\": []\n}\n", nowhere)
}

// TestLists_Documents: the merged list has the schema of a node's list, also with a node that does not answer.
func TestLists_Documents(t *testing.T) {
	t.Parallel()
	kubectl := standIn(t, append([]answer{{For: "get nodes", Out: "node/n1\nnode/n2\nnode/n3\n"}}, fleetOf(2,
		of(1, "pods", items("PodList", `{"namespace":"shop","pod":"a","uid":"1","state":"drifted","sentence":"s","problems":[{"state":"drifted","detail":"d"}]}`)),
		of(1, "decisions", items("DecisionList", `{"time":"2026-11-22T12:00:00Z","namespace":"shop","pod":"a","uid":"1","container":"c","captured":true,"reason":"captured","source":"api"}`)),
		of(1, "doctor", items("DoctorReport", `{"name":"clock","result":"ok","text":"fine"}`)),
	)...))
	for kind, command := range map[string]string{"PodList": "pods", "DecisionList": "decisions", "DoctorReport": "doctor"} {
		for _, form := range []string{"json", "yaml"} {
			r := call(kubectl, nil, command, "-o", form)
			r.want(t, 1, "n3", "node n2: no answer: ")
			documenttest.Valid(t, kind, r.stdout)
		}
	}
	documenttest.Valid(t, "Version", call(kubectl, nil, "version", "-o", "json").stdout)
}

// TestText_OfOneNode: a node's text cannot begin a line.
func TestText_OfOneNode(t *testing.T) {
	t.Parallel()
	const forged = `x\n✗ primary: forged [n2]\n`
	kubectl := standIn(t, fleetOf(2,
		of(1, "doctor", fmt.Sprintf(`[{"name":"a%s","result":"fail","text":"b%[1]s","remedy":"c%[1]s"},{"name":"d","result":"e%[1]s","text":"f"}]`, forged)),
		of(2, "doctor", `[{"name":"clock","result":"ok","text":"fine"}]`),
		of(1, "pods", fmt.Sprintf(`[{"namespace":"a%s","pod":"b%[1]s","state":"c%[1]s","sentence":"d%[1]s","backend":"e%[1]s"}]`, forged)),
		of(2, "pods", "[]"),
		of(1, "decisions", fmt.Sprintf(`[{"namespace":"a%s","pod":"b%[1]s","reason":"c%[1]s","source":"d%[1]s","detail":"e%[1]s"}]`, forged)),
		answer{For: of(2, "decisions", "").For, Out: fmt.Sprintf(`[{"time":"%s","reason":"x"}]`, forged)},
	))
	for _, args := range []string{"doctor", "pods", "pods -o yaml", "decisions"} {
		r := call(kubectl, nil, strings.Fields(args)...)
		if text := "\n" + r.stdout + "\n" + r.stderr; !strings.Contains(text, "forged") || strings.Contains(text, "\n✗ primary") {
			t.Errorf("%s:%s", args, text)
		}
	}
}

// TestMemory_EndlessAnswers: twelve nodes answer without end, ten of them at once.
func TestMemory_EndlessAnswers(t *testing.T) {
	endless := answer{For: "istio-cni pods", Out: "[" + strings.Repeat(pod("a", audit.Captured)+",", 10_000), Repeat: 100}
	kubectl := standIn(t, fleetOf(12, endless))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r := call(kubectl, nil, "pods")
	runtime.ReadMemStats(&after)
	if r.code != 1 || strings.Count(r.stderr, ": no answer: more than 8 MiB of output\n") != 12 {
		t.Errorf("exit code %d, stderr %q", r.code, r.stderr)
	}
	if text, err := os.ReadFile(filepath.Join(filepath.Dir(kubectl), "too-many")); err == nil {
		t.Errorf("%s processes of kubectl at once", text)
	}
	if mib := (after.TotalAlloc - before.TotalAlloc) >> 20; mib > 12*8*6 { // a slice that grows by quarters allocates five times its size
		t.Errorf("%d MiB were allocated", mib)
	}
}
