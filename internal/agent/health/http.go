package health

import (
	"encoding/json"
	"net/http"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Handler serves /healthz and /readyz, the probe paths of the reference's DaemonSet: 200 or 503 with the reasons as JSON.
func (s *State) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		missing := s.missing()
		answer(w, len(missing) == 0, struct {
			Live   bool   `json:"live"`
			Silent []beat `json:"silent,omitempty"`
		}{len(missing) == 0, missing})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		snapshot := s.Snapshot()
		answer(w, snapshot.Ready, snapshot)
	})
	return mux
}

func answer(w http.ResponseWriter, good bool, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !good {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	text, _ := json.Marshal(body)                       // texts and times always marshal
	_, _ = w.Write(append(printable.Lines(text), '\n')) // the prober may have closed the connection
}
