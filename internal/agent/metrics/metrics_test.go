package metrics

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const (
	buildInfo   = "istio_cni_build_info"
	healSeconds = "istio_cni_heal_seconds"
)

// page is a scrape as Prometheus understands it.
type page struct {
	kinds   map[string]string
	helps   map[string]string
	samples map[string]float64 // by name with labels
}

// scrape serves the metrics and reads them by the rules of the text format.
func scrape(t *testing.T, m interface{ Handler() http.Handler }) page {
	t.Helper()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if rec.Code != http.StatusOK || rec.Header().Get("Content-Type") != contentType {
		t.Errorf("answer %d, content type %q", rec.Code, rec.Header().Get("Content-Type"))
	}
	p := page{kinds: map[string]string{}, helps: map[string]string{}, samples: map[string]float64{}}
	header := regexp.MustCompile(`^# (HELP|TYPE) ([a-z_]+) (.+)$`)
	const label = `[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"`
	sample := regexp.MustCompile(`^([a-z_]+)((?:\{` + label + `(?:,` + label + `)*\})?) ([^ ]+)$`)
	helped, family := "", ""
	for line := range strings.SplitSeq(strings.TrimSuffix(rec.Body.String(), "\n"), "\n") {
		if h := header.FindStringSubmatch(line); h != nil && h[1] == "HELP" {
			helped = h[2]
			p.helps[helped] = h[3]
			continue
		} else if h != nil {
			family = h[2]
			if _, twice := p.kinds[family]; twice || helped != family {
				t.Errorf("TYPE of %s is there twice, or not right after its HELP", family)
			}
			p.kinds[family] = h[3]
			continue
		}
		s := sample.FindStringSubmatch(line)
		if s == nil {
			t.Errorf("no line of the format: %q", line)
			continue
		}
		name := s[1]
		if p.kinds[family] == "histogram" {
			name = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		}
		if _, twice := p.samples[s[1]+s[2]]; twice || name != family {
			t.Errorf("twice, or not under the header of its family: %q", line)
		}
		value, err := strconv.ParseFloat(s[3], 64)
		if err != nil {
			t.Errorf("%q: %v", line, err)
		}
		p.samples[s[1]+s[2]] = value
	}
	return p
}

// own returns the samples of the agent without the histogram's.
func (p page) own() map[string]float64 {
	own := map[string]float64{}
	for name, v := range p.samples {
		if strings.HasPrefix(name, "istio_cni_") && !strings.HasPrefix(name, healSeconds) && !strings.HasPrefix(name, buildInfo) {
			own[name] = v
		}
	}
	return own
}

// TestNames_OfTheReference: the metrics of its node agent, and those its dashboards query from a node agent.
func TestNames_OfTheReference(t *testing.T) {
	text, err := os.ReadFile("testdata/reference-names.txt")
	check.OK(t, err)
	p, agents := scrape(t, New("1.31.0")), 0
	for line := range strings.Lines(string(text)) {
		name, program, _ := strings.Cut(strings.TrimSpace(line), " ")
		if program != "agent" {
			continue
		}
		agents++
		check.Equal(t, p.kinds[name], map[bool]string{true: "counter", false: "gauge"}[strings.HasSuffix(name, "_total")], name, "is")
	}
	if agents < 18 {
		t.Errorf("only %d names in the list", agents)
	}
	for series, want := range map[string]float64{
		`istio_build{component="cni",tag="1.31.0"}`: 1, `nodeagent_reconcile_events_total{type="add"}`: 0,
		`nodeagent_reconcile_events_total{type="update"}`: 0, `nodeagent_reconcile_events_total{type="delete"}`: 0,
	} {
		if got, there := p.samples[series]; !there || got != want {
			t.Errorf("%s is %g, there: %t", series, got, there)
		}
	}
}

func TestVersion_Escaped(t *testing.T) {
	p := scrape(t, New("1.2 \"quoted\" back\\slash\nline \xff"))
	if p.samples[`istio_cni_build_info{version="1.2 \"quoted\" back\\slash\nline `+"\ufffd"+`"}`] != 1 {
		t.Errorf("samples: %v", p.samples)
	}
}

