package serve

import (
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"runtime"
	"strings"
	"time"
)

// profileTimeout is enough for a profile of two minutes; the default profile takes 30 s.
const profileTimeout = 150 * time.Second

// heapProfileRate is Go's default sampling rate in bytes. The program starts without samples, whose table takes 1.4 MB.
const heapProfileRate = 512 << 10

// Introspection returns the port of handlers by their patterns of http.ServeMux and, if profiles is set, of Go's profiler below
// /debug/pprof/. The port is local: other pods do not reach it. In a browser only the port's own pages, and a user who types
// the address, get an answer. A page of another site, or of another port of this host, may only link to the path /, and gets no
// answer in a frame. Programs, which do not say on whose behalf they ask, get every answer.
func Introspection(flag, host string, number int, profiles bool, more map[string]http.Handler) Port {
	mux := http.NewServeMux()
	if profiles {
		runtime.MemProfileRate = heapProfileRate
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	} else {
		mux.HandleFunc("/debug/pprof/", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "profiles are off: set --profiling (PROFILING, the chart's agent.profiling)", http.StatusNotFound)
		})
	}
	for pattern, handler := range more {
		mux.Handle(pattern, handler)
	}
	return Port{Flag: flag, Host: host, Number: number, Handler: onlyLocal(mux), Local: true, Timeout: profileTimeout}
}

// onlyLocal refuses what a browser sends for a page of another origin, by the headers Origin and Sec-Fetch-Site (Fetch Metadata, W3C),
// and a Host header that is not a loopback name, such as the name of a site that resolves to this address (DNS rebinding).
func onlyLocal(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "frame-ancestors 'none'")
		switch {
		case !localName(r.Host):
			http.Error(w, "only for requests to localhost", http.StatusForbidden)
		case !ownOrigin(r):
			http.Error(w, "not for pages of another site or port, which may only link to /", http.StatusForbidden)
		default:
			handler.ServeHTTP(w, r)
		}
	})
}

// ownOrigin reports whether a request comes from a page of this port, the user or a program, or is a link to the page.
func ownOrigin(r *http.Request) bool {
	if origin := r.Header.Get("Origin"); origin != "" && origin != "http://"+r.Host {
		return false
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin", "none":
		return true
	}
	// The path / has no effect. Destinations other than a document are frames and parts of a page.
	return r.Method == http.MethodGet && r.URL.Path == "/" &&
		r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// localName reports whether a Host header names the loopback interface.
func localName(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	address, err := netip.ParseAddr(name)
	return name == "localhost" || err == nil && address.IsLoopback()
}
