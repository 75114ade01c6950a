// Package page serves the agent's page: static files over the JSON that the commands use.
//
// It promises that only a browser on this host, or behind "kubectl port-forward", gets an answer (the Host header must be a loopback
// name, which a page of another site that resolves to this address has not), that nothing can be changed by it, and that the
// browser runs no script but the page's own. It decides nothing and holds no state.
//
// Start at Handler.
package page

import (
	"embed"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

//go:embed index.html page.css page.js
var files embed.FS

// policy allows the page's own files and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"

// Handler serves the page and, below api/ and for decisions, the handlers by their path.
func Handler(api map[string]http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	for path, handler := range api {
		mux.Handle("GET "+path, handler)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !local(r.Host) {
			http.Error(w, "only for requests to localhost", http.StatusForbidden)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

// local reports whether a Host header names the loopback interface.
func local(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	address, err := netip.ParseAddr(name)
	return name == "localhost" || err == nil && address.IsLoopback()
}
