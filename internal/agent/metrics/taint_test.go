package metrics

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube"
)

// taintSamples are the controller's own samples, less those that are zero.
func taintSamples(m *Taint) map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(string(m.Text())) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "istio_cni_taint") && value != "0" {
			found[name] = value
		}
	}
	return found
}

func TestTaintCountsItsOwn(t *testing.T) {
	m := NewTaint("1.2.3", []string{"AgentReady", "NoAgent"})
	if got := taintSamples(m); len(got) != 0 {
		t.Fatalf("not zero at first: %v", got)
	}
	want := map[string]string{}
	for _, step := range []struct {
		do     func()
		change map[string]string
	}{
		{m.Leads, map[string]string{"istio_cni_taint_leader": "1"}},
		{func() { m.Pending(func() int { return 3 }) }, map[string]string{"istio_cni_taint_queue_depth": "3"}},
		{func() { m.Counted("", "NoAgent") }, map[string]string{`istio_cni_taint_nodes{reason="NoAgent"}`: "1"}},
		{func() { m.Counted("NoAgent", "NoAgent") }, nil},
		{func() { m.Counted("NoAgent", "AgentReady") }, map[string]string{
			`istio_cni_taint_nodes{reason="NoAgent"}`: "", `istio_cni_taint_nodes{reason="AgentReady"}`: "1",
		}},
		{func() { m.Decided("NoAgent") }, map[string]string{`istio_cni_taint_decisions_total{reason="NoAgent"}`: "1"}},
		{func() { m.Decided("something") }, nil},
		{m.ConfigRefused, map[string]string{"istio_cni_taint_config_problems_total": "1"}},
		{func() { m.Stands() }, map[string]string{
			"istio_cni_taint_leader": "", "istio_cni_taint_queue_depth": "", `istio_cni_taint_nodes{reason="AgentReady"}`: "",
		}},
	} {
		step.do()
		maps.Copy(want, step.change)
		maps.DeleteFunc(want, func(_, value string) bool { return value == "" })
		if diff := cmp.Diff(want, taintSamples(m)); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	}
	for _, change := range []TaintChange{TaintAdded, TaintRemoved, ConditionSet} {
		for _, result := range []ChangeResult{ChangeDone, ChangeConflict, ChangeFailed} {
			m.Changed(change, result)
			want[fmt.Sprintf("istio_cni_taint_changes_total{change=%q,result=%q}", change, result)] = "1"
		}
	}
	for _, what := range []Followed{FollowedNodes, FollowedPods, FollowedConfigMap} {
		m.Troubled(what)
		want[fmt.Sprintf("istio_cni_taint_watch_troubles_total{resource=%q}", what)] = "1"
	}
	for _, result := range []kube.EventResult{kube.EventSent, kube.EventSuppressed, kube.EventFailed} {
		m.EventReported(result)
		want[fmt.Sprintf("istio_cni_taint_events_total{result=%q}", result)] = "1"
	}
	if diff := cmp.Diff(want, taintSamples(m)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEveryFamilyOfTheTaintControllerIsDescribedAndThereFromTheStart(t *testing.T) {
	response := httptest.NewRecorder()
	NewTaint("1.2.3", []string{"AgentReady"}).Handler().ServeHTTP(response,
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	for _, f := range taintFamilies() {
		if !strings.Contains(response.Body.String(), "# TYPE "+f.name+" "+f.kind+"\n"+f.name) {
			t.Errorf("no %s", f.name)
		}
	}
	if strings.Contains(response.Body.String(), "istio_cni_install") {
		t.Error("the agent's families are shown")
	}
}
