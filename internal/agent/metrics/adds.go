package metrics

import (
	"slices"

	"github.com/VictoriaMetrics/metrics"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentcall"
)

const (
	addsTotal      = "istio_cni_add_total"
	addSeconds     = "istio_cni_add_duration_seconds"
	addFailures    = "istio_cni_add_failures_total"
	addProcesses   = "istio_cni_add_child_processes_total"
	addRequests    = "istio_cni_add_api_requests_total"
	podLookups     = "istio_cni_pod_lookups_total"
	reportsRefused = "istio_cni_add_reports_refused_total"
)

// LookupResult is how a plugin's question for a pod ended.
type LookupResult string

// A question that failed is one that the plugin then asks the API server.
const (
	LookupFound  LookupResult = "found"
	LookupFailed LookupResult = "failed"
)

// Adds counts what plugins reported and asked for.
type Adds struct {
	adds, failures, processes, requests, lookups, unknown vector
	seconds                                               map[agentcall.Phase]*histogram
}

func newAdds(set *metrics.Set) *Adds {
	a := &Adds{
		adds:     newVector(set, addsTotal, addSeries()),
		failures: newVector(set, addFailures, []string{""}), processes: newVector(set, addProcesses, []string{""}),
		requests: newVector(set, addRequests, []string{""}), unknown: newVector(set, reportsRefused, []string{""}),
		lookups: newVector(set, podLookups, one("result", LookupFound, LookupFailed)),
		seconds: map[agentcall.Phase]*histogram{},
	}
	for _, phase := range agentcall.Phases() {
		a.seconds[phase] = newHistogram(addSeconds, []string{"phase", string(phase)},
			0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
		set.RegisterMetricsWriter(a.seconds[phase].write)
	}
	return a
}

// addSeries are the reasons that each source can have. What the runtime's annotations decide is not reported.
func addSeries() []string {
	byName := []sidecar.Reason{sidecar.NotKubernetes, sidecar.ExcludedNamespace, sidecar.OwnAgent}
	byFacts := slices.DeleteFunc(sidecar.Reasons(), func(r sidecar.Reason) bool { return slices.Contains(byName, r) })
	return append(pairs("reason", byName, "source", []agentcall.Source{agentcall.SourceName}),
		pairs("reason", byFacts, "source", []agentcall.Source{agentcall.SourceAgent, agentcall.SourceAPI})...)
}

func addFamilies() []family {
	return []family{
		{addsTotal, counter, "Pods that plugins decided about, by reason and by what the decision rests on."},
		{addSeconds, "histogram", "Time that plugins spent on a pod, by phase, in seconds."},
		{addFailures, counter, "Pods that plugins failed: they do not start before that is mended."},
		{addProcesses, counter, "Processes that plugins started."},
		{addRequests, counter, "Requests that plugins sent to the API server."},
		{podLookups, counter, "Questions of plugins for a pod, answered or left to the API server."},
		{reportsRefused, counter, "Reports of plugins that cannot be read, or name a reason or a source that this version does not know."},
	}
}

// Added counts what a plugin reported.
func (a *Adds) Added(r agentcall.Report) {
	if series := labels("reason", r.Reason, "source", string(r.Source)); a.adds[series] != nil {
		a.adds.add(series, 1)
	} else if r.Error == "" {
		a.unknown.add("", 1)
	}
	if r.Error != "" {
		a.failures.add("", 1)
	}
	for phase, seconds := range r.Seconds {
		if h := a.seconds[phase]; h != nil && seconds >= 0 {
			h.observe(seconds)
		}
	}
	a.processes.add("", r.Processes)
	a.requests.add("", r.Requests)
}

// ReportRefused counts what came in place of a report and cannot be read as one.
func (a *Adds) ReportRefused() { a.unknown.add("", 1) }

// Answered counts a plugin's question for a pod.
func (a *Adds) Answered(r LookupResult) { a.lookups.add(labels("result", string(r)), 1) }
