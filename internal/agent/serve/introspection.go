package serve

import (
	"net/http"
	"net/http/pprof"
	"time"
)

// profileTimeout is enough for a profile of two minutes; the default profile takes 30 s.
const profileTimeout = 150 * time.Second

// Introspection returns the port of Go's profiler, below /debug/pprof/, and of further handlers by their patterns of
// http.ServeMux. The port is local: profiles and the command line are not for other pods.
func Introspection(flag, host string, number int, more map[string]http.Handler) Port {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	for pattern, handler := range more {
		mux.Handle(pattern, handler)
	}
	return Port{Flag: flag, Host: host, Number: number, Handler: mux, Local: true, Timeout: profileTimeout}
}
