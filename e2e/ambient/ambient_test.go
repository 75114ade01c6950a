// Package ambient compares this agent in ambient mode with the reference's, on a node without kubelet and runtime: a real API server,
// real network namespaces and processes that look like pods, and a stand-in for ztunnel that acknowledges all.
//
// Times, CPU and memory are measured and printed and never asserted, because machines differ and may be busy. The test asserts counts of
// this agent: programs that it starts, requests for an ADD, and open files for each pod.
//
// Start reading at TestAgainstReference. node_test.go makes the node, ztunnel_test.go is the stand-in, usage_test.go reads what an
// agent uses.
package ambient

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

const (
	adds     = 30
	restarts = 3
)

// pods returns AMBIENT_PODS, by default 250. With them a run takes seven minutes.
func pods(t *testing.T) int {
	t.Helper()
	text := os.Getenv("AMBIENT_PODS")
	if text == "" {
		return 250
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("AMBIENT_PODS=%q: want a positive number", text)
	}
	return n
}

// accounting is the variable with the file for the kernel's accounting, in a process that only turns it on.
const accounting = "E2E_AMBIENT_ACCOUNTING"

func TestMain(m *testing.M) {
	cluster.Main()
	if file := os.Getenv(accounting); file != "" {
		if err := unix.Acct(file); err != nil {
			fmt.Fprintln(os.Stderr, "acct:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// result is what an agent used for a step.
type result struct {
	wall, cpu, plugin time.Duration
	// settled is the CPU time until the agent is quiet again.
	settled  time.Duration
	requests int      // of the agent and of the plugin
	programs []string // that they have started
}

// results has the results of one agent by step, its open files for each pod, and its memory with all pods.
type results struct {
	steps  map[string]result
	perPod float64
	memory memory
	// started is the number of programs of a start without pods.
	started int
}

// TestAgainstReference runs the same steps with both agents, each on a node of its own. AMBIENT_ONLY=reference or ours selects one.
func TestAgainstReference(t *testing.T) {
	kinds := []string{"reference", "ours"}
	if only := os.Getenv("AMBIENT_ONLY"); only != "" {
		kinds = []string{only}
	}
	all, count := map[string]results{}, pods(t)
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			found, err := artifacts.FindAmbient()
			if err != nil {
				t.Fatal(err)
			}
			switch kind {
			case "ours":
				all[kind] = newNode(t, found, found.IstioCNI, found.IstioCNI, "AMBIENT_PODS=serve").measure(count)
			case "reference":
				// By itself it changes to legacy tables at its first restart, because its own probe leaves empty ones.
				const binary = "FORCE_IPTABLES_BINARY=nft"
				all[kind] = newNode(t, found, found.ReferenceAgent, found.ReferencePlugin, binary).measure(count)
			}
		})
	}
	for line := range strings.Lines(table(all, count)) {
		t.Log(strings.TrimSuffix(line, "\n"))
	}
	if r, there := all["ours"]; there && !t.Failed() {
		r.check(t)
	}
}

// check asserts the budgets.
func (r results) check(t *testing.T) {
	t.Helper()
	for step, used := range r.steps {
		if len(used.programs) > 0 {
			t.Errorf("%s: the agent and the plugin have started %q, want none", step, used.programs)
		}
	}
	if got := r.steps["add"].requests; got > adds {
		t.Errorf("%d ADDs: %d requests, want one for each", adds, got)
	}
	const most = 2
	if math.Round(r.perPod) > most { // a connection more is none of a pod
		t.Errorf("%.1f open files for each pod, want at most %d", r.perPod, most)
	}
}

// measure runs all steps.
func (n *node) measure(pods int) results {
	n.Helper()
	r := results{steps: map[string]result{}}
	running := n.populate("run", pods)
	n.start()
	r.started = len(n.programs())
	empty := n.agent.files()
	r.steps["enrol"] = n.step(func() {
		n.label("ambient")
		n.annotated(pods)
	})
	n.settle()
	r.perPod, r.memory = float64(n.agent.files()-empty)/float64(pods), n.agent.memory()
	var again []result
	for range restarts {
		again = append(again, n.restart(running))
	}
	slices.SortFunc(again, func(a, b result) int { return int(a.cpu - b.cpu) })
	r.steps["restart"] = again[restarts/2]
	r.steps["add"] = n.addAll(pods)
	r.steps["release"] = n.step(func() {
		n.label("none")
		n.annotated(0)
	})
	n.stop()
	return r
}

// restart ends the agent as an upgrade does, and starts it again. The result is until ztunnel has all pods.
func (n *node) restart(running []pod) result {
	n.Helper()
	n.stop()
	n.ztunnel.forget()
	programs := len(n.programs())
	requests := n.requests()
	began := time.Now()
	n.launch()
	r := result{}
	n.await("ztunnel's snapshot", n.ztunnel.news, func() bool {
		whole, at := n.ztunnel.has(uids(running))
		r.wall = at.Sub(began)
		return whole
	})
	r.cpu = n.agent.cpu()
	n.ready()
	n.settle()
	r.settled = n.agent.cpu()
	r.programs, r.requests = n.programs()[programs:], n.requests()-requests
	return r
}

// addAll adds pods one after the other, as a runtime does.
func (n *node) addAll(running int) result {
	n.Helper()
	added := n.populate("add", adds)
	n.settle()
	var took []time.Duration
	var plugin time.Duration
	used := n.step(func() {
		for i, p := range added {
			c := n.add(p)
			took, plugin = append(took, c.took), plugin+c.cpu
			n.annotated(running + i + 1)
		}
	})
	slices.Sort(took)
	used.wall, used.plugin = took[adds/2], plugin
	used.programs = slices.DeleteFunc(used.programs, func(name string) bool { return name == pluginName })
	return used
}

// table has a line for each measure, and the ratio of both agents.
func table(all map[string]results, pods int) string {
	type row struct {
		name string
		of   func(results) float64
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	var rows []row
	for _, step := range []string{"enrol", "restart", "release"} {
		for _, r := range []row{
			{"wall, ms", func(r results) float64 { return ms(r.steps[step].wall) }},
			{"CPU, ms", func(r results) float64 { return ms(r.steps[step].cpu) }},
			{"programs started", func(r results) float64 { return float64(len(r.steps[step].programs)) }},
			{"API requests", func(r results) float64 { return float64(r.steps[step].requests) }},
		} {
			rows = append(rows, row{fmt.Sprintf("%s of %d pods: %s", step, pods, r.name), r.of})
		}
	}
	add := func(value func(result) float64) func(results) float64 {
		return func(r results) float64 { return value(r.steps["add"]) / adds }
	}
	rows = append(rows, []row{
		{fmt.Sprintf("restart of %d pods: CPU until quiet, ms", pods), func(r results) float64 { return ms(r.steps["restart"].settled) }},
		{"start without pods: programs started", func(r results) float64 { return float64(r.started) }},
		{"ADD: until answer, median, ms", func(r results) float64 { return ms(r.steps["add"].wall) }},
		{"ADD: CPU of the plugin, ms", add(func(r result) float64 { return ms(r.plugin) })},
		{"ADD: CPU of the agent, ms", add(func(r result) float64 { return ms(r.cpu) })},
		{"ADD: programs started", add(func(r result) float64 { return float64(len(r.programs)) })},
		{"ADD: API requests", add(func(r result) float64 { return float64(r.requests) })},
		{"open files for each pod", func(r results) float64 { return r.perPod }},
		{"memory, MiB", func(r results) float64 { return float64(r.memory.resident) / 1024 }},
		{"memory of its own, MiB", func(r results) float64 { return float64(r.memory.own) / 1024 }},
	}...)
	var text strings.Builder
	fmt.Fprintf(&text, "%-44s %12s %12s %8s\n", "", "reference", "ours", "ratio")
	for _, r := range rows {
		reference, ours := r.of(all["reference"]), r.of(all["ours"])
		ratio := "-"
		if reference > 0 && len(all) > 1 {
			ratio = fmt.Sprintf("%.2f", ours/reference)
		}
		fmt.Fprintf(&text, "%-44s %12.1f %12.1f %8s\n", r.name, reference, ours, ratio)
	}
	return text.String()
}

// logs keeps the agent's log of a failed test.
func (n *node) logs(found artifacts.Ambient, name string) {
	if !n.Failed() {
		return
	}
	dir := filepath.Join(found.Logs, "ambient")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.Log(err)
	}
	for i, p := range n.started {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d.log", name, i)), []byte(strings.Join(p.Lines(), "\n")), 0o644); err != nil {
			n.Log(err)
		}
	}
}
