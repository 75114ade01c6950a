package decisions

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// Receive returns a handler that adds the reports of plugins.
func (r *Ring) Receive(counted *metrics.Metrics) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		var report agentapi.Report
		if err := json.NewDecoder(io.LimitReader(request.Body, agentapi.MaxReport)).Decode(&report); err != nil {
			counted.ReportRefused()
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		// Labels of metrics are closed sets, but a plugin of another version may have other reasons.
		if !slices.Contains(sidecar.Reasons(), sidecar.Reason(report.Reason)) {
			report.Detail = report.Reason + " " + report.Detail
			report.Reason = ""
		}
		report.Trim()
		r.Add(report)
		counted.Added(report)
		w.WriteHeader(http.StatusOK)
	})
}

// Handler returns all reports as a JSON array, the latest first. It encodes one at a time, to hold no text of all.
func (r *Ring) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "[") // the client may have closed the connection
		for i, one := range r.All() {
			if i > 0 {
				_, _ = io.WriteString(w, ",\n")
			}
			text, _ := json.Marshal(one) // of texts and numbers
			_, _ = w.Write(printable.Lines(text))
		}
		_, _ = io.WriteString(w, "]\n")
	})
}
