package podinfo

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentcall"
)

// Service answers plugins.
type Service struct {
	Store   *Store
	Ring    *Ring
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// Handler is what the socket serves.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(agentcall.PodPattern, s.pod)
	mux.HandleFunc(agentcall.ReportPattern, s.report)
	mux.Handle(agentcall.DecisionsPattern, s.Ring.Handler())
	return mux
}

func (s *Service) pod(w http.ResponseWriter, r *http.Request) {
	key := kube.PodKey{Namespace: r.PathValue("namespace"), Name: r.PathValue("name"), UID: r.URL.Query().Get("uid")}
	facts, err := s.Store.Facts(r.Context(), key)
	if err != nil {
		status := http.StatusServiceUnavailable
		switch {
		case kube.ClassOf(err) == kube.NotFound:
			status = http.StatusNotFound
		case errors.Is(err, errNoUID):
			status = http.StatusBadRequest
		}
		s.Metrics.Answered(metrics.LookupFailed)
		http.Error(w, err.Error(), status)
		return
	}
	text, err := agentcall.PrintPod(facts, key.UID)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.Metrics.Answered(metrics.LookupFound)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // a plugin that went away
}

// maxReport bounds a report.
const maxReport = 64 << 10

func (s *Service) report(w http.ResponseWriter, r *http.Request) {
	var report agentcall.Report
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxReport)).Decode(&report); err != nil {
		http.Error(w, "not a report: "+err.Error(), http.StatusBadRequest)
		return
	}
	// What is counted is of closed sets: a plugin of another version may know other words.
	if !slices.Contains(sidecar.Reasons(), sidecar.Reason(report.Reason)) {
		report.Detail = report.Reason + " " + report.Detail
		report.Reason = ""
	}
	s.Ring.Add(report)
	s.Metrics.Added(report)
	w.WriteHeader(http.StatusOK)
}

// Handler gives the reports as JSON, the latest first.
func (r *Ring) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		_ = encoder.Encode(r.Latest()) // a client that went away
	})
}
