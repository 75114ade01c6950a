package serve

import (
	"net/http"
	"net/http/pprof"
	"time"
)

// profilePatience lets a profile of the usual half minute end, and one of two.
const profilePatience = 150 * time.Second

// Introspection is the port of Go's profiler, below /debug/pprof/. It is local: profiles and the command line are
// nobody's business outside of the pod.
func Introspection(flag, host string, number int) Port {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return Port{Flag: flag, Host: host, Number: number, Handler: mux, Reach: Local, Patience: profilePatience}
}
