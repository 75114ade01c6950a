package podcache

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func newStore(t *testing.T, server *kubetest.Server) *Store {
	t.Helper()
	api, err := kube.NewClient(kube.Config{
		Kubeconfig: server.Kubeconfig(t),
		Backoff:    &wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 4, Cap: 10 * time.Millisecond},
	})
	check.OK(t, err)
	return NewStore(Options{
		API: api, Node: "n", Log: slog.New(slog.DiscardHandler), Keep: []string{"mark"}, Count: func(metrics.PodEvent) {},
		Ambient: func() *selector.Ambient { return nil },
	})
}

func pod(name, uid, node string, more string) []byte {
	return fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"shop","name":%q,"uid":%q%s},"spec":{"nodeName":%q,
		"containers":[{"name":"app","args":["a"],"env":[{"name":"A","value":"b"}]}]},"status":{}}`, name, uid, more, node)
}

// gets counts the requests for single pods.
func gets(server *kubetest.Server) int {
	count := 0
	for _, r := range server.Requests() {
		if strings.Contains(r, "/pods/") {
			count++
		}
	}
	return count
}

func TestKnownPodsAreNotFetched(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(pod("web", "1", "n", `,"annotations":{"mark":"x","other":"y"}`))
	server.Set(pod("static", "2", "n", `,"annotations":{"kubernetes.io/config.hash":"h"}`))
	server.Set(pod("far", "3", "elsewhere", ""))
	s := newStore(t, server)
	agenttest.Go(t, s.Run)
	agenttest.Eventually(t, "the pods are not delivered", func() bool { return s.Known() == 2 })
	get := func(name, uid string) (sidecar.Facts, error) {
		return s.Facts(t.Context(), kube.PodRef{Namespace: "shop", Name: name, UID: uid}, false)
	}
	facts, err := get("web", "1")
	if err != nil || facts.Annotations["mark"] != "x" || facts.Annotations["other"] != "" || len(facts.Containers) != 0 {
		t.Errorf("got %+v, %v", facts, err)
	}
	// The runtime passes the kubelet's UID of a static pod.
	check.OK(t, check.Err(get("static", "h")))
	check.Equal(t, gets(server), 0, "requests")
	// A pod with another UID is fetched, and a missing one is an error.
	if facts, err := get("far", "3"); err != nil || facts.UID != "3" {
		t.Errorf("got %+v, %v", facts, err)
	}
	for key, want := range map[[2]string]kube.Class{{"web", "old"}: kube.WrongPod, {"none", "1"}: kube.NotFound} {
		check.Equal(t, kube.ClassOf(check.Err(get(key[0], key[1]))), want, key)
	}
	check.Is(t, check.Err(get("web", "")), errNoUID, "without a UID")
}

func TestOneFetchForAllPlugins(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(pod("web", "1", "n", ""))
	server.FailOn("/pods/web", kubetest.Hang, 1)
	s := newStore(t, server)
	var waiting sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 10 {
		waiting.Go(func() {
			if _, err := s.Facts(ctx, kube.PodRef{Namespace: "shop", Name: "web", UID: "1"}, false); err == nil {
				t.Error("a response of a server that hangs")
			}
		})
	}
	agenttest.Eventually(t, "no request", func() bool { return gets(server) > 0 })
	cancel()
	waiting.Wait()
	check.Equal(t, gets(server), 1, "requests")
	server.Heal()
}

// TestFollow_Later: a failing watch is reported once, and a later listener gets the error, too. After its end a listener gets nothing.
func TestFollow_Later(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(pod("a", "1", "n", ""))
	server.Fail(kubetest.Forbidden, kubetest.Forever)
	s := newStore(t, server)
	counted := metrics.New("")
	s.options.Count = counted.PodSeen
	agenttest.Go(t, s.Run)
	agenttest.Eventually(t, "the watch works", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.round.err() != nil })
	first := listen(t, s)
	first.wants("failing true")
	server.Heal()
	first.wants("failing false", "a false", "sync")
	server.Set(pod("b", "2", "n", ""))
	first.wants("b false")
	server.Delete("/api/v1/namespaces/shop/pods/a")
	first.wants("a gone, was false")
	later := listen(t, s)
	later.wants("b false", "sync")
	first.stop()
	later.stop()
	server.Set(pod("c", "3", "n", ""))
	agenttest.Eventually(t, "no pod", func() bool { return s.Known() == 2 })
	first.wants()
	later.wants()
	server.Set(pod("c", "3", "n", `,"labels":{"a":"b"}`))
	for _, want := range []string{`{type="add"} 3`, `{type="update"} 1`, `{type="delete"} 1`} {
		agenttest.Eventually(t, "the counts are wrong: "+want, func() bool {
			return strings.Contains(string(counted.Text()), "\nnodeagent_reconcile_events_total"+want+"\n")
		})
	}
}

// newService returns a service; post sends a report to it.
func newService(t *testing.T) (s *Service, post func(text string) (status int)) {
	t.Helper()
	s = &Service{Ring: &decisions.Ring{}, Metrics: metrics.New(""), Store: newStore(t, kubetest.NewServer(t))}
	return s, func(text string) int { return s.request(t, http.MethodPost, "/v1/report", text).Code }
}

func (s *Service) request(t *testing.T, method, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body)))
	return w
}

func TestReportsAreKeptAndCounted(t *testing.T) {
	service, post := newService(t)
	m := service.Metrics
	for i := range 600 {
		text, _ := json.Marshal(agentapi.Report{
			Pod: fmt.Sprint(i), Reason: "captured", Source: agentapi.SourceAgent, Processes: 2, Requests: 1,
			Seconds: map[agentapi.Phase]float64{agentapi.PhaseTotal: 0.003, "unknown": 1, agentapi.PhaseRead: -1},
		})
		check.Equal(t, post(string(text)), http.StatusOK)
	}
	for text, want := range map[string]int{
		`{"reason":"of the future","source":"moon"}`:        http.StatusOK,
		`{"reason":"","source":"none","error":"it failed"}`: http.StatusOK,
		`[]`:       http.StatusBadRequest,
		`{"pod":1`: http.StatusBadRequest, `{"pod":"` + strings.Repeat("x", agentapi.MaxReport) + `"}`: http.StatusBadRequest,
	} {
		check.Equal(t, post(text), want, text[:min(len(text), 40)])
	}
	w := service.request(t, http.MethodGet, "/v1/decisions", "")
	var all []agentapi.Report
	if err := json.Unmarshal(w.Body.Bytes(), &all); err != nil || len(all) != 512 || all[2].Pod != "599" || all[511].Pod != "90" {
		t.Errorf("%v, %d reports", err, len(all))
	}
	text := string(m.Text())
	for _, want := range []string{
		`istio_cni_add_total{reason="captured",source="agent"} 600`, `istio_cni_add_child_processes_total 1200`,
		`istio_cni_add_api_requests_total 600`, `istio_cni_add_failures_total 1`, `istio_cni_add_reports_refused_total 4`,
		`istio_cni_plugin_requests_total{response_code="200"} 601`, `istio_cni_plugin_requests_total{response_code="400"} 3`,
		`istio_cni_plugin_requests_total{response_code="500"} 1`,
		`istio_cni_add_duration_seconds_bucket{phase="total",le="0.005"} 600`, `istio_cni_add_duration_seconds_count{phase="read"} 0`,
	} {
		check.Contains(t, text, want+"\n")
	}
}

// TestEveryReportIsShown: what a report quotes is no reason to drop it. Its texts are cut and printable, and a kept report does not hold
// the request in memory.
func TestEveryReportIsShown(t *testing.T) {
	service, post := newService(t)
	const reports, bound = 100, 2 << 20
	m := service.Metrics
	used := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	long := strings.Repeat("<\x1b[2J\u009b\n", 1000)
	whole := func(change func(*agentapi.Report)) string {
		r := agentapi.Report{Time: time.Unix(1, 0), Namespace: "shop", Pod: "web", UID: "u", Container: "c", Reason: "captured", Source: agentapi.SourceAgent}
		change(&r)
		text, err := json.Marshal(r)
		check.OK(t, err)
		return string(text)
	}
	for name, text := range map[string]string{
		"a long container": whole(func(r *agentapi.Report) { r.Container = strings.Repeat("c", 40_000) }),
		"a long detail":    whole(func(r *agentapi.Report) { r.Detail = long }),
		"a long error":     whole(func(r *agentapi.Report) { r.Error = long }),
		"phases of its own": whole(func(r *agentapi.Report) {
			r.Seconds = map[agentapi.Phase]float64{}
			for i := range 1000 {
				r.Seconds[agentapi.Phase(fmt.Sprint("phase", i))] = 1
			}
		}),
	} {
		before := strings.Count(string(m.Text()), "\n")
		heap := used()
		for range reports {
			check.Equal(t, post(text), http.StatusOK, name)
		}
		if after := used(); after > heap+bound {
			t.Errorf("%s: %d bytes more for %d reports", name, after-heap, reports)
		}
		r := service.Ring.All()[0]
		printed, _ := json.Marshal(r)
		if r.Namespace != "shop" || r.Pod != "web" || r.UID != "u" || r.Reason != "captured" || len(printed) > 48<<10 {
			t.Errorf("%s: %d bytes: %+v", name, len(printed), r)
		}
		if shown := r.Container + r.Detail + r.Error; strings.ContainsFunc(shown, func(c rune) bool { return !printable.Is(c) }) {
			t.Errorf("%s: not printable: %q", name, shown)
		}
		check.Equal(t, strings.Count(string(m.Text()), "\n"), before, name, "lines of metrics")
	}
	if text := string(m.Text()); !strings.Contains(text, `istio_cni_add_total{reason="captured",source="agent"} 400`+"\n") {
		t.Errorf("some are not counted:\n%s", text)
	}
}

// TestReportsOfManyAtOnceAreKept: any number of concurrent plugins hand their reports to the kernel and end.
func TestReportsOfManyAtOnceAreKept(t *testing.T) {
	const plugins = 1000
	service, _ := newService(t)
	m := service.Metrics
	o := agenttest.SocketOptions(filepath.Join(t.TempDir(), "s"))
	o.Connections, o.KeepAlive = 256, true
	server, err := unixsock.Open(t.Context(), o)
	check.OK(t, err)
	var reporting sync.WaitGroup
	for i := range plugins {
		reporting.Go(func() {
			agent, err := agentapi.Dial(t.Context(), o.Path)
			if err == nil {
				err = agent.Report(t.Context(), agentapi.Report{Pod: fmt.Sprint(i), Reason: "captured", Source: agentapi.SourceAgent})
				_ = agent.Close()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	reporting.Wait() // all reports are in the kernel, and none is read yet
	agenttest.Go(t, func(ctx context.Context) { server.Serve(ctx, service.Handler()) })
	agenttest.Eventually(t, "reports are missing", func() bool {
		return strings.Contains(string(m.Text()), fmt.Sprintf(`istio_cni_add_total{reason="captured",source="agent"} %d`, plugins)+"\n")
	})
}

// TestDecisions_Whole: the client gets all of them, whatever their size.
func TestDecisions_Whole(t *testing.T) {
	service, _ := newService(t)
	server := agenttest.Serve(t, service.Handler(), func(o *unixsock.Options) { o.KeepAlive = true })
	ask := func() []agentapi.Report {
		t.Helper()
		agent, err := agentapi.Dial(t.Context(), server.Path)
		check.OK(t, err)
		defer agent.Close() //nolint:errcheck // no more writes follow
		all, err := agent.Decisions(t.Context())
		if err != nil || all == nil {
			t.Fatal(all, err)
		}
		return all
	}
	check.Equal(t, len(ask()), 0, "decisions")
	for i := range 600 {
		r := agentapi.Report{Pod: fmt.Sprint(i), Detail: strings.Repeat("<", 1<<20), Error: strings.Repeat("<", 1<<20), Container: strings.Repeat("<", 1<<20)}
		r.Trim()
		service.Ring.Add(r)
	}
	if all := ask(); len(all) != 512 || all[0].Pod != "599" || all[511].Pod != "88" {
		t.Errorf("%d decisions", len(all))
	}
}
