package podcache

import (
	"errors"
	"net/http"

	"github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// Service answers plugins.
type Service struct {
	Store   *Store
	Ring    *decisions.Ring
	Metrics *metrics.Metrics
	// Audit answers with the status of the node's pods, AuditPod with one pod in detail, Trace with a pod's packets.
	Audit, AuditPod, Trace http.Handler
	// Bundle answers with a part of a bug report.
	Bundle http.Handler
}

// Handler serves the socket.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(agentapi.PodPattern, s.pod)
	mux.Handle(agentapi.ReportPattern, s.Ring.Receive(s.Metrics))
	mux.Handle(agentapi.DecisionsPattern, s.Ring.Handler())
	if s.Audit != nil {
		mux.Handle(agentapi.AuditPattern, s.Audit)
		mux.Handle(agentapi.AuditPodPattern, s.AuditPod)
		mux.Handle(agentapi.TracePattern, s.Trace)
	}
	if s.Bundle != nil {
		mux.Handle(agentapi.BundlePattern, s.Bundle)
	}
	return mux
}

func (s *Service) pod(w http.ResponseWriter, r *http.Request) {
	key := kube.PodRef{Namespace: r.PathValue("namespace"), Name: r.PathValue("name"), UID: r.URL.Query().Get("uid")}
	facts, err := s.Store.Facts(r.Context(), key, r.URL.Query().Get(agentapi.AmbientParam) == "true")
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
	text, err := agentapi.PrintPod(facts, key.UID)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.Metrics.Answered(metrics.LookupFound)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // the plugin may have closed the connection
}
