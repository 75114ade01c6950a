package metrics

import (
	"slices"
	"strconv"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// LookupResult is the result of a plugin's lookup of a pod.
type LookupResult string

// After a failed lookup the plugin requests the pod from the API server.
const (
	LookupFound  LookupResult = "found"
	LookupFailed LookupResult = "failed"
)

// ResponseCode is the outcome of a plugin's call as a status code of HTTP. The values are the reference's.
type ResponseCode string

// A call succeeds, its report or event cannot be read, or it fails and its pod does not start.
const (
	ResponseOK         ResponseCode = "200"
	ResponseUnreadable ResponseCode = "400"
	ResponseFailed     ResponseCode = "500"
)

// PodEvent is an event of the watch of the node's pods. The values are the reference's.
type PodEvent string

// A pod is new, changed or gone.
const (
	PodAdded   PodEvent = "add"
	PodUpdated PodEvent = "update"
	PodDeleted PodEvent = "delete"
)

// Adds counts the plugins' reports and lookups, and the events of the watch of the node's pods.
type Adds struct {
	adds, seconds, failures, processes, requests, lookups, refused *family
	responses, events                                              *family
}

func newAdds(r *registry) *Adds {
	return &Adds{
		adds: r.declare(counter, "istio_cni_add_total",
			"Pods that plugins decided about, by reason and source of the facts.", addSeries()...),
		seconds: r.declareHistogram("istio_cni_add_duration_seconds", "Time that plugins spent on a pod, by phase, in seconds.",
			[]float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30},
			each("phase", agentapi.Phases()...)...),
		failures:  r.declare(counter, "istio_cni_add_failures_total", "Failed ADDs: the pods do not start until the cause is removed."),
		processes: r.declare(counter, "istio_cni_add_child_processes_total", "Processes that plugins started."),
		requests:  r.declare(counter, "istio_cni_add_api_requests_total", "Requests that plugins sent to the API server."),
		lookups: r.declare(counter, "istio_cni_pod_lookups_total",
			"Pod lookups by plugins, answered or left to the API server.", each("result", LookupFound, LookupFailed)...),
		refused: r.declare(counter, "istio_cni_add_reports_refused_total",
			"Reports of plugins that cannot be read, or name a reason or a source that this version does not know."),
		// These two names are the reference's.
		responses: r.declare(counter, "istio_cni_plugin_requests_total",
			"Calls of plugins that reached the agent, by report or event: 200 done, 500 failed, 400 a report or an event that cannot be read.",
			each("response_code", ResponseOK, ResponseUnreadable, ResponseFailed)...),
		events: r.declare(counter, "nodeagent_reconcile_events_total", "Events of the watch of the node's pods.",
			each("type", PodAdded, PodUpdated, PodDeleted)...),
	}
}

// addSeries returns each source's series, with its possible reasons. Plugins do not report decisions by the runtime's
// annotations.
func addSeries() []string {
	byName := []sidecar.Reason{sidecar.NotKubernetes, sidecar.ExcludedNamespace, sidecar.OwnAgent}
	byFacts := slices.DeleteFunc(sidecar.Reasons(), func(r sidecar.Reason) bool { return slices.Contains(byName, r) })
	return append(pairs(each("reason", byName...), each("source", agentapi.SourceName)),
		pairs(each("reason", byFacts...), each("source", agentapi.SourceAgent, agentapi.SourceAPI))...)
}

// Added counts a plugin's report.
func (a *Adds) Added(r agentapi.Report) {
	if series := join(label("reason", r.Reason), label("source", r.Source)); a.adds.has(series) {
		a.adds.add(1, series)
	} else if r.Error == "" {
		a.refused.add(1, "")
	}
	code := ResponseOK
	if r.Error != "" {
		a.failures.add(1, "")
		code = ResponseFailed
	}
	a.responses.add(1, label("response_code", code))
	for phase, seconds := range r.Seconds {
		if seconds >= 0 {
			a.seconds.observe(seconds, label("phase", phase))
		}
	}
	a.processes.add(r.Processes, "")
	a.requests.add(r.Requests, "")
}

// ReportRefused counts a report that cannot be parsed.
func (a *Adds) ReportRefused() {
	a.refused.add(1, "")
	a.responses.add(1, label("response_code", ResponseUnreadable))
}

// EventAnswered counts the answer to an event of a plugin that sends no report, by its status. Package cmdadd has the statuses.
func (a *Adds) EventAnswered(status int) {
	a.responses.add(1, label("response_code", ResponseCode(strconv.Itoa(status))))
}

// PodSeen counts an event of the watch of the node's pods.
func (a *Adds) PodSeen(e PodEvent) { a.events.add(1, label("type", e)) }

// Answered counts a plugin's lookup of a pod.
func (a *Adds) Answered(r LookupResult) { a.lookups.add(1, label("result", r)) }