// TestMetrics_AtStart: each family has its type and, except where a node has nothing to count, its series with 0. docs/reference.md has
// the values of each label.
func TestMetrics_AtStart(t *testing.T) {
	for name, m := range map[string]interface{ Handler() http.Handler }{
		"agent": New("v"), "repair": NewRepair("v"), "taint": NewTaint("v"),
	} {
		p := scrape(t, m)
		started := map[string]bool{buildInfo: true, healSeconds: true, "istio_cni_ambient_pods": true, "istio_cni_audit_offender": true}
		for name, value := range p.own() {
			check.Equal(t, value, 0, name)
			family, _, _ := strings.Cut(name, "{")
			started[strings.TrimSuffix(family, "_count")] = true
		}
		for family, kind := range p.kinds {
			if strings.HasPrefix(family, "istio_cni_") && !started[family] {
				t.Errorf("%s has no series", family)
			}
			want := "gauge"
			switch {
			case strings.HasSuffix(family, "_total"):
				want = "counter"
			case strings.HasPrefix(family, "istio_cni_") && strings.HasSuffix(family, "_seconds") && family != "istio_cni_audit_oldest_seconds":
				want = "histogram"
			}
			if kind != want || len(p.helps[family]) < 10 {
				t.Errorf("%s has type %q, want %q, and help %q", family, kind, want, p.helps[family])
			}
		}
		if _, shown := p.kinds["istio_cni_install_ready"]; shown != (name == "agent") {
			t.Errorf("%s shows the agent's families: %v", name, shown)
		}
		if _, shown := p.kinds["istio_cni_mesh_pods"]; shown != (name != "taint") {
			t.Errorf("%s shows the families of repair: %v", name, shown)
		}
	}
}

// TestAgent_Counters: package nodepods tests the counters of repairs.
func TestAgent_Counters(t *testing.T) {
	m := New("v")
	const records, ready = `log_records_total{outcome="dropped"}`, "install_ready"
	walk(t, m,
		step{func() { m.Installed(InstallSuccess) }, changes{`installs_total{result="SUCCESS"}`: 1}},
		step{func() { m.Installed(CreateCNIConfigFailure) }, changes{`installs_total{result="CREATE_CNI_CONFIG_FAILURE"}`: 1}},
		step{func() { m.SetReady(true) }, changes{ready: 1}},
		step{func() { m.SetReady(false) }, changes{ready: 0}},
		step{func() { m.Healed(Kubeconfig, time.Second) }, changes{`rewrites_total{artifact="kubeconfig"}`: 1}},
		step{func() { m.RewriteConflict(WriterCilium) }, changes{`config_fights_total{rival="cilium"}`: 1}},
		step{func() { m.RewriteConflict("10-evil.conf\n") }, nil}, // text from the node never becomes a label
		step{func() { m.Polled(true) }, changes{"files_polled": 1}},
		step{func() { m.Polled(false) }, changes{"files_polled": 0}},
		step{func() { m.ConfigRefused(SourceDirectory) }, changes{`config_problems_total{source="directory"}`: 1}},
		step{func() { m.LogRecords(LogDropped, 40) }, changes{records: 40}},
		step{func() { m.LogRecords(LogDropped, 2) }, changes{records: 42}},
		step{func() { m.LogRecords(LogRelayed, 0) }, nil},
		step{m.LogConnectionRefused, changes{`log_connections_refused_total{reason="stranger"}`: 1}},
		step{func() { m.SetReady(true) }, changes{ready: 1}},
		step{func() { m.AmbientFailed(StepZtunnel) }, changes{`ambient_failures_total{step="ztunnel"}`: 1}},
		step{func() { m.EventAnswered(http.StatusOK) }, changes{`plugin_requests_total{response_code="200"}`: 1}},
		step{func() { m.EventAnswered(http.StatusNotFound) }, nil},
		step{func() { m.SetPodState("", PodDrifted) }, changes{`mesh_pods{state="drifted"}`: 1}},
		step{func() { m.SetPodState("", "") }, nil},
		step{func() { m.Repaired("", RepairFail) }, nil},
		step{func() { m.EventReported(eventrecorder.Failed) }, changes{`events_total{result="failed"}`: 1}},
	)
	check.Equal(t, scrape(t, New("v")).samples["istio_cni_install_ready"], 0, "another agent in the process became ready as well")
}

// TestAmbient_Gauges: a node without ambient mode has none, on which an alert about a missing ztunnel would fire.
func TestAmbient_Gauges(t *testing.T) {
	m := New("v")
	const ztunnels, enrolled, pending = "ztunnel_connected", `istio_cni_ambient_pods{state="enrolled"}`, `istio_cni_ambient_pods{state="pending"}`
	got := func() map[string]float64 {
		samples := scrape(t, m).samples
		maps.DeleteFunc(samples, func(name string, _ float64) bool {
			return !slices.Contains([]string{ztunnels, enrolled, pending}, name)
		})
		return samples
	}
	check.Diff(t, "without ambient mode", map[string]float64{}, got())
	m.ReadAmbient(func() AmbientCounts { return AmbientCounts{Ztunnels: 2, Enrolled: 3, Pending: 1} })
	check.Diff(t, "with ambient mode", map[string]float64{ztunnels: 2, enrolled: 3, pending: 1}, got())
}

