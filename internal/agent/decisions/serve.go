package decisions

import (
	"encoding/json"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// short is the maximum length, in bytes, of reports that are read concurrently. Longer reports are read one at a time.
const short = 64 << 10

// read parses a report. It parses the beginning of a report that is too long or incomplete, so that every call is counted.
func read(r *http.Request, long *sync.Mutex) (agentapi.Report, error) {
	if r.ContentLength < 0 || r.ContentLength > short {
		long.Lock()
		defer long.Unlock()
	}
	text, _ := io.ReadAll(io.LimitReader(r.Body, agentapi.MaxReport))
	return agentapi.ReadReport(text)
}

// Receive returns a handler that adds the reports of plugins.
func (r *Ring) Receive(counted *metrics.Metrics) http.Handler {
	var long sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		report, err := read(request, &long)
		if err != nil {
			counted.ReportRefused()
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		// Labels of metrics are closed sets, but a plugin of another version may have other reasons.
		if !slices.Contains(sidecar.Reasons(), sidecar.Reason(report.Reason)) {
			report.Detail = report.Reason + " " + report.Detail
			report.Reason = ""
			report.Trim()
		}
		r.Add(report)
		counted.Added(report)
		w.WriteHeader(http.StatusOK)
	})
}

// Handler returns the reports as JSON, the latest first: all of them, or the page that the query parameters select.
func (r *Ring) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		before, limit := uint64(math.MaxUint64), 2*remembered
		query := request.URL.Query()
		for name, into := range map[string]any{agentapi.BeforeParam: &before, agentapi.LimitParam: &limit} {
			if text := query.Get(name); text != "" {
				if err := json.Unmarshal([]byte(text), into); err != nil {
					http.Error(w, name+": not a number", http.StatusBadRequest)
					return
				}
			}
		}
		w.Header().Set("Content-Type", "application/json")
		text, err := json.MarshalIndent(r.Page(before, limit), "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(append(printable.Lines(text), '\n')) // the client may have closed the connection
	})
}
