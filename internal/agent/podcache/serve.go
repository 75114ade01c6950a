package podcache

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// Service answers plugins.
type Service struct {
	Store   *Store
	Ring    *Ring
	Metrics *metrics.Metrics
	// Audit answers with the status of the node's pods, AuditPod with one pod in detail, Trace with its packets.
	Audit, AuditPod, Trace http.Handler
	// Bundle answers with a part of a bug report.
	Bundle http.Handler

	long sync.Mutex
}

// Handler serves the socket.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(agentapi.PodPattern, s.pod)
	mux.HandleFunc(agentapi.ReportPattern, s.report)
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
	text, err := agentapi.PrintPod(facts, key.UID)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.Metrics.Answered(metrics.LookupFound)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // the plugin may have closed the connection
}

// short is the length up to which reports are read concurrently, in bytes; longer ones are read one at a time.
const short = 64 << 10

// read parses a report. Every call counts: of a report that is too long, or that the plugin could not finish, read parses the
// beginning.
func (s *Service) read(r *http.Request) (agentapi.Report, error) {
	if r.ContentLength < 0 || r.ContentLength > short {
		s.long.Lock()
		defer s.long.Unlock()
	}
	text, _ := io.ReadAll(io.LimitReader(r.Body, agentapi.MaxReport))
	return agentapi.ReadReport(text)
}

func (s *Service) report(w http.ResponseWriter, r *http.Request) {
	report, err := s.read(r)
	if err != nil {
		s.Metrics.ReportRefused()
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// Metrics have closed sets of labels: a plugin of another version may have other reasons.
	if !slices.Contains(sidecar.Reasons(), sidecar.Reason(report.Reason)) {
		report.Detail = report.Reason + " " + report.Detail
		report.Reason = ""
		report.Trim()
	}
	s.Ring.Add(report)
	s.Metrics.Added(report)
	w.WriteHeader(http.StatusOK)
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
