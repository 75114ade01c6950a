package health

import (
	"encoding/json"
	"net/http"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// The paths are those of the reference, which the probes of its DaemonSet ask for.
const (
	livePath  = "/healthz"
	readyPath = "/readyz"
)

// Handler serves /healthz and /readyz: 200 or 503 with a JSON body that says why.
func (s *State) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+livePath, func(w http.ResponseWriter, _ *http.Request) {
		silent := s.Standstill()
		live := len(silent) == 0
		answer(w, status(live), struct {
			Live  bool     `json:"live"`
			Parts []Silent `json:"silent,omitempty"`
		}{live, silent})
	})
	mux.HandleFunc("GET "+readyPath, func(w http.ResponseWriter, _ *http.Request) {
		snapshot := s.Snapshot()
		if snapshot.Parts == nil {
			snapshot.Parts = []Part{}
		}
		answer(w, status(snapshot.Ready), snapshot)
	})
	return mux
}

func status(good bool) int {
	if good {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	text, _ := json.Marshal(body)                       // which has texts and times only
	_, _ = w.Write(append(printable.Lines(text), '\n')) // a prober that went away
}
