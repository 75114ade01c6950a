package serve

import (
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"time"
)

// profileTimeout is enough for a profile of two minutes; the default profile takes 30 s.
const profileTimeout = 150 * time.Second

// Introspection returns the port of Go's profiler, below /debug/pprof/, and of further handlers by their patterns of
// http.ServeMux. The port is local: profiles and the command line are not for other pods, and not for pages of other sites in a
// browser on this host, of which one of the same site and another port may not change anything either.
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
	return Port{Flag: flag, Host: host, Number: number, Handler: onlyLocal(http.NewCrossOriginProtection().Handler(mux)), Local: true, Timeout: profileTimeout}
}

// onlyLocal refuses what a browser sends for a page of another site: a Host header that is no loopback name, as the name of a
// site that resolves to this address (DNS rebinding), and cross-site requests other than a link to here (Fetch Metadata, W3C).
func onlyLocal(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if crossSite := r.Header.Get("Sec-Fetch-Site") == "cross-site" && r.Header.Get("Sec-Fetch-Mode") != "navigate"; crossSite || !localName(r.Host) {
			http.Error(w, "only for requests to localhost", http.StatusForbidden)
			return
		}
		handler.ServeHTTP(w, r)
	})
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
