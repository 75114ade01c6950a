package metrics

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/kube"
)

// repairSamples are race repair's own samples, less those that are zero.
func repairSamples(m *Repair) map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(string(m.Text())) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "istio_cni_") && !strings.HasPrefix(name, buildInfo) && value != "0" {
			found[name] = value
		}
	}
	return found
}

func TestRepairCountsItsOwn(t *testing.T) {
	m := NewRepair("1.2.3")
	if got := repairSamples(m); len(got) != 0 {
		t.Fatalf("not zero at first: %v", got)
	}
	want := map[string]string{}
	const broken, redirected = `istio_cni_mesh_pods{state="broken"}`, `istio_cni_mesh_pods{state="redirected"}`
	for _, step := range []struct {
		do     func()
		change map[string]string
	}{
		{func() { m.Stands("", PodBroken) }, map[string]string{broken: "1"}},
		{func() { m.Stands("", PodBroken) }, map[string]string{broken: "2"}},
		{func() { m.Stands(PodBroken, PodBroken) }, nil},
		{func() { m.Stands(PodBroken, PodRedirected) }, map[string]string{broken: "1", redirected: "1"}},
		{func() { m.Stands(PodRedirected, "") }, map[string]string{redirected: ""}},
		{func() { m.Stands(PodBroken, "") }, map[string]string{broken: ""}},
		{func() { m.Stands("", "") }, nil},
		{func() { m.Stands("", PodDrifted) }, map[string]string{`istio_cni_mesh_pods{state="drifted"}`: "1"}},
		{func() { m.Stands("", PodUnknown) }, map[string]string{`istio_cni_mesh_pods{state="unknown"}`: "1"}},
		{func() { m.Repaired(RepairDelete, RepairFail) }, map[string]string{
			`istio_cni_repair_pods_repaired_total{type="delete",result="fail"}`: "1",
		}},
		{func() { m.Repaired("", RepairFail) }, nil},
		{m.PodsTroubled, map[string]string{"istio_cni_repair_watch_troubles_total": "1"}},
		{func() { m.EventReported(kube.EventFailed) }, map[string]string{`istio_cni_events_total{result="failed"}`: "1"}},
	} {
		step.do()
		maps.Copy(want, step.change)
		maps.DeleteFunc(want, func(_, value string) bool { return value == "" })
		if diff := cmp.Diff(want, repairSamples(m)); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	}
}

func TestEveryFamilyOfRepairIsDescribedAndThereFromTheStart(t *testing.T) {
	response := httptest.NewRecorder()
	NewRepair("1.2.3").Handler().ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	for _, f := range repairFamilies() {
		if !strings.Contains(response.Body.String(), "# TYPE "+f.name+" "+f.kind+"\n"+f.name) {
			t.Errorf("no %s", f.name)
		}
	}
	if strings.Contains(response.Body.String(), "istio_cni_install") {
		t.Error("the agent's families are shown")
	}
	agent := string(New("1.2.3").Text())
	for _, f := range repairFamilies() {
		if strings.Count(agent, "# TYPE "+f.name+" ") != 1 {
			t.Errorf("the agent has %s not once", f.name)
		}
	}
}
