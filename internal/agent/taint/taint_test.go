package taint

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

func yesterday() time.Time { return agenttest.Start().Add(-24 * time.Hour) }

const (
	ours  = "cni.istio.io/not-ready:NoSchedule"
	other = "other:NoExecute"
	older = "NodeReadiness:NoSchedule"
)

func TestUntaint(t *testing.T) {
	l := newLab(t, untaint())
	l.node("ready", nodeSpec{taints: []object{otherTaint(), ourTaint()}})
	l.pod("ready", "agent-1", "True", yesterday())
	l.node("unready", nodeSpec{taints: []object{ourTaint()}})
	l.pod("unready", "agent-2", "False", yesterday())
	l.node("other-label", nodeSpec{taints: []object{ourTaint()}})
	l.podOf("istio-system", "other-label", "agent-3", "True", yesterday(), object{"k8s-app": "another"})
	l.node("other-namespace", nodeSpec{taints: []object{ourTaint()}})
	l.podOf("kube-system", "other-namespace", "agent-4", "True", yesterday(), object{"k8s-app": "istio-cni-node"})
	l.node("untainted", nodeSpec{})
	l.run()
	until(t, "it is never ready", l.ready)
	l.wantTaints("ready", other)
	for _, name := range []string{"unready", "other-label", "other-namespace"} {
		l.wantTaints(name, ours)
	}
	// It becomes ready later.
	l.pod("unready", "agent-2", "True", agenttest.Start())
	l.wantTaints("unready")
	// Nothing is ever added.
	l.after(readiness.AgentUnready, func() { l.pod("unready", "agent-2", "False", agenttest.Start()) })
	l.clock.Step(time.Hour)
	l.after(readiness.NoAgent, func() { l.server.Delete(podPath("agent-2")) })
	l.wantTaints("unready")
	if l.patches() != 2 {
		t.Errorf("%d patches, want 2", l.patches())
	}
	// T-7: what is not selected is not even asked for.
	for _, r := range l.server.Requests() {
		if strings.Contains(r, "/pods") && !strings.HasPrefix(r, "GET /api/v1/namespaces/istio-system/pods?") ||
			strings.Contains(r, "/pods") && !strings.Contains(r, "labelSelector=k8s-app%3Distio-cni-node") {
			t.Errorf("request %s", r)
		}
	}
	// Whatever else was in the taint that stays.
	spec, _ := l.fetch("/api/v1/nodes/ready")["spec"].(object)
	if diff := cmp.Diff([]any{otherTaint()}, spec["taints"]); diff != "" {
		t.Errorf("the other taint (-want +got):\n%s", diff)
	}
}

func TestASecondWriterLosesNothing(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.after(readiness.AgentUnready, func() { l.run() })
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	// The other one writes between what was read and the patch: the watch tells it too late.
	l.server.HoldWatches("/nodes")
	l.node("n", nodeSpec{taints: []object{otherTaint(), ourTaint()}, labels: object{"by": "hand"}})
	l.pod("n", "agent", "True", agenttest.Start())
	until(t, "there is no conflict", func() bool {
		return l.metric(`istio_cni_taint_changes_total{change="remove",result="conflict"}`) > 0
	})
	if diff := cmp.Diff([]string{other, ours}, l.taints("n")); diff != "" {
		t.Errorf("the other writer lost (-want +got):\n%s", diff)
	}
	l.server.ReleaseWatches()
	l.wantTaints("n", other)
	metadata, _ := l.fetch("/api/v1/nodes/n")["metadata"].(object)
	if diff := cmp.Diff(object{"by": "hand"}, metadata["labels"]); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}

// TestTwoWritersAtTheSameTime lets another writer add and remove its own taints as fast as it can.
func TestTwoWritersAtTheSameTime(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.after(readiness.AgentUnready, func() { l.run() })
	l.pod("n", "agent", "True", agenttest.Start())
	for i := range 200 {
		l.server.Edit("/api/v1/nodes/n", func(whole object) {
			spec, _ := whole["spec"].(object)
			list, _ := spec["taints"].([]any)
			spec["taints"] = append(list, object{"key": fmt.Sprint("k", i), "effect": "NoExecute"})
		})
	}
	until(t, "ours stays", func() bool { return !slices.Contains(l.taints("n"), ours) })
	if got := l.taints("n"); len(got) != 200 {
		t.Errorf("%d taints are left of 200: %q", len(got), got)
	}
}