func TestHistogram_HealTimes(t *testing.T) {
	m := New("v")
	for _, ms := range []time.Duration{0, 1, 2, 1000, 1001, 3_600_000} {
		m.Healed(Config, ms*time.Millisecond)
	}
	got := map[string]float64{}
	for name, v := range scrape(t, m).samples {
		if rest, ok := strings.CutPrefix(name, healSeconds); ok {
			got[rest] = v
		}
	}
	want := map[string]float64{
		`_bucket{le="0.001"}`: 2, `_bucket{le="0.0025"}`: 3, `_bucket{le="0.005"}`: 3, `_bucket{le="0.01"}`: 3,
		`_bucket{le="0.025"}`: 3, `_bucket{le="0.05"}`: 3, `_bucket{le="0.1"}`: 3, `_bucket{le="0.25"}`: 3,
		`_bucket{le="0.5"}`: 3, `_bucket{le="1"}`: 4, `_bucket{le="2.5"}`: 5, `_bucket{le="5"}`: 5, `_bucket{le="10"}`: 5,
		`_bucket{le="30"}`: 5, `_bucket{le="60"}`: 5, `_bucket{le="+Inf"}`: 6, `_count`: 6, `_sum`: 3602.004,
	}
	check.Diff(t, "result", want, got)
}

// TestProcess_Metrics: the process metrics that operators and dashboards query have plausible values.
func TestProcess_Metrics(t *testing.T) {
	p := scrape(t, New("v"))
	for name, least := range map[string]float64{
		"process_cpu_seconds_total": 0.0001, "process_resident_memory_bytes": 1 << 20,
		"process_virtual_memory_bytes": 1 << 20, "process_start_time_seconds": 1.7e9,
		"process_open_fds": 3, "process_max_fds": 10, "go_goroutines": 2, "go_memstats_heap_inuse_bytes": 1 << 10,
		"go_memstats_sys_bytes": 1 << 20, "go_memstats_alloc_bytes_total": 1 << 10,
		`go_info{version="` + runtime.Version() + `"}`: 1,
	} {
		if got, shown := p.samples[name]; !shown || got < least {
			t.Errorf("%s is %v, want at least %v", name, got, least)
		}
	}
	if age := float64(time.Now().Unix()) - p.samples["process_start_time_seconds"]; age < -1 || age > 3600 {
		t.Errorf("started %v s ago", age)
	}
}

func TestScrape_Concurrent(t *testing.T) {
	m := New("v")
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 200 {
				m.Healed(Binary, time.Millisecond)
				m.LogRecords(LogRelayed, 1)
			}
		})
		all.Go(func() { _ = m.Text() })
	}
	all.Wait()
	p := scrape(t, m)
	if p.samples[healSeconds+"_count"] != 800 || p.samples[`istio_cni_log_records_total{outcome="relayed"}`] != 800 {
		t.Error("counts were lost")
	}
}

func TestScrape_Methods(t *testing.T) {
	rec := httptest.NewRecorder()
	New("v").Handler().ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/metrics", nil))
	if rec.Code != http.StatusMethodNotAllowed || rec.Header().Get("Allow") == "" {
		t.Errorf("POST is answered with %d", rec.Code)
	}
}

// step is an action of a test, and the changes of the samples.
type step struct {
	do func()
	changes
}

// changes are new values of samples, by their names without istio_cni_.
type changes map[string]float64

// walk takes the steps in turn, and compares all samples that are not zero.
func walk(t *testing.T, m interface{ Handler() http.Handler }, steps ...step) {
	t.Helper()
	want := map[string]float64{}
	for i, s := range steps {
		s.do()
		for name, value := range s.changes {
			want["istio_cni_"+name] = value
		}
		zero := func(_ string, v float64) bool { return v == 0 }
		maps.DeleteFunc(want, zero)
		got := scrape(t, m).own()
		maps.DeleteFunc(got, zero)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("after step %d (-want +got):\n%s", i, diff)
		}
	}
}

// TestTaint_Counters: package taint tests the other counters.
func TestTaint_Counters(t *testing.T) {
	m := NewTaint("1.2.3")
	const ready = `taint_nodes{reason="AgentReady"}`
	walk(t, m,
		step{func() { m.SetLeader(true) }, changes{"taint_leader": 1}},
		step{func() { m.ReadQueue(func() int { return 3 }) }, changes{"taint_queue_depth": 3}},
		step{func() { m.SetNodeReason("", "AgentReady") }, changes{ready: 1}},
		step{func() { m.SetNodeReason("AgentReady", "AgentReady") }, nil},
		step{func() { m.Decided("something") }, nil},
		step{func() { m.SetLeader(false) }, changes{"taint_leader": 0, "taint_queue_depth": 0, ready: 0}},
		step{func() { m.Changed(ConditionSet, ChangeFailed) }, changes{`taint_changes_total{change="condition",result="failed"}`: 1}},
		step{func() { m.WatchFailed(WatchedPods) }, changes{`taint_watch_troubles_total{resource="pods"}`: 1}},
		step{func() { m.EventReported(eventrecorder.Sent) }, changes{`taint_events_total{result="sent"}`: 1}},
	)
}