func TestANoOpSendsNothing(t *testing.T) {
	l := newLab(t, adding())
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.run()
	until(t, "not all are known", func() bool { return l.metric(`istio_cni_taint_nodes{reason="AgentReady"}`) == 10 })
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	before, decisions := len(l.server.Requests()), l.decided(readiness.AgentReady)
	for i := range 10 {
		l.node(fmt.Sprint("n", i), nodeSpec{taints: []object{otherTaint()}, heartbeat: agenttest.Start().Add(time.Minute)})
		l.pod(fmt.Sprint("n", i), fmt.Sprint("agent-", i), "True", yesterday())
	}
	l.after(readiness.AgentReady, func() { l.node("n0", nodeSpec{}) })
	if after := len(l.server.Requests()); after != before || before != 2 {
		t.Errorf("%d requests, then %d, want 2 at all: %q", before, after, l.server.Requests())
	}
	if got := l.decided(readiness.AgentReady); got != decisions+1 {
		t.Errorf("%d decisions for heartbeats and pods that did not change", got-decisions-1)
	}
}

func TestTheAPIServerIsAwayMeanwhile(t *testing.T) {
	for name, away := range map[string]func(*kubetest.Server){
		"watches break":         func(s *kubetest.Server) { s.BreakWatches() },
		"watches end":           func(s *kubetest.Server) { s.CloseWatches() },
		"the history is gone":   func(s *kubetest.Server) { s.Advance(); s.Compact(); s.BreakWatches() },
		"it refuses for a time": func(s *kubetest.Server) { s.Fail(kubetest.Unavailable, 5); s.BreakWatches() },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, adding())
			l.node("n", nodeSpec{})
			l.pod("n", "agent", "True", yesterday())
			l.node("m", nodeSpec{taints: []object{ourTaint()}})
			l.run()
			until(t, "it is never ready", l.ready)
			until(t, "no watches", func() bool { return l.server.Watches() == 2 })
			l.server.Delete(podPath("agent"))
			away(l.server)
			l.pod("m", "agent-m", "True", agenttest.Start())
			l.wantTaints("m")
			until(t, "the loss of the agent is not seen", func() bool { return l.metric(`istio_cni_taint_nodes{reason="NoAgent"}`) == 1 })
			l.clock.Step(2 * time.Minute)
			l.wantTaints("n", ours)
		})
	}
}

func TestAFailedPatchIsTriedAgain(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("PATCH /api/v1/nodes/", kubetest.Forbidden, 3)
	l.run()
	until(t, "the failure is not told", func() bool { return !l.ready() && l.patches() > 0 })
	until(t, "it gave up", func() bool {
		l.clock.Step(time.Second)
		return len(l.taints("n")) == 0
	})
	until(t, "it stays unready", l.ready)
	if l.patches() != 4 {
		t.Errorf("%d patches, want 4", l.patches())
	}
}

func TestNothingIsDecidedBeforeAllIsKnown(t *testing.T) {
	l := newLab(t, adding())
	l.options.Policy.GracePeriod = 0
	l.node("n", nodeSpec{})
	l.pod("n", "agent", "True", yesterday())
	l.server.FailOn("/pods?", kubetest.ServerError, 20)
	l.run()
	l.wantTaintsAfter("n", func() bool { return l.ready() })
	if l.patches() != 0 {
		t.Errorf("%d patches before the pods were known", l.patches())
	}
}

func (l *lab) wantTaintsAfter(name string, holds func() bool, want ...string) {
	l.Helper()
	until(l.T, "never", holds)
	l.wantTaints(name, want...)
}

func requirements(text string) []byte {
	return kubetest.ConfigMap("kube-system", "single", map[string]string{"config": text})
}

const agentRequirement = "- name: istio-cni\n  selector: k8s-app=istio-cni-node\n  namespace: istio-system\n"

func TestLegacy(t *testing.T) {
	l := newLab(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	l.server.Set(requirements(agentRequirement))
	l.node("ready", nodeSpec{taints: []object{oldTaint()}})
	l.pod("ready", "agent-1", "True", yesterday())
	l.node("not-ready", nodeSpec{unready: true})
	l.pod("not-ready", "agent-2", "True", yesterday())
	l.node("without", nodeSpec{})
	l.run()
	l.wantTaints("ready")
	l.wantTaints("not-ready", older)
	l.wantTaints("without", older)
	// A new node comes, and goes.
	l.node("new", nodeSpec{})
	l.wantTaints("new", older)
	l.server.Delete("/api/v1/nodes/new")
	until(t, "it is still counted", func() bool { return l.metric(`istio_cni_taint_nodes{reason="NoAgent"}`) == 1 })
}

func TestRequirementsChangeAndBadOnesChangeNothing(t *testing.T) {
	l := newLab(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	l.server.Set(requirements("\t{"))
	l.node("n", nodeSpec{taints: []object{oldTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.run()
	problems := func(n int) {
		t.Helper()
		until(t, "the bad content is not counted", func() bool { return l.metric("istio_cni_taint_config_problems_total") == n })
	}
	problems(1)
	if l.ready() {
		t.Error("ready without requirements")
	}
	l.server.Set(requirements(agentRequirement))
	l.wantTaints("n")
	until(t, "it is never ready", l.ready)

	l.server.Set(requirements("- {name: a, selektor: b}"))
	problems(2)
	if !l.ready() {
		t.Error("unready because of bad content, although there was good one")
	}
	l.pod("n", "agent", "False", agenttest.Start())
	l.wantTaints("n", older)
	l.pod("n", "agent", "True", agenttest.Start())
	l.wantTaints("n")

	// Two independent requirements in one selector, which different pods meet.
	l.server.Set(requirements("- name: two\n  selector: \"k8s-app=istio-cni-node, app=dns\"\n  namespace: istio-system\n"))
	l.wantTaints("n", older)
	l.podOf("istio-system", "n", "dns", "True", agenttest.Start(), object{"app": "dns"})
	l.wantTaints("n")

	l.server.Delete("/api/v1/namespaces/kube-system/configmaps/single")
	problems(3)
	l.server.Delete(podPath("dns"))
	l.wantTaints("n", older)
	until(t, "no event about the ConfigMap", func() bool {
		return slices.ContainsFunc(l.server.Events(), func(e []byte) bool {
			return strings.Contains(string(e), "InvalidTaintRequirements") && strings.Contains(string(e), "selektor")
		})
	})
}

func TestOnce(t *testing.T) {
	l := newLab(t, legacy())
	l.options.ConfigMap = ConfigMap{"kube-system", "single"}
	l.server.Set(requirements(agentRequirement))
	l.node("ready", nodeSpec{taints: []object{otherTaint(), oldTaint()}})
	l.pod("ready", "agent-1", "True", yesterday())
	l.node("without", nodeSpec{})
	plan, err := Plan(t.Context(), l.options)
	want := []string{
		"node ready: remove: the CNI agent is ready", `node without: add: there is no CNI agent on the node (requirement "istio-cni")`,
	}
	if diff := cmp.Diff(want, plan); diff != "" || err != nil {
		t.Errorf("plan: %v (-want +got):\n%s", err, diff)
	}
	if l.patches() != 0 {
		t.Fatal("the plan changed something")
	}
	if err := Once(t.Context(), l.options); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([][]string{{other}, {older}}, [][]string{l.taints("ready"), l.taints("without")}); diff != "" {
		t.Errorf("taints (-want +got):\n%s", diff)
	}
	if n := l.requests(func(r string) bool { return strings.Contains(r, "/leases") }); n != 0 {
		t.Errorf("%d requests about a lease", n)
	}
	before := l.patches()
	if err := Once(t.Context(), l.options); err != nil || l.patches() != before {
		t.Errorf("the second time: %v, %d patches", err, l.patches()-before)
	}
}

func TestOnceSaysWhatCannotBeDone(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(*lab)
		want    string
	}{
		"no ConfigMap": {func(*lab) {}, "there is no ConfigMap kube-system/single"},
		"bad content":  {func(l *lab) { l.server.Set(requirements("x: y")) }, "reading requirements"},
		"nodes are forbidden": {func(l *lab) {
			l.server.Set(requirements(agentRequirement))
			l.server.FailOn("/nodes?", kubetest.Forbidden, kubetest.Forever)
		}, "watching nodes"},
		"a patch is refused": {func(l *lab) {
			l.server.Set(requirements(agentRequirement))
			l.server.FailOn("PATCH /api/v1/nodes/n", kubetest.BadRequest, kubetest.Forever)
		}, `node "n"`},
		"it takes too long": {func(l *lab) {
			l.server.Set(requirements(agentRequirement))
			l.server.FailOn("/nodes?", kubetest.ServerError, kubetest.Forever)
		}, "it is not done after 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, legacy())
			l.options.ConfigMap = ConfigMap{"kube-system", "single"}
			l.node("n", nodeSpec{})
			test.prepare(l)
			done := make(chan error, 1)
			go func() { done <- Once(t.Context(), l.options) }()
			var err error
			until(t, "it does not end", func() bool {
				l.clock.Step(time.Second)
				select {
				case err = <-done:
					return true
				default:
					return false
				}
			})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestNodeCondition(t *testing.T) {
	l := newLab(t, untaint())
	l.options.Condition = "cni.istio.io/MeshCNIReady"
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	l.run()
	condition := func() object {
		status, _ := l.fetch("/api/v1/nodes/n")["status"].(object)
		list, _ := status["conditions"].([]any)
		for _, one := range list {
			if c, _ := one.(object); c["type"] == l.options.Condition {
				return c
			}
		}
		return nil
	}
	is := func(status, reason string) {
		t.Helper()
		until(t, "the condition is not "+status, func() bool { c := condition(); return c["status"] == status && c["reason"] == reason })
	}
	is("True", "AgentReady")
	l.wantTaints("n")
	l.after(readiness.NoAgent, func() { l.server.Delete(podPath("agent")) })
	if condition()["status"] != "True" {
		t.Error("a short absence is told")
	}
	l.clock.Step(2 * time.Minute)
	is("False", "NoAgent")
	if got := condition()["lastTransitionTime"]; got != agenttest.Start().Add(2*time.Minute).Format(time.RFC3339) {
		t.Errorf("transition at %v", got)
	}
	status, _ := l.fetch("/api/v1/nodes/n")["status"].(object)
	if list, _ := status["conditions"].([]any); len(list) != 3 {
		t.Errorf("%d conditions, want the two others as well", len(list))
	}
	if l.patches() != 3 {
		t.Errorf("%d patches, want a taint and two conditions", l.patches())
	}
}

func TestAnOldStateThatTheWatchTellsLateIsPassedOver(t *testing.T) {
	l := newLab(t, untaint())
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "True", yesterday())
	old := l.server.Object("/api/v1/nodes/n")
	l.run()
	l.wantTaints("n")
	until(t, "no watches", func() bool { return l.server.Watches() == 2 })
	l.server.Tell("MODIFIED", old)
	l.after(readiness.AgentReady, func() { l.pod("n", "agent", "True", agenttest.Start()) })
	// The second node comes after all that.
	l.after(readiness.NoAgent, func() { l.node("m", nodeSpec{}) })
	if l.patches() != 1 {
		t.Errorf("%d patches, want 1", l.patches())
	}
}

func TestHealth(t *testing.T) {
	l := newLab(t, untaint())
	l.server.FailOn("/nodes?", kubetest.ServerError, 3)
	get := func(path string) int {
		response := httptest.NewRecorder()
		l.options.Health.Handler().ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
		return response.Code
	}
	if get("/readyz") != http.StatusServiceUnavailable {
		t.Error("ready before it began")
	}
	l.run()
	until(t, "never ready", func() bool { return get("/readyz") == http.StatusOK })
	if get("/healthz") != http.StatusOK {
		t.Error("not alive")
	}
}

// TestManyNodesAndPods counts what a large cluster costs.
func TestManyNodesAndPods(t *testing.T) {
	const nodes, pods = 500, 5000
	l := newLab(t, adding())
	for i := range nodes {
		name := fmt.Sprintf("node-%03d", i)
		l.node(name, nodeSpec{taints: []object{ourTaint(), otherTaint()}})
		l.pod(name, fmt.Sprintf("agent-%03d", i), "True", yesterday())
	}
	for i := range pods - nodes {
		l.podOf("shop", fmt.Sprintf("node-%03d", i%nodes), fmt.Sprintf("app-%d", i), "True", yesterday(), object{"app": "shop"})
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	begin := time.Now()
	l.run()
	until(t, "some taints stay", func() bool {
		return l.metric(`istio_cni_taint_changes_total{change="remove",result="success"}`) == nodes
	})
	took := time.Since(begin)
	for i := range nodes {
		l.wantTaints(fmt.Sprintf("node-%03d", i), other)
	}
	events := l.requests(func(r string) bool { return strings.Contains(r, "/events") })
	changes := l.patches()
	all := len(l.server.Requests())
	runtime.GC()
	runtime.ReadMemStats(&after)
	t.Logf("%d nodes and %d pods: %d requests (%d patches, %d about events) in %s; the heap grew by %d KiB, the server's history included",
		nodes, pods, all, changes, events, took.Round(time.Millisecond), (int64(after.HeapAlloc)-int64(before.HeapAlloc))/1024)
	if changes != nodes {
		t.Errorf("%d patches, want %d", changes, nodes)
	}
	if events > 60 {
		t.Errorf("%d requests about events, want 60 at most", events)
	}
	// A watch that begins with a list for each of nodes and pods.
	if rest := all - changes - events; rest != 2 {
		t.Errorf("%d other requests, want 2", rest)
	}
}
